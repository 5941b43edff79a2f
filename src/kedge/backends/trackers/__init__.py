"""Trackers for metrics and completions: files, terminal, memory, hub; curves at the end."""

from kedge.backends.trackers.base import Jsonl, Many, Memory, write_whole
from kedge.backends.trackers.curves import draw_curves
from kedge.backends.trackers.hub_tables import HubTables
from kedge.backends.trackers.progress import Screen
from kedge.backends.trackers.tables import Tables

__all__ = ["HubTables", "Jsonl", "Many", "Memory", "Screen", "Tables", "draw_curves", "write_whole"]
