"""Pipelines of several commands."""
