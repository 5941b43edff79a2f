"""Atomic checkpoints: a killed process never leaves a broken one.

Layout of ``output_dir/checkpoint-12``:

    manifest.json                   size and CRC-32 of every other file; written last
    state.json                      step, world size, settings, and the state without its tensors
    state-learner.optimizer.safetensors, ...    tensors: one file per part, or per key of the part
    shards/                         sharded tensors, written by all ranks
    rank-00000.json, .safetensors   state of a single rank
    ...                             written by ``write_models``: models, trainer_state.json

A folder is written as ``.saving-checkpoint-N``, flushed to disk and renamed, so that a folder named
``checkpoint-N`` is always complete.  At startup: ``tidy``, ``load_latest``.  While training:
``save``, then ``rotate``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.checkpoint.serialization import (
    join,
    read_tensors,
    split,
    stored_tensors,
    write_shards,
    write_tensors,
)
from kedge.records.errors import CheckpointError, DamagedCheckpointError, KedgeError, way_out
from kedge.redaction import digest, redact

logger = logging.getLogger(__name__)
FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_SAVING, _OLD, _DELETING = ".saving-", ".old-", ".deleting-"

_HASHES = {  # values are hashes, so a message stands for them
    "prompts": "prompts: not those of the checkpoint",
    "reference": "reference: not that of the checkpoint, so the KL is to another model from now on",
}


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

    If writing fails, the unfinished checkpoint is removed, and earlier ones are untouched.

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
    """
    final = Path(output_dir) / f"checkpoint-{step}"
    temporary = final.with_name(_SAVING + final.name)
    wait = barrier or (lambda: None)
    try:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        wait()
        if local is not None:
            encoded, tensors = split(local, name=f"rank-{rank:05d}")
            write_tensors(temporary / f"rank-{rank:05d}.safetensors", tensors)
            write_json(temporary / f"rank-{rank:05d}.json", encoded)
        if write_models is not None:
            write_models(temporary)
        head = {"step": step, "world_size": world_size, "settings": redact(settings or {}, digest)}
        _write_state(temporary, dict(parts), head, rank)
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
            hint = ", or choose another output_dir; there is no earlier checkpoint"
            if earlier := checkpoints(output_dir):
                hint = f"; resume_from_checkpoint=True continues from {earlier[-1].name}"
            raise CheckpointError(
                f"could not write {final}: {cause}; {way_out(cause)}{hint}"
            ) from e
        raise
    return final


def _write_state(folder: Path, parts: dict[str, Any], head: dict[str, Any], rank: int) -> None:
    """Write the state of all ranks: sharded tensors on every rank, the rest on rank 0."""
    encoded, tensors = split(parts)
    sharded = {label: x for label, x in tensors.items() if isinstance(x, DTensor)}
    shards = write_shards(folder, sharded) if sharded else {}
    if rank > 0:
        return
    files: dict[str, dict[str, Tensor]] = {}
    for label, x in tensors.items():
        if label not in sharded:  # to files such as state-learner.optimizer.safetensors
            _, *path = label.split("/")
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", ".".join(path[: 2 if len(path) > 2 else 1]))
            files.setdefault(f"state-{name}.safetensors", {})[label] = x
    for file, members in files.items():
        write_tensors(folder / file, members)
    body = {"shards": shards, "files": sorted(files), "parts": encoded}
    write_json(folder / STATE, {"format": FORMAT, **head, **body})


def load(
    folder: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    settings: Mapping[str, Any] | None = None,
    verified: bool = False,
) -> Checkpoint:
    """Read a checkpoint into CPU memory; sharded tensors are left as ``StoredTensor``.

    A warning lists where ``settings`` of this run differ from the saved ones, since results will
    differ from an uninterrupted run.  Another world size is an error if ranks have local state.
    ``verified``: ``verify`` has just checked the folder.
    """
    folder = Path(folder)
    if not verified:
        verify(folder)
    with report_damage(folder):
        head = read_json(folder / STATE)
        if head.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} must have format {FORMAT}, got {head.get('format')!r}; use the version"
                " of Kedge that wrote it"
            )
        _check_ranks(folder, head["world_size"], world_size)
        if settings is not None:
            _check_settings(folder, head["settings"], settings)
        tensors: dict[str, Any] = stored_tensors(folder, head.get("shards", {}))
        for file in head["files"]:
            tensors |= read_tensors(folder / file)
        own, local = folder / f"rank-{rank:05d}.json", None
        if own.exists():
            local = join(read_json(own), read_tensors(own.with_suffix(".safetensors")))
        return Checkpoint(
            folder=folder,
            step=int(head["step"]),
            parts=dict(join(head["parts"], tensors)),
            local=local,
            world_size=head["world_size"],
            settings=head["settings"],
        )


