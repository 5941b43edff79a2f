"""Supervised and reward training with TRL's trainers (extra ``pipeline``)."""

from kedge.pretrain.reward import train_reward
from kedge.pretrain.supervised import train_supervised

__all__ = ["train_reward", "train_supervised"]
