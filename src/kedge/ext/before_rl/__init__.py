"""before_rl."""
