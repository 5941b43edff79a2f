"""Environments of other libraries: Gymnasium, OpenEnv, NeMo Gym, verifiers."""
