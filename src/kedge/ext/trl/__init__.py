"""The names and defaults of TRL, and its step-by-step API."""
