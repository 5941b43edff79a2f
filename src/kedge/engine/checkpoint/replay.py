"""Samples on disk: what an update reads, so that the training half runs again without sampling.

DIR/step-000012.safetensors   tensors          (with several ranks: step-000012-rank-00001....)
DIR/step-000012.json          everything else, and what the recording run said of itself
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from kedge import types
from kedge.engine.checkpoint.serialization import join, read_tensors, split, write_tensors
from kedge.errors import CheckpointError, RolloutError
from kedge.types import PromptBatch, RewardOutput, Rollout, Sampling

FORMAT = 1
_TAG = "__record__"


def pack(value: Any) -> Any:
    """Records, also inside lists, tuples and dicts, as a tree that a checkpoint can hold.

    A dataset column with values that are no JSON is left out, with a warning that names it.
    """
    if is_dataclass(value) and not isinstance(value, type):
        body = {f.name: getattr(value, f.name) for f in fields(value)}
        for name in ("columns",):
            if name in body:
                body[name] = _storable(body[name])
        return {_TAG: type(value).__name__, **{k: pack(v) for k, v in body.items()}}
    if isinstance(value, Mapping):
        return {k: pack(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(pack(v) for v in value)
    return value


def unpack(tree: Any) -> Any:
    """The records that ``pack`` took apart.

    Raises:
        CheckpointError: a record or field that this version of Kedge does not have.
    """
    if isinstance(tree, dict):
        body = {k: unpack(v) for k, v in tree.items() if k != _TAG}
        return _record(tree[_TAG], body) if _TAG in tree else body
    if type(tree) in (list, tuple):
        return type(tree)(unpack(v) for v in tree)
    return tree


class Recorder:
    """Writes what each update reads.

    Args:
        folder: where to.
        about: what replaying must agree with: tokenizer, batch sizes, ... (JSON values).
        rank: this process's rank; every rank records its own rows.
        world_size: number of processes.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        about: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.folder, self.about = Path(folder), dict(about or {})
        self.rank, self.world_size = rank, world_size
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> Path:
        """Record the batch of update ``step`` (0 is the first); returns the JSON file.

        Raises:
            CheckpointError, OSError: the disk refused; the update is not recorded.
        """
        file = _file(self.folder, step, self.rank, self.world_size)
        file.unlink(missing_ok=True)  # the JSON file says that the pair is whole
        tree, tensors = split(
            pack({"rollout": rollout, "reward_output": reward_output}), name="sample"
        )
        head = {
            "format": FORMAT,
            "step": step,
            "world_size": self.world_size,
            "about": self.about,
            "sample": tree,
        }
        part, others = file.with_suffix(".part"), file.with_suffix(".safetensors")
        try:
            write_tensors(others, tensors)
            part.write_text(json.dumps(head), encoding="utf-8")
            part.replace(file)
        except (OSError, CheckpointError):
            part.unlink(missing_ok=True)
            others.unlink(missing_ok=True)
            raise
        return file


