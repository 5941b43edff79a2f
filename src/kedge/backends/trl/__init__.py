"""Supervised and reward training with TRL's trainers (extra ``pipeline``)."""

from kedge.backends.trl.reward import train_reward
from kedge.backends.trl.supervised import train_supervised

__all__ = ["train_reward", "train_supervised"]
