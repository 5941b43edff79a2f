"""What attaches to Kedge through entry points alone; the core works without it."""
