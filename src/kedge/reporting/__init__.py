"""Output of a run: trackers, tables, pushes, the report page, the doctor."""
