"""Recorded samples, for training again without sampling.

DIR/step-000012.safetensors   tensors          (with several ranks: step-000012-rank-00001....)
DIR/step-000012.json          everything else, and metadata of the recording run
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.checkpoint.checkpoint import report_damage
from kedge.checkpoint.serialization import join, read_tensors, split, write_tensors
from kedge.records import types
from kedge.records.errors import CheckpointError, RolloutError
from kedge.records.types import PromptBatch, RewardOutput, Rollout, Sampling

FORMAT = 1
_TAG = "__record__"


def pack(value: Any) -> Any:
    """Convert records, also in lists, tuples and dicts, to a tree that a checkpoint can store.

    Dataset columns that are not JSON-serializable are left out with a warning.
    """
    if is_dataclass(value) and not isinstance(value, type):
        body = {f.name: getattr(value, f.name) for f in fields(value)}
        if "columns" in body:
            body["columns"] = {n: [*x] for n, x in body["columns"].items() if _is_json(n, x)}
        return {_TAG: type(value).__name__, **{k: pack(v) for k, v in body.items()}}
    if isinstance(value, Mapping):
        return {k: pack(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(pack(v) for v in value)
    return value


def _is_json(name: str, column: Any) -> bool:
    try:
        json.dumps(list(column))
    except (TypeError, ValueError) as e:
        if name != types.LEASES:
            warnings.warn(f"the dataset column {name!r} is not recorded: {e}", stacklevel=5)
        return False
    return True


def unpack(tree: Any) -> Any:
    """Restore the records converted by ``pack``."""
    if type(tree) in (list, tuple):
        return type(tree)(unpack(v) for v in tree)
    if not isinstance(tree, dict):
        return tree
    body = {k: unpack(v) for k, v in tree.items() if k != _TAG}
    if _TAG not in tree:
        return body
    record = getattr(types, tree[_TAG], None)
    if not (isinstance(record, type) and is_dataclass(record)):
        raise CheckpointError(f"unknown record {tree[_TAG]!r}: written by another version?")
    try:
        return record(**body)
    except TypeError as e:
        raise CheckpointError(f"{tree[_TAG]}: {e}; written by another version?") from e


class RolloutRecorder:
    """Records the samples of each iteration, each rank its rows.

    ``settings`` are JSON values that a replay must match: tokenizer, batch sizes, ...
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        settings: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.folder, self.settings = Path(folder), dict(settings or {})
        self.world_size, self._suffix = world_size, _suffix(rank, world_size)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, rollout: Rollout, reward_output: RewardOutput) -> Path:
        """Record the batch of iteration ``step``, all or nothing; returns the JSON file."""
        file = self.folder / f"step-{step:06d}{self._suffix}.json"
        file.unlink(missing_ok=True)  # written last: a pair without its JSON file is incomplete
        sample = pack({"rollout": rollout, "reward_output": reward_output})
        tree, tensors = split(sample, name="sample")
        head: dict[str, Any] = {"about": self.settings, "format": FORMAT, "step": step}
        head["world_size"] = self.world_size
        temporary, tensor_file = file.with_suffix(".part"), file.with_suffix(".safetensors")
        try:
            write_tensors(tensor_file, tensors)
            temporary.write_text(json.dumps({**head, "sample": tree}), encoding="utf-8")
            temporary.replace(file)
        except (OSError, CheckpointError):
            temporary.unlink(missing_ok=True)
            tensor_file.unlink(missing_ok=True)
            raise
        return file


