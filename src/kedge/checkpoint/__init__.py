"""Checkpoints and recorded rollouts."""
