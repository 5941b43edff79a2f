"""Adapters to third-party packages; each is imported in one folder, lazily."""
