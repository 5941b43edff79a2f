"""Runs generated programs in a restricted process."""
