"""Environments of the programs: ``python -m tests.compat.environments FOLDER``."""
