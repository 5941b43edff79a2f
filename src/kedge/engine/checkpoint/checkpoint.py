"""Atomic checkpoints: a killed process never leaves a broken one.

Layout of ``output_dir/checkpoint-12``:

    manifest.json                   size and CRC-32 of every other file; written last
    state.json                      step, world size, settings, and the state without its tensors
    state-learner.optimizer.safetensors, ...    tensors: one file per part, or per key of the part;
                                    tensors also in model files are stored only there
    shards/                         sharded tensors, written by all ranks
    rank-00000.json, .safetensors   state of a single rank
    ...                             written by ``write_models``: models, trainer_state.json

At startup: ``tidy``, ``latest_good``, ``load``.  While training: ``save``, then ``rotate``.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.engine.checkpoint.dedup import find_duplicates, read_duplicates
from kedge.engine.checkpoint.folders import (
    FORMAT,
    STATE,
    checkpoints,
    latest_good,
    parse_step,
    publish,
    read_json,
    rotate,
    saving_folder,
    tidy,
    verify,
    write_json,
    write_manifest,
)
from kedge.engine.checkpoint.serialization import join, read_tensors, split, write_tensors
from kedge.engine.checkpoint.shards import stored_tensors, write_shards
from kedge.errors import CheckpointError, DamagedCheckpointError, KedgeError, way_out

__all__ = [
    "Checkpoint",
    "checkpoints",
    "differences",
    "latest_good",
    "load",
    "load_latest",
    "load_one",
    "loading",
    "parse_step",
    "rotate",
    "save",
    "tidy",
    "verify",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint."""

    folder: Path
    step: int
    parts: Mapping[str, Any]  # as passed to ``save``
    local: Any  # state of this rank, None if there is none
    world_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def save(
    output_dir: str | Path,
    step: int,
    parts: Mapping[str, Any],
    *,
    local: Any = None,
    settings: Mapping[str, Any] | None = None,
    write_models: Callable[[Path], None] | None = None,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] | None = None,
) -> Path:
    """Write ``output_dir/checkpoint-{step}``.  Every rank must call this, on a shared file system.

    Args:
        output_dir: folder of all checkpoints of the run.
        step: iterations finished.
        parts: state shared by all ranks, by name ("learner", "kl", ...): trees of tensors,
            numbers, strings, booleans and None.  Rank 0 writes it; others may pass {}, unless it
            has sharded tensors, of which each rank writes its shards.
        local: tree of this rank only (its samples in flight), or None.
        settings: options that affect results, as JSON values; ``load`` compares them.
        write_models: called on every rank with the folder being written, to add model files.
        rank: this process's rank.
        world_size: number of ranks.
        barrier: waits for all ranks; needed if ``world_size`` > 1.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a value cannot be stored, or writing failed (the unfinished checkpoint is
            removed, earlier ones are untouched).
    """
    final = Path(output_dir) / f"checkpoint-{step}"
    temporary = saving_folder(final)
    wait = barrier or _no_barrier(world_size)
    try:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        wait()
        if local is not None:
            _write_local(temporary, rank, local)
        if write_models is not None:
            write_models(temporary)
        encoded, tensors = split(dict(parts))
        sharded = {label: x for label, x in tensors.items() if isinstance(x, DTensor)}
        if sharded:
            wait()  # until the model files are complete
        shards = write_shards(temporary, sharded) if sharded else {}
        if rank == 0:
            whole = {label: x for label, x in tensors.items() if label not in sharded}
            head = {"step": step, "world_size": world_size, "settings": dict(settings or {})}
            _write_shared(temporary, head | {"shards": shards}, encoded, whole)
        wait()
        if rank == 0:
            write_manifest(temporary)
            publish(temporary, final)
        wait()
    except BaseException as e:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        cause = e.__cause__ if isinstance(e, CheckpointError) else e
        if isinstance(cause, OSError | SafetensorError):
            raise CheckpointError(
                f"could not write {final}: {cause}; {_recovery_hint(final, cause)}"
            ) from e
        raise
    return final


