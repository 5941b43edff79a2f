"""Commands that read runs and models."""