@contextmanager
def report_damage(folder: Path, file: str = STATE) -> Iterator[None]:
    """Context for reading or restoring a checkpoint; errors in it name the folder as damaged."""
    try:
        yield
    except KedgeError as error:
        if str(folder) not in str(error):
            damage = " is damaged" if isinstance(error, DamagedCheckpointError) else ""
            error.args = (f"{folder}{damage}: {error}", *error.args[1:])
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        problem = f"{file} cannot be loaded ({type(error).__name__}: {error})"
        raise DamagedCheckpointError(f"{folder} is damaged: {problem}") from error


def load_one(folder: str | Path, attempt: Callable[[Path], object]) -> None:
    """Load the checkpoint that the user named by ``attempt``; if damaged, name an earlier one."""
    folder = Path(folder)
    verify(folder)
    try:
        with report_damage(folder):
            attempt(folder)
    except DamagedCheckpointError as error:
        earlier = [x for x in checkpoints(folder.parent) if parse_step(x) < parse_step(folder)]
        hint = f"; resume from an earlier one, such as {earlier[-1]}" if earlier else ""
        raise DamagedCheckpointError(f"{error}{hint}") from error


def load_latest(
    output_dir: str | Path,
    attempt: Callable[[Path], object] = lambda folder: None,
    *,
    anywhere: Callable[[bool], bool] = bool,
) -> Path | None:
    """Load the newest intact checkpoint, if there is one; damaged ones are named in a warning.

    ``attempt`` restores a checkpoint, and must overwrite the state left by a failed attempt;
    ``anywhere`` is whether a flag is true on any rank, so that all ranks load the same one.
    """
    problems: list[str] = []
    for folder in reversed(checkpoints(output_dir)):
        problem = None
        try:
            verify(folder)
            with report_damage(folder):
                attempt(folder)
        except DamagedCheckpointError as error:
            problem = str(error)
        if not anywhere(problem is not None):
            for text in problems:
                logger.warning("%s. Resuming from %s instead.", text, folder)
            return folder
        problems.append(problem or f"another rank cannot load {folder}")
    if problems:
        raise CheckpointError(f"all checkpoints in {output_dir} are damaged: {'; '.join(problems)}")
    return None


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as ``a.b`` in JSON, so that a tuple equals the list it was saved as."""
    flat: dict[str, str] = {}
    for name, x in settings.items():
        if isinstance(x, Mapping):
            flat |= _flatten(x, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(x, sort_keys=True)
    return flat


def _check_ranks(folder: Path, saved: int, now: int) -> None:
    if saved == now:
        return
    if any(folder.glob("rank-*.json")):
        raise CheckpointError(
            f"{folder} has per-rank state of {saved} processes, this run has {now}: "
            f"start {saved} processes"
        )
    logger.warning(
        "%s was written by %d processes, this run has %d: results will differ unless the global"
        " batch size is the same",
        *(folder, saved, now),
    )


def _check_settings(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    # Files of earlier releases may hold what is a digest now.
    before, after = (_flatten(redact(settings, digest)) for settings in (saved, now))
    changed = [
        _HASHES.get(name, f"{name}: {old} in the checkpoint, {new} now")
        for name in sorted({*before, *after})
        if (old := before.get(name, "absent")) != (new := after.get(name, "absent"))
    ]
    if changed:
        logger.warning("resuming %s with other settings: %s", folder, "; ".join(changed))


def checkpoints(output_dir: str | Path) -> list[Path]:
    """All ``checkpoint-N`` folders, by step."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.is_dir()]
    return sorted((p for p in folders if parse_step(p) >= 0), key=parse_step)


