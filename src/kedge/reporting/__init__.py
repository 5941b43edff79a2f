"""What a run says: trackers, tables, pushes, the report page, the doctor."""
