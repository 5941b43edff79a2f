"""Sampling and scoring: when a batch is sampled, and which weights it is sampled with."""
