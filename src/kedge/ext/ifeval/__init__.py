"""Instructions that a program can check, as in IFEval."""
