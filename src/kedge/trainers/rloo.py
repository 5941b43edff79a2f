"""RLOO for language models: several responses per prompt instead of a value model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback
from typing_extensions import Unpack

from kedge.algorithms import Algorithm, rloo
from kedge.algorithms.transforms import mask_truncated
from kedge.config.rloo import RLOOConfig
from kedge.math.losses import Clip
from kedge.models.load import find_tokenizer, pick_tokenizer
from kedge.records.errors import ConfigError
from kedge.suggestions import suggest_names
from kedge.trainers.base import TrainerShell
from kedge.trainers.options import loading_options
from kedge.trainers.spec import SharedArguments, TrainerSpec, log_trl_names, rename_arguments

_OLDER_NAMES = {
    **{"config": "args", "tokenizer": "processing_class", "policy": "model"},
    **{"ref_policy": "ref_model", "reward_model": "reward_funcs"},
}


class RLOOArguments(SharedArguments, total=False):
    """The keyword arguments of ``RLOOTrainer``, in addition to those of every trainer.

    Args:
        args: every option; see ``RLOOConfig``.
        model, reward_funcs, train_dataset, eval_dataset, processing_class: as in ``PPOTrainer``.
        callbacks, optimizers, peft_config, ref_model, data_collator: as in ``PPOTrainer``.
        reward_processing_classes: tokenizers of reward models that differ from the policy's.
        config, tokenizer, policy, ref_policy, reward_model: the names of TRL up to 0.21;
            ``reward_model`` may also be a function of texts (prompt and completion),
            ``f(list[str]) -> list[float]``.
    """

    model: str | nn.Module | None
    reward_funcs: Any
    args: RLOOConfig | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    reward_processing_classes: Any
    callbacks: list[TrainerCallback] | None
    optimizers: tuple[Any, Any]
    peft_config: Any
    ref_model: str | nn.Module | None
    data_collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | None
    config: RLOOConfig | None
    tokenizer: Any
    policy: str | nn.Module | None
    ref_policy: str | nn.Module | None
    reward_model: Any


def build_rloo(args: RLOOConfig, reward_weights: Sequence[float] | None = None) -> Algorithm:
    """RLOO with the options and the filter of the config."""
    assert args.cliprange is not None  # the config fills in what is unset
    algorithm = rloo(
        cliprange=Clip(args.cliprange, args.cliprange_high),
        kl_estimator=args.kl_estimator,
        ratio_level=args.ratio_level,
        token_level_kl=args.token_level_kl,
        normalize_reward=args.normalize_reward,
        reward_clip_range=args.reward_clip_range,
        normalize_advantage=bool(args.normalize_advantage),
        credit=args.credit,
    )
    return mask_truncated(algorithm) if args.mask_truncated_completions else algorithm


@suggest_names("argument", config=RLOOConfig, also=RLOOArguments.__optional_keys__)
class RLOOTrainer(TrainerShell):
    """Trains a causal language model with RLOO against a reward.

    Arguments are keywords, with the names of TRL up to 0.21 or of TRL 0.22 and later.

    Args:
        unnamed: positional arguments, which are an error.
        arguments: see ``RLOOArguments``.

    Raises:
        ConfigError: invalid or conflicting options, both names of one argument, or positional
            arguments.
        DataError: invalid prompts.
    """

    SPEC = TrainerSpec(
        name="RLOO", config=RLOOConfig, algorithm=build_rloo, metric_names=log_trl_names
    )

    def __init__(self, *unnamed: Any, **arguments: Unpack[RLOOArguments]) -> None:
        if unnamed:
            raise ConfigError(
                f"RLOOTrainer takes keyword arguments only, got {len(unnamed)} positional: their"
                " order differs between TRL 0.21 and 0.22; use model=, reward_funcs=, args=,"
                " train_dataset= (or policy=, reward_model=, config=)"
            )
        bound = rename_arguments(arguments, _OLDER_NAMES)
        args = bound.pop("args", None)
        if arguments.get("reward_model") is not None:
            given = bound.get("processing_class")
            loading = loading_options(args) if isinstance(args, RLOOConfig) else {}
            tokenizer = find_tokenizer(given, bound.get("model"), loading)
            bound["processing_class"] = pick_tokenizer(given, tokenizer)
            bound["reward_funcs"] = score_texts(bound["reward_funcs"], tokenizer)
        super().__init__(args, **bound)


def score_texts(reward: Any, tokenizer: Any) -> Any:
    """Adapt a reward function of TRL up to 0.21 from texts to token ids."""
    if not callable(reward) or isinstance(reward, nn.Module):
        return reward

    def score(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
        rows = [a + b for a, b in zip(prompt_ids, completion_ids, strict=True)]
        scores: list[float] = reward(tokenizer.batch_decode(rows, skip_special_tokens=True))
        return scores

    score.__name__ = getattr(reward, "__name__", type(reward).__name__)
    return score
