"""Compares two sets of completions after training."""
