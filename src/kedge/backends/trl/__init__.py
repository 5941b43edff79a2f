"""The steps before reinforcement learning, by TRL's trainers (extra ``pipeline``)."""

from kedge.backends.trl.reward import train_reward
from kedge.backends.trl.supervised import train_supervised

__all__ = ["train_reward", "train_supervised"]
