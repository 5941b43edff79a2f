"""A reward model that is an adapter on the policy's own base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.backends.hf.decode import get_base_model
from kedge.backends.hf.model import get_backbone
from kedge.backends.hf.reference import AdapterReference
from kedge.errors import ConfigError

_SCORE = ("score.weight", "score.modules_to_save.weight", "classifier.weight")


class RewardAdapter:
    """An adapter and its score head.

    Args:
        policy: the PEFT model that holds the adapter beside the policy's own.
        name: the adapter's name in it.
        score: float [labels, H], the head.
    """

    def __init__(self, policy: Any, name: str, score: Tensor) -> None:
        self.policy, self.name = policy, name
        self.weight = score.to(next(policy.parameters()).device)
        self._switch = AdapterReference(policy, name)

    @classmethod
    def load(cls, policy: Any, source: str | Path, name: str) -> RewardAdapter:
        """Put the adapter of ``source`` (folder or hub name), frozen, beside the policy's own.

        Raises:
            ConfigError: the policy is no PEFT model, or the adapter has no score head.
        """
        if not hasattr(policy, "peft_config"):
            raise ConfigError(
                "reward_adapter needs a policy that is an adapter too, so that both share one "
                "base; pass peft_config"
            )
        from peft.utils.save_and_load import load_peft_weights

        weights = load_peft_weights(str(source), device="cpu")
        held = [v for k, v in weights.items() if k.endswith(_SCORE)]
        if len(held) != 1:
            raise ConfigError(
                f"the adapter {source} has no score head (one weight named score), so it cannot "
                "be a reward model; train it with task_type SEQ_CLS"
            )
        before = policy.active_adapter
        trains = [(p, p.requires_grad) for p in policy.parameters()]
        policy.load_adapter(str(source), adapter_name=name, is_trainable=False)
        policy.set_adapter(before)
        for p, flag in trains:
            p.requires_grad_(flag)
        return cls(policy, name, held[0].float())

    @torch.no_grad()
    def score(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Float32 [B, T, labels]: the score of each prefix of rows int64 [B, T]."""
        was_training = self.policy.training
        self.policy.eval()
        try:
            with self._switch.active():
                trunk = get_backbone(get_base_model(self.policy))
                assert trunk is not None  # AdapterReference took the model apart
                device = next(self.policy.parameters()).device
                seen = None if mask is None else mask.to(device)
                out = trunk(input_ids=ids.to(device), attention_mask=seen, use_cache=False)
        finally:
            self.policy.train(was_training)
        return out.last_hidden_state.float() @ self.weight.T
