"""Reward functions over HTTP."""
