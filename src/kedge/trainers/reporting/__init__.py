"""What a run reports: trackers, tables, model card, the hub."""
