"""RLHF end to end on a CPU, in one command: ``kedge demo``."""
