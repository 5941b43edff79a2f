"""Builds everything a run needs from the user's arguments."""
