"""Environments of other libraries.  Each needs its package: ``'kedge-rl[gymnasium]'``."""

from kedge.environments.adapters.gymnasium import Gymnasium
from kedge.environments.adapters.nemo_gym import NeMoGym
from kedge.environments.adapters.openenv import OpenEnv
from kedge.environments.adapters.textarena import TextArena
from kedge.environments.adapters.verifiers import Verifiers

__all__ = ["Gymnasium", "NeMoGym", "OpenEnv", "TextArena", "Verifiers"]