def _recovery_hint(failed: Path, cause: BaseException) -> str:
    earlier = [folder.name for folder in checkpoints(failed.parent)]
    if not earlier:
        return f"{way_out(cause)}, or choose another output_dir; there is no earlier checkpoint"
    return f"{way_out(cause)}; resume_from_checkpoint=True continues from {earlier[-1]}"


def load(
    folder: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    settings: Mapping[str, Any] | None = None,
    must_match: Collection[str] = (),
    verified: bool = False,
) -> Checkpoint:
    """Read a checkpoint into CPU memory; sharded tensors are left as ``StoredTensor``.

    Args:
        folder: a ``checkpoint-N`` folder written by ``save``.
        rank: this process's rank.
        world_size: current number of ranks.
        settings: options of this run; differences from the saved ones are listed in a warning,
            since results will differ from an uninterrupted run.
        must_match: names in ``settings`` (nested ones as "a.b") that raise instead of warning.
        verified: True if ``verify`` or ``latest_good`` has just checked the folder.

    Raises:
        CheckpointError: missing, damaged, from another world size although ranks have local state,
            or with other settings named in ``must_match``.
    """
    folder = Path(folder)
    if not verified:
        verify(folder)
    with loading(folder):
        head = read_json(folder / STATE)
        if head.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} must have format {FORMAT}, got {head.get('format')!r}; use the version"
                " of Kedge that wrote it"
            )
        _check_ranks(folder, head["world_size"], world_size)
        if settings is not None:
            _check_settings(folder, head["settings"], settings, must_match)
        tensors: dict[str, Any] = stored_tensors(folder, head.get("shards", {}))
        for file in head["files"]:
            tensors |= read_tensors(folder / file)
        tensors |= read_duplicates(folder, head.get("duplicates", {}))
        parts = join(head["parts"], tensors)
        if not isinstance(parts, dict):
            raise DamagedCheckpointError(
                f"parts in {STATE} must be a mapping, got {str(parts)[:40]!r}"
            )
        return Checkpoint(
            folder=folder,
            step=int(head["step"]),
            parts=parts,
            local=_read_local(folder, rank),
            world_size=head["world_size"],
            settings=head["settings"],
        )


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Context for reading or restoring a checkpoint; errors from invalid contents become damage.

    Raises:
        DamagedCheckpointError: names the folder and the problem.
    """
    try:
        yield
    except DamagedCheckpointError as error:
        problem = str(error)
        if str(folder) in problem:  # already in the message
            raise
        raise DamagedCheckpointError(f"{folder} is damaged: {problem}") from error
    except KedgeError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{STATE} cannot be loaded ({type(error).__name__}: {error})"
        raise DamagedCheckpointError(f"{folder} is damaged: {problem}") from error


def load_one(folder: str | Path, attempt: Callable[[Path], None]) -> None:
    """Load the checkpoint that the user specified.

    Args:
        folder: the checkpoint.
        attempt: restores it.

    Raises:
        CheckpointError: missing, damaged (names an earlier one), or from another run.
    """
    folder = Path(folder)
    verify(folder)
    try:
        with loading(folder):
            attempt(folder)
    except DamagedCheckpointError as error:
        earlier = [x for x in checkpoints(folder.parent) if parse_step(x) < parse_step(folder)]
        hint = f"; resume from an earlier one, such as {earlier[-1]}" if earlier else ""
        raise DamagedCheckpointError(f"{error}{hint}") from error


def load_latest(
    output_dir: str | Path,
    attempt: Callable[[Path], None],
    *,
    anywhere: Callable[[bool], bool] = bool,
) -> Path | None:
    """Load the newest intact checkpoint; damaged ones are named in a warning.

    Args:
        output_dir: folder of all checkpoints of the run.
        attempt: restores a checkpoint; must overwrite the state left by a failed attempt.
        anywhere: whether a flag is true on any rank, so that all ranks load the same one.

    Returns:
        Its folder, or None if there is no checkpoint.

    Raises:
        CheckpointError: all are damaged, or one is from another run.
    """
    folder = latest_good(output_dir)
    while folder is not None:
        problem: CheckpointError | None = None
        try:
            with loading(folder):
                attempt(folder)
        except DamagedCheckpointError as error:
            problem = error
        if not anywhere(problem is not None):
            return folder
        problem = problem or CheckpointError(f"another rank cannot load {folder}")
        older = latest_good(output_dir, before=folder)
        if older is None:
            raise problem
        warnings.warn(f"{problem}. Resuming from {older} instead.", stacklevel=2)
        folder = older
    return None


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Settings that differ: ``name -> "A in the checkpoint, B now"``, nested ones as ``a.b``."""
    saved, now = _flatten(saved), _flatten(now)
    return {
        name: f"{_text(saved, name)} in the checkpoint, {_text(now, name)} now"
        for name in sorted({*saved, *now})
        if _text(saved, name) != _text(now, name)
    }


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, x in settings.items():
        flat |= (
            _flatten(x, f"{prefix}{name}.") if isinstance(x, Mapping) else {f"{prefix}{name}": x}
        )
    return flat


