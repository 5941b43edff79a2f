"""Timings against peers, each a ratio measured in one run."""
