"""Environments of other libraries: Gymnasium, TextArena, OpenEnv, NeMo Gym, verifiers."""
