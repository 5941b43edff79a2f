"""Trackers, tables, model card and hub uploads of a run."""
