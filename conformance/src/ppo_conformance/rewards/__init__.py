"""Look for holes in a reward function: ``conformance test-reward``."""
