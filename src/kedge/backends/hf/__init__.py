"""Policies, values and rollouts on transformers models."""
