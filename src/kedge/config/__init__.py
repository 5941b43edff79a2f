"""Public options and how they are resolved into typed settings."""
