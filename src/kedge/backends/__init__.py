"""Adapters to third-party packages; each package is imported lazily, in one folder only."""