class Replay:
    """Reads what a ``Recorder`` wrote.

    Args:
        folder: the recorder's folder.
        about: as for the recorder; a value that differs is refused, naming it.
        rank: this process's rank.
        world_size: number of processes.

    Raises:
        CheckpointError: the folder holds no recording for this rank, one of another number of
            processes, or one of a run that was not like this.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        about: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.folder, self.about = Path(folder), dict(about or {})
        self.rank, self.world_size = rank, world_size
        if not self.steps:
            raise CheckpointError(
                f"{folder} holds no recorded samples for rank {rank} of {world_size}; "
                "record some with save_rollouts"
            )
        self._check(_read(self._at(self.steps[0])))

    @property
    def steps(self) -> list[int]:
        """The updates that are recorded."""
        names = [p.stem.split("-") for p in self.folder.glob("step-*.json")]
        width = 2 if self.world_size == 1 else 4
        own = [n for n in names if len(n) == width and (width == 2 or int(n[3]) == self.rank)]
        return sorted(int(n[1]) for n in own)

    def read(self, step: int) -> tuple[Rollout, RewardOutput]:
        """The batch of update ``step``.

        Raises:
            CheckpointError: not recorded, damaged, or of another run.
        """
        file = self._at(step)
        if not file.exists():
            known = self.steps
            raise CheckpointError(
                f"update {step} is not recorded in {self.folder}: it holds {len(known)} updates, "
                f"{known[0]} to {known[-1]}; set max_steps={known[-1] + 1}, or record more"
            )
        head = _read(file)
        self._check(head)
        sample = unpack(join(head["sample"], read_tensors(file.with_suffix(".safetensors"))))
        return sample["rollout"], sample["reward_output"]

    def _at(self, step: int) -> Path:
        return _file(self.folder, step, self.rank, self.world_size)

    def _check(self, head: Mapping[str, Any]) -> None:
        saved = head["about"]
        wrong = [
            f"{name}: {saved[name]!r} recorded, {now!r} now"
            for name, now in json.loads(json.dumps(self.about)).items()
            if name in saved and saved[name] != now
        ]
        if wrong:
            raise CheckpointError(
                f"{self.folder} was recorded by a run with other settings: {'; '.join(wrong)}"
            )


class Replayed:
    """A recording in the place of prompts, sampler and reward: all three seams in one object.

    Args:
        replay: what to read from.
        rows: rows of a batch on this rank; a recording of another size is refused.
    """

    shares_weights = True  # no weights to copy: nothing is sampled

    def __init__(self, replay: Replay, *, rows: int) -> None:
        self.replay, self.rows = replay, rows
        # by identity of prompts, rollout
        self._samples: dict[int, tuple[Rollout, RewardOutput]] = {}
        first, _ = replay.read(replay.steps[0])
        recorded = first.behavior_logprobs is not None
        self.logprobs: Literal["sampled", "raw", "none"] = "sampled" if recorded else "none"

    def batch(self, step: int) -> PromptBatch:
        """The recorded prompts of update ``step``."""
        sample = self.replay.read(step)
        if len(sample[0]) != self.rows:
            raise CheckpointError(
                f"update {step} in {self.replay.folder} has {len(sample[0])} rows, this run trains "
                f"on {self.rows} per process; use the batch size it was recorded with"
            )
        self._samples[id(sample[0].prompts)] = sample
        return sample[0].prompts

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """The recorded responses to prompts that ``batch`` gave out."""
        sample = self._samples.pop(id(prompts), None)
        if sample is None:
            raise RolloutError("a replayed run answers only the prompts of its recording")
        self._samples[id(sample[0])] = sample
        return sample[0]

    def score(self, rollout: Rollout) -> RewardOutput:
        """The recorded reward output of a rollout that ``generate`` gave out."""
        sample = self._samples.pop(id(rollout), None)
        if sample is None:
            raise RolloutError("a replayed run scores only the responses of its recording")
        return sample[1]

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Nothing to load."""


def _file(folder: Path, step: int, rank: int, world_size: int) -> Path:
    suffix = f"-rank-{rank:05d}" if world_size > 1 else ""
    return folder / f"step-{step:06d}{suffix}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        head = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} is damaged: {e}") from e
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a recording of format {FORMAT}")
    return head


def _record(name: str, body: dict[str, Any]) -> Any:
    made = getattr(types, name, None)
    if not is_dataclass(made) or not isinstance(made, type):
        raise CheckpointError(f"unknown record {name!r}: written by another version of Kedge?")
    unknown = sorted(set(body) - {f.name for f in fields(made)})
    if unknown:
        raise CheckpointError(f"{name} has no field {unknown[0]!r}: written by another version?")
    return made(**body)


def _storable(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    kept: dict[str, list[Any]] = {}
    for name, column in columns.items():
        problem = _why_no_json(column)
        if problem is None:
            kept[name] = list(column)
        else:
            warnings.warn(f"the dataset column {name!r} is not recorded: {problem}", stacklevel=3)
    return kept


def _why_no_json(column: Any) -> str | None:
    try:
        json.dumps(list(column))
    except (TypeError, ValueError) as e:
        return str(e)
    return None