def parse_step(folder: str | Path) -> int:
    """N of ``checkpoint-N``; -1 for other names."""
    match = _NAME.fullmatch(Path(folder).name)
    return int(match.group(1)) if match else -1


def verify(folder: str | Path, *, contents: bool = True) -> None:
    """Compare a checkpoint with its manifest, with ``contents`` also the checksum of every file."""
    folder = Path(folder)
    if not folder.is_dir():
        others = [p.name for p in checkpoints(folder.parent)]
        hint = f"; existing checkpoints: {', '.join(others)}" if others else ""
        raise DamagedCheckpointError(f"checkpoint {folder} does not exist{hint}")
    inside = [p.name for p in checkpoints(folder)]
    if inside:
        raise DamagedCheckpointError(
            f"{folder} is an output_dir, not a checkpoint; use {folder / inside[-1]}, or"
            " resume_from_checkpoint=True for the newest"
        )
    if not (folder / MANIFEST).is_file():
        raise DamagedCheckpointError(
            f"{folder} has no {MANIFEST}: it was not written by Kedge, or copied only in part"
        )
    with report_damage(folder, MANIFEST):
        files = read_json(folder / MANIFEST)["files"]
        for name, entry in {STATE: files[STATE], **files}.items():
            problem = _find_problem(folder / name, entry["size"], entry["crc32"], contents)
            if problem:
                raise DamagedCheckpointError(f"{name} {problem}")


def rotate(
    output_dir: str | Path, limit: int | None, *, keep: Iterable[str | Path | None] = ()
) -> list[Path]:
    """Delete the oldest checkpoints until ``limit`` are left, and return them; None or 0 keeps all.

    Rank 0 calls it, after ``save``.  Folders in ``keep`` are never deleted (the one just saved, the
    best one), nor is the newest intact one, so more than ``limit`` may be left.
    """
    folders = checkpoints(output_dir)
    if not limit or len(folders) <= limit:
        return []
    kept = {Path(p).name for p in keep if p is not None}
    kept.add(next((x for x in reversed(folders) if _is_complete(x)), folders[-1]).name)
    oldest = [p for p in folders if p.name not in kept][: len(folders) - limit]
    for folder in oldest:  # rename first, so that a kill never leaves a partial checkpoint
        doomed = folder.with_name(_DELETING + folder.name)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    return oldest


def tidy(output_dir: str | Path) -> None:
    """Clean up after a killed run.  Rank 0 calls it at startup.

    Unfinished saves and deletions are removed; a checkpoint that was being replaced by a newer
    one of the same step is restored if the newer one does not exist.
    """
    root = Path(output_dir)
    for old in root.glob(f"{_OLD}checkpoint-*"):
        final = root / old.name.removeprefix(_OLD)
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)
    for prefix in (_SAVING, _DELETING):
        for folder in root.glob(f"{prefix}checkpoint-*"):
            shutil.rmtree(folder)


def write_manifest(folder: Path) -> None:
    """Write sizes and checksums of all files, and flush everything to disk."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = {
        p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "crc32": _crc32(p)}
        for p in files
    }
    write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})
    for path in (*files, folder / MANIFEST, *{p.parent for p in files}):
        _flush(path)


def publish(temporary: Path, final: Path) -> None:
    """Rename into place; an existing checkpoint of the same step is moved aside first."""
    aside = final.with_name(_OLD + final.name)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    _flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    try:
        verify(folder, contents=False)
    except CheckpointError:
        return False
    return True


def _find_problem(file: Path, size: int, crc: int, contents: bool) -> str | None:
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != size:
        return f"must have {size} bytes, got {file.stat().st_size}"
    if contents and _crc32(file) != crc:
        return "has changed since it was written (its CRC-32 differs)"
    return None


def _crc32(file: Path) -> int:
    total = 0
    with file.open("rb") as f:
        while block := f.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def _flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(file: Path) -> Any:
    """The value in a JSON file of a checkpoint."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DamagedCheckpointError(
            f"{file.parent} is damaged: could not read {file.name}: {e}"
        ) from e


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON."""
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
