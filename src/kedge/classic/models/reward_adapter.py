"""A reward model in the form of an adapter on the policy's base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.classic.models.encoder_decoder import build_parts
from kedge.errors import ConfigError
from kedge.learner.reference import AdapterReference
from kedge.models.model import get_backbone
from kedge.rollout.embedded.decode import get_base_model

_SCORE = ("score.weight", "score.modules_to_save.weight", "classifier.weight")


class RewardAdapter:
    """An adapter and its score head.

    Args:
        policy: the PEFT model with this adapter in addition to the policy's own.
        name: name of the adapter in it.
        score: float [labels, H], the score head.
    """

    def __init__(self, policy: Any, name: str, score: Tensor) -> None:
        self.policy, self.name = policy, name
        self.weight = score.to(next(policy.parameters()).device)
        self._switch = AdapterReference(policy, name, build_parts)

    @classmethod
    def load(cls, policy: Any, source: str | Path, name: str) -> RewardAdapter:
        """Load the adapter ``source`` (folder or hub name), frozen, next to the policy's own.

        Raises:
            ConfigError: the policy is not a PEFT model, or the adapter has no score head.
        """
        if not hasattr(policy, "peft_config"):
            raise ConfigError(
                "reward_adapter needs a PEFT policy, so that both adapters share one base; pass "
                "peft_config"
            )
        from peft.utils.save_and_load import load_peft_weights

        weights = load_peft_weights(str(source), device="cpu")
        heads = [v for k, v in weights.items() if k.endswith(_SCORE)]
        if len(heads) != 1:
            raise ConfigError(
                f"the adapter {source} must have a score head (one weight named score) to be a "
                "reward model; train it with task_type SEQ_CLS"
            )
        before = policy.active_adapter
        grad_flags = [(p, p.requires_grad) for p in policy.parameters()]
        policy.load_adapter(str(source), adapter_name=name, is_trainable=False)
        policy.set_adapter(before)
        for p, flag in grad_flags:
            p.requires_grad_(flag)
        return cls(policy, name, heads[0].float())

    @torch.no_grad()
    def score(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Float32 [B, T, labels]: the score of each prefix of rows int64 [B, T]."""
        was_training = self.policy.training
        self.policy.eval()
        try:
            with self._switch.active():
                backbone = get_backbone(get_base_model(self.policy))
                assert backbone is not None  # checked by AdapterReference
                device = next(self.policy.parameters()).device
                attention_mask = None if mask is None else mask.to(device)
                out = backbone(
                    input_ids=ids.to(device), attention_mask=attention_mask, use_cache=False
                )
        finally:
            self.policy.train(was_training)
        return out.last_hidden_state.float() @ self.weight.T
