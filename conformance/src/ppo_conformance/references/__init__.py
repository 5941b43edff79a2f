"""Two independent computations of every family."""
