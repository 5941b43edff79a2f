"""Sampling and scoring: schedulers, weight sync, dynamic sampling."""
