"""Batch sizes and estimated memory of a run, before weights are loaded."""