def _text(settings: Mapping[str, Any], name: str) -> str:
    """A setting as JSON, so that a tuple equals the list it was saved as."""
    return json.dumps(settings[name], sort_keys=True) if name in settings else "absent"


def _no_barrier(world_size: int) -> Callable[[], None]:
    if world_size > 1:
        raise ValueError(f"world_size={world_size} needs a barrier that waits for all ranks")
    return lambda: None


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _local_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.json"))


def _write_local(folder: Path, rank: int, local: Any) -> None:
    encoded, tensors = split(local, name=_rank_name(rank))
    write_tensors(folder / f"{_rank_name(rank)}.safetensors", tensors)
    write_json(folder / f"{_rank_name(rank)}.json", encoded)


def _read_local(folder: Path, rank: int) -> Any:
    file = folder / f"{_rank_name(rank)}.json"
    if not file.exists():
        return None
    return join(read_json(file), read_tensors(file.with_suffix(".safetensors")))


def _write_shared(
    folder: Path, head: Mapping[str, Any], encoded: Any, tensors: Mapping[str, Tensor]
) -> None:
    in_models = find_duplicates(folder, tensors)  # model files are already written
    duplicates = {label: places[0] for label, places in in_models.items()}
    groups: dict[str, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        if name not in duplicates:
            groups.setdefault(_group(name), {})[name] = x
    for file, members in groups.items():
        write_tensors(folder / file, members)
    body = {"files": sorted(groups), "duplicates": duplicates, "parts": encoded}
    write_json(folder / STATE, {"format": FORMAT, **head, **body})


def _group(name: str) -> str:
    """File of a tensor: state/learner/optimizer/0/m -> state-learner.optimizer.safetensors."""
    _, *path = name.split("/")
    words = path[:2] if len(path) > 2 else path[:1]
    return f"state-{re.sub(r'[^A-Za-z0-9_.-]', '_', '.'.join(words))}.safetensors"


def _check_ranks(folder: Path, saved: int, now: int) -> None:
    if saved == now:
        return
    if _local_files(folder):
        raise CheckpointError(
            f"{folder} has per-rank state of {saved} processes, this run has {now}: "
            f"start {saved} processes"
        )
    warnings.warn(
        f"{folder} was written by {saved} processes, this run has {now}: results will differ "
        "unless the global batch size is the same",
        stacklevel=3,
    )


def _check_settings(
    folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], must_match: Collection[str]
) -> None:
    changed = differences(saved, now)
    fatal = [f"{k}: {v}" for k, v in changed.items() if k in must_match]
    if fatal:
        raise CheckpointError(
            f"{folder} belongs to a run with other settings ({'; '.join(fatal)}); "
            "use the saved values, or another output_dir"
        )
    if changed:
        listed = "; ".join(f"{k}: {v}" for k, v in changed.items())
        warnings.warn(f"resuming {folder} with other settings: {listed}", stacklevel=3)
