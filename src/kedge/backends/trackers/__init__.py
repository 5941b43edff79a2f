"""Where metrics and completions go: files, the screen, memory; curves at the end."""

from kedge.backends.trackers.base import Jsonl, Many, Memory
from kedge.backends.trackers.curves import draw_curves
from kedge.backends.trackers.progress import Screen

__all__ = ["Jsonl", "Many", "Memory", "Screen", "draw_curves"]
