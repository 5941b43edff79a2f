"""Public trainers: thin shells over the engine."""