class RolloutReplay:
    """The recording of a ``RolloutRecorder`` as prompt source, rollout engine and reward source.

    It must have the same ``settings`` and world size, and batches of ``rows`` rows on this rank.
    """

    shares_weights = True  # nothing is sampled, so no weights are copied

    def __init__(
        self,
        folder: str | Path,
        *,
        settings: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        rows: int | None = None,
    ) -> None:
        self.folder, self.rows = Path(folder), rows
        self._settings = json.loads(json.dumps(dict(settings or {})))
        self._suffix = _suffix(rank, world_size)
        if not self.steps:
            raise CheckpointError(
                f"{folder} has no recorded samples for rank {rank} of {world_size}; "
                "record them with save_rollouts"
            )
        # keyed by id() of prompts or rollout
        self._samples: dict[int, tuple[Rollout, RewardOutput]] = {}
        first, _ = self.read(self.steps[0])
        recorded = first.behavior_logprobs is not None
        self.logprob_kind: Literal["sampled", "raw", "none"] = "sampled" if recorded else "none"

    @property
    def steps(self) -> list[int]:
        """The recorded iterations, in order."""
        pattern = re.compile(rf"step-(\d+){self._suffix}")
        names = [pattern.fullmatch(file.stem) for file in self.folder.glob("step-*.json")]
        return sorted(int(name[1]) for name in names if name)

    def read(self, step: int) -> tuple[Rollout, RewardOutput]:
        """The batch of iteration ``step``."""
        file = self.folder / f"step-{step:06d}{self._suffix}.json"
        if not file.is_file():
            steps = self.steps
            raise CheckpointError(
                f"iteration {step} is not recorded in {self.folder}, which has {len(steps)}, "
                f"{steps[0]} to {steps[-1]}; set max_steps={steps[-1] + 1}, or record more"
            )
        with report_damage(self.folder, file.name):
            head = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(head, dict) or head.get("format") != FORMAT:
                raise CheckpointError(f"{file} is not a recording of format {FORMAT}")
            self._check_settings(head["about"])
            sample = unpack(join(head["sample"], read_tensors(file.with_suffix(".safetensors"))))
            rollout, reward_output = sample["rollout"], sample["reward_output"]
            _check(rollout, reward_output)
        return rollout, reward_output

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        wrong = [
            f"{name}: {saved[name]!r} recorded, {now!r} now"
            for name, now in self._settings.items()
            if name in saved and saved[name] != now
        ]
        if wrong:
            raise CheckpointError(
                f"{self.folder} was recorded by a run with other settings: {'; '.join(wrong)}"
            )

    def batch(self, step: int) -> PromptBatch:
        """The recorded prompts of iteration ``step``."""
        rollout, reward_output = self.read(step)
        if self.rows is not None and len(rollout) != self.rows:
            raise CheckpointError(
                f"iteration {step} in {self.folder} must have {self.rows} rows per process, "
                f"got {len(rollout)}; use the batch size of the recording"
            )
        self._samples[id(rollout.prompts)] = rollout, reward_output
        return rollout.prompts

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


def _check(rollout: Any, reward_output: Any) -> None:
    """Check types, shapes and kinds of numbers: a recording may come from elsewhere."""
    if not (isinstance(rollout, Rollout) and isinstance(reward_output, RewardOutput)):
        raise TypeError("it must hold a Rollout and a RewardOutput")
    rows, prompts = len(rollout.terminated), rollout.prompts
    wide, tokens = (rows, rollout.ids.shape[-1]), (rows, prompts.ids.shape[-1])
    expected = {
        "ids": (rollout.ids, wide, torch.int64),
        "loss_mask": (rollout.loss_mask, wide, torch.bool),
        "response_mask": (rollout.response_mask, wide, torch.bool),
        "terminated": (rollout.terminated, (rows,), torch.bool),
        "policy_version": (rollout.policy_version, (rows,), torch.int64),
        "prompts.ids": (prompts.ids, tokens, torch.int64),
        "prompts.mask": (prompts.mask, tokens, torch.bool),
        "scores": (reward_output.scores, (rows,), torch.float32),
        "valid": (reward_output.valid, (rows,), torch.bool),
        "behavior_logprobs": (rollout.behavior_logprobs, wide, torch.float32),
        "token_rewards": (reward_output.token_rewards, wide, None),  # float32 before 0.1
    }
    for name, (x, shape, dtype) in expected.items():
        if x is not None and (x.shape != shape or dtype not in (None, x.dtype)):
            raise ValueError(
                f"{name} must be {dtype} of shape {shape}, got {x.dtype} of {tuple(x.shape)}"
            )


def _suffix(rank: int, world_size: int) -> str:
    return f"-rank-{rank:05d}" if world_size > 1 else ""
