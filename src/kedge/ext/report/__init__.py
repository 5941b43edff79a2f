"""Reads the log of a run: one HTML page, findings with advice, curves of several runs."""
