"""Sampling with transformers, in this process."""
