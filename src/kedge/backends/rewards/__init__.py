"""Reward models and reward functions."""
