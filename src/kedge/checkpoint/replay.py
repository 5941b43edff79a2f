"""Recorded samples, for training again without sampling.

DIR/step-000012.safetensors   tensors          (with several ranks: step-000012-rank-00001....)
DIR/step-000012.json          everything else, and metadata of the recording run
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
from kedge.checkpoint.serialization import join, read_tensors, split, write_tensors
from kedge.errors import CheckpointError, RolloutError
from kedge.types import PromptBatch, RewardOutput, Rollout, Sampling

FORMAT = 1
_TAG = "__record__"


def pack(value: Any) -> Any:
    """Convert records, also in lists, tuples and dicts, to a tree that a checkpoint can store.

    Dataset columns that are not JSON-serializable are left out with a warning.
    """
    if is_dataclass(value) and not isinstance(value, type):
        body = {f.name: getattr(value, f.name) for f in fields(value)}
        if "columns" in body:
            body["columns"] = _storable_columns(body["columns"])
        return {_TAG: type(value).__name__, **{k: pack(v) for k, v in body.items()}}
    if isinstance(value, Mapping):
        return {k: pack(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(pack(v) for v in value)
    return value


def unpack(tree: Any) -> Any:
    """Restore the records converted by ``pack``.

    Raises:
        CheckpointError: a record or field unknown to this version of Kedge.
    """
    if isinstance(tree, dict):
        body = {k: unpack(v) for k, v in tree.items() if k != _TAG}
        return _build_record(tree[_TAG], body) if _TAG in tree else body
    if type(tree) in (list, tuple):
        return type(tree)(unpack(v) for v in tree)
    return tree


class Recorder:
    """Records the samples of each iteration.

    Args:
        folder: output folder.
        about: settings that a replay must match: tokenizer, batch sizes, ... (JSON values).
        rank: this process's rank; each rank records its rows.
        world_size: number of ranks.
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
        """Record the batch of iteration ``step`` (from 0); returns the JSON file.

        Raises:
            CheckpointError, OSError: writing failed; the iteration is not recorded.
        """
        file = _file(self.folder, step, self.rank, self.world_size)
        file.unlink(missing_ok=True)  # the JSON file marks the pair as complete
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
        temporary, tensor_file = file.with_suffix(".part"), file.with_suffix(".safetensors")
        try:
            write_tensors(tensor_file, tensors)
            temporary.write_text(json.dumps(head), encoding="utf-8")
            temporary.replace(file)
        except (OSError, CheckpointError):
            temporary.unlink(missing_ok=True)
            tensor_file.unlink(missing_ok=True)
            raise
        return file


class Replay:
    """Reads the recording of a ``Recorder``.

    Args:
        folder: the recorder's folder.
        about: as for the recorder; values that differ raise an error.
        rank: this process's rank.
        world_size: number of ranks.

    Raises:
        CheckpointError: no recording for this rank and world size, or different settings.
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
                f"{folder} has no recorded samples for rank {rank} of {world_size}; "
                "record them with save_rollouts"
            )
        self._check(_read(self._at(self.steps[0])))

    @property
    def steps(self) -> list[int]:
        """The recorded iterations, in order."""
        names = [p.stem.split("-") for p in self.folder.glob("step-*.json")]
        width = 2 if self.world_size == 1 else 4
        local = [n for n in names if len(n) == width and (width == 2 or int(n[3]) == self.rank)]
        return sorted(int(n[1]) for n in local)

    def read(self, step: int) -> tuple[Rollout, RewardOutput]:
        """The batch of iteration ``step``.

        Raises:
            CheckpointError: not recorded, damaged, or from another run.
        """
        file = self._at(step)
        if not file.exists():
            steps = self.steps
            raise CheckpointError(
                f"iteration {step} is not recorded in {self.folder}, which has {len(steps)}, "
                f"{steps[0]} to {steps[-1]}; set max_steps={steps[-1] + 1}, or record more"
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
    """A recording used as prompt source, rollout engine and reward source.

    Args:
        replay: the recording.
        rows: rows of a batch on this rank, which the recording must match.
    """

    shares_weights = True  # nothing is sampled, so no weights are copied

    def __init__(self, replay: Replay, *, rows: int) -> None:
        self.replay, self.rows = replay, rows
        # by id() of prompts or rollout
        self._samples: dict[int, tuple[Rollout, RewardOutput]] = {}
        first, _ = replay.read(replay.steps[0])
        recorded = first.behavior_logprobs is not None
        self.logprobs: Literal["sampled", "raw", "none"] = "sampled" if recorded else "none"

    def batch(self, step: int) -> PromptBatch:
        """The recorded prompts of iteration ``step``."""
        sample = self.replay.read(step)
        if len(sample[0]) != self.rows:
            raise CheckpointError(
                f"iteration {step} in {self.replay.folder} must have {self.rows} rows per process, "
                f"got {len(sample[0])}; use the batch size of the recording"
            )
        self._samples[id(sample[0].prompts)] = sample
        return sample[0].prompts

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """The recorded responses to prompts returned by ``batch``."""
        sample = self._samples.pop(id(prompts), None)
        if sample is None:
            raise RolloutError("a replayed run can only use the prompts of its recording")
        self._samples[id(sample[0])] = sample
        return sample[0]

    def score(self, rollout: Rollout) -> RewardOutput:
        """The recorded reward output of a rollout returned by ``generate``."""
        sample = self._samples.pop(id(rollout), None)
        if sample is None:
            raise RolloutError("a replayed run can only score the responses of its recording")
        return sample[1]

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Does nothing."""


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


def _build_record(name: str, body: dict[str, Any]) -> Any:
    cls = getattr(types, name, None)
    if not is_dataclass(cls) or not isinstance(cls, type):
        raise CheckpointError(f"unknown record {name!r}: written by another version of Kedge?")
    unknown = sorted(set(body) - {f.name for f in fields(cls)})
    if unknown:
        raise CheckpointError(f"{name} has no field {unknown[0]!r}: written by another version?")
    return cls(**body)


def _storable_columns(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    problems = {name: _json_error(column) for name, column in columns.items()}
    for name, problem in problems.items():
        if problem is not None:
            warnings.warn(f"the dataset column {name!r} is not recorded: {problem}", stacklevel=3)
    return {name: list(column) for name, column in columns.items() if problems[name] is None}


def _json_error(column: Any) -> str | None:
    try:
        json.dumps(list(column))
    except (TypeError, ValueError) as e:
        return str(e)
    return None
