"""Public options, and how they become typed parts."""
