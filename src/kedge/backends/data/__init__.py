"""Prompts from datasets."""
