"""Public fakes and tiny models, for tests of Kedge and of code built on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kedge.records.errors import RolloutError
from kedge.records.types import PromptBatch, Receipt, RewardOutput, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ScriptedRollouts:
    """A rollout engine that returns scripted token ids.

    Args:
        responses: ``responses[step][row]`` are the token ids (list or 1-D tensor) for row ``row``
            of the whole batch at the ``step``-th call.  A response ends after its first stop token;
            later tokens are ignored.
    """

    shares_weights = True
    logprob_kind: Literal["sampled", "raw", "none"] = "none"

    def __init__(self, responses: Sequence[Sequence[Sequence[int] | Tensor]]) -> None:
        self.responses = responses
        self.calls = 0
        self.version = 0

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """The scripted responses for the next call.

        Raises:
            RolloutError: the script has too few steps or rows.
        """
        if self.calls >= len(self.responses):
            raise RolloutError(
                f"the script has {len(self.responses)} steps, but step {self.calls} was requested"
            )
        script = self.responses[self.calls]
        self.calls += 1
        if int(prompts.row.max()) >= len(script):
            raise RolloutError(
                f"step {self.calls - 1} of the script has {len(script)} rows, but row"
                f" {int(prompts.row.max())} was requested"
            )
        rows = [torch.as_tensor(script[int(r)], dtype=torch.int64) for r in prompts.row]
        truncated = [row[: sampling.max_new_tokens] for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(truncated, batch_first=True)
        lengths = torch.tensor([len(p) for p in truncated])
        slots = torch.arange(ids.shape[1])
        stop = torch.isin(ids, torch.tensor(sampling.stop_ids, dtype=ids.dtype))
        stop &= slots < lengths[:, None]
        before = stop.long().cumsum(1) - stop.long()
        response_mask = (slots < lengths[:, None]) & (before == 0)
        return Rollout(
            prompts=prompts,
            ids=ids * response_mask,
            loss_mask=response_mask,
            response_mask=response_mask,
            terminated=stop.any(1),
            policy_version=torch.full((len(ids),), self.version),
        )

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Store the version; there are no weights to load."""
        self.version = version
        return None


class FunctionReward:
    """A reward source that calls ``f(rollout) -> float32 [B]``."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def score(self, rollout: Rollout) -> RewardOutput:
        """The scores of the function."""
        scores = torch.as_tensor(self.function(rollout), dtype=torch.float32)
        return RewardOutput(scores=scores, valid=torch.ones(len(rollout), dtype=torch.bool))


class ConstantReward(FunctionReward):
    """A reward source that gives every response the same score."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__(lambda rollout: torch.full((len(rollout),), value))


def tiny_policy(
    family: Literal["llama", "gpt2", "gpt_neox", "qwen2"] = "llama", *, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """A randomly initialized causal language model of a few thousand weights, float32.

    Args:
        family: model architecture.
        seed: seed of the weights.
        config: ``vocab_size`` (64), ``hidden_size`` (32), ``layers`` (2), ``heads`` (4),
            ``max_positions`` (128), and fields of the model's configuration.
    """
    from transformers import AutoModelForCausalLM

    return _build(AutoModelForCausalLM, family, seed, config)


def tiny_reward_model(
    family: Literal["llama", "gpt2", "gpt_neox", "qwen2"] = "llama", *, seed: int = 1, **config: Any
) -> PreTrainedModel:
    """A sequence-classification model with one label, otherwise like ``tiny_policy``."""
    from transformers import AutoModelForSequenceClassification

    config = {"num_labels": 1, "pad_token_id": 0} | config
    return _build(AutoModelForSequenceClassification, family, seed, config)


def _build(kind: Any, family: str, seed: int, config: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig

    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads",
             "max_positions": "max_position_embeddings"}  # fmt: skip
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "max_positions": 128,
    }
    options = {names.get(name, name): x for name, x in (sizes | config).items()}
    options = {"bos_token_id": 1, "eos_token_id": 1} | options
    if family != "gpt2":
        shape = {
            "intermediate_size": 2 * options["hidden_size"],
            "num_key_value_heads": options["num_attention_heads"],
        }
        options = shape | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(AutoConfig.for_model(family, **options))
        return model
