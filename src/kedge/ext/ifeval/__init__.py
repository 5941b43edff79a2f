"""ifeval."""
