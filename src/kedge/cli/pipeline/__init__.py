"""Pipelines of several stages."""
