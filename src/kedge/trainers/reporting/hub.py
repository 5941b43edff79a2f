"""Model cards and pushes to the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.backends.hub import Hub, repo_name
from kedge.errors import ConfigError
from kedge.trainers.reporting.model_card import write_model_card


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Algorithm, base model and data of a run, for the model card."""

    algorithm: str
    base_model: str | None
    datasets: tuple[str, ...]
    rewards: tuple[str, ...]


def provenance(
    algorithm: str, policy: Any, dataset: Any, reward_model: Any, reward_funcs: Any
) -> Provenance:
    """The names of a run's models and data, as far as they are known."""
    base = getattr(getattr(policy, "config", None), "_name_or_path", "") or None
    named = getattr(getattr(dataset, "info", None), "dataset_name", None)
    return Provenance(
        algorithm=algorithm,
        base_model=base,
        datasets=(named,) if named else (),
        rewards=tuple(_name(r) for r in [*_listed(reward_model), *_listed(reward_funcs)]),
    )


def write_card(
    made_of: Provenance,
    args: Any,
    log_history: Sequence[dict[str, Any]],
    *,
    about: Mapping[str, Any],
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> Path:
    """Write ``README.md`` into ``output_dir``; ``about`` is the content of ``run.json``."""
    if not args.output_dir:
        raise ConfigError("output_dir must be set to write a model card")
    return write_model_card(
        args.output_dir,
        model_name=model_name or Path(args.hub_model_id or args.output_dir).name,
        algorithm=made_of.algorithm,
        base_model=made_of.base_model,
        datasets=(dataset_name,) if dataset_name else made_of.datasets,
        rewards=made_of.rewards,
        args=args,
        log_history=log_history,
        command=about.get("command", ""),
        links=about.get("links", {}),
        curves="curves.png" if (Path(args.output_dir) / "curves.png").is_file() else None,
        tags=[tags] if isinstance(tags, str) else tags or (),
    )


def build_hub(args: Any, *, token: str | None = None, revision: str | None = None) -> Hub:
    """The repository that the config names."""
    return Hub(
        repo_name(args.hub_model_id, args.output_dir),
        token=token or args.hub_token,
        private=args.hub_private_repo is not False,  # private if unset
        revision=revision or args.hub_revision,
    )


def pushing(args: Any) -> list[PushOnSave]:
    """The callback that pushes during training, if ``push_to_hub`` is set."""
    return [PushOnSave(build_hub(args))] if args.push_to_hub else []


def _listed(x: Any) -> list[Any]:
    if x is None:
        return []
    return list(x) if isinstance(x, list | tuple) else [x]


def _name(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    config = getattr(reward, "config", None)
    return (
        getattr(config, "_name_or_path", "")
        or getattr(reward, "__name__", "")
        or type(reward).__name__
    )


class PushOnSave(TrainerCallback):
    """Pushes after each save as ``hub_strategy`` says; acts on rank 0 only.

    The repository is created when training begins, so that an invalid token fails early.

    Args:
        hub: the repository.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Create the repository."""
        if state.is_world_process_zero:
            self.hub.create()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Push the checkpoint just written."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            self.hub.push_checkpoint(folder, str(getattr(args.hub_strategy, "value", "end")))
