"""The classic step API: Kedge and TRL 0.11.4, side by side."""
