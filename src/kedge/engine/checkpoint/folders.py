"""Folders named ``checkpoint-N``: atomic publishing, verification, listing, rotation.

A folder is written as ``.saving-checkpoint-N``, flushed to disk and renamed, so that a folder named
``checkpoint-N`` is always complete, even if the process dies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kedge.errors import CheckpointError, DamagedCheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_SAVING, _OLD, _DELETING = ".saving-", ".old-", ".deleting-"


def saving_folder(final: Path) -> Path:
    """Temporary folder in which ``final`` is written."""
    return final.with_name(_SAVING + final.name)


def checkpoints(output_dir: str | Path) -> list[Path]:
    """All ``checkpoint-N`` folders, by step."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.is_dir()]
    return sorted((p for p in folders if parse_step(p) >= 0), key=parse_step)


def parse_step(folder: str | Path) -> int:
    """N of ``checkpoint-N``; -1 for other names."""
    match = _NAME.fullmatch(Path(folder).name)
    return int(match.group(1)) if match else -1


def verify(folder: str | Path, *, contents: bool = True) -> None:
    """Compare a checkpoint with its manifest.

    Args:
        folder: a ``checkpoint-N`` folder.
        contents: also compare checksums (reads every file); False: sizes only.

    Raises:
        CheckpointError: names the folder, the file and the problem.
    """
    folder = Path(folder)
    if not folder.is_dir():
        others = [p.name for p in checkpoints(folder.parent)]
        hint = f"; existing checkpoints: {', '.join(others)}" if others else ""
        raise CheckpointError(f"checkpoint {folder} does not exist{hint}")
    inside = [p.name for p in checkpoints(folder)]
    if inside:
        raise CheckpointError(
            f"{folder} is an output_dir, not a checkpoint; use {folder / inside[-1]}, or"
            " resume_from_checkpoint=True for the newest"
        )
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written by Kedge, or copied only in part"
        )
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} does not list {STATE}")
    for name, expected in files.items():
        problem = _find_problem(folder / name, expected, contents)
        if problem:
            raise CheckpointError(f"{folder} is damaged: {name} {problem}")


def latest_good(output_dir: str | Path, *, before: Path | None = None) -> Path | None:
    """The newest intact checkpoint; damaged ones are named in a warning and skipped.

    Args:
        output_dir: folder of all checkpoints of the run.
        before: only checkpoints of earlier steps than this one.

    Returns:
        Its folder, or None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
    """
    problems: list[str] = []
    folders = checkpoints(output_dir)
    if before is not None:
        folders = [folder for folder in folders if parse_step(folder) < parse_step(before)]
    for folder in reversed(folders):
        try:
            verify(folder)
        except CheckpointError as e:
            problems.append(str(e))
            continue
        for problem in problems:
            warnings.warn(f"{problem}. Resuming from {folder} instead.", stacklevel=2)
        return folder
    if problems:
        raise CheckpointError(f"all checkpoints in {output_dir} are damaged: {'; '.join(problems)}")
    return None


def rotate(
    output_dir: str | Path, limit: int | None, *, keep: Iterable[str | Path | None] = ()
) -> list[Path]:
    """Delete the oldest checkpoints until ``limit`` are left.  Rank 0 calls it, after ``save``.

    Args:
        output_dir: folder of all checkpoints of the run.
        limit: number of checkpoints to keep; None or 0 keeps all.
        keep: folders never to delete: the one just saved, the best one.  The newest intact one is
            always kept, so more than ``limit`` may be left.

    Returns:
        The deleted folders.
    """
    folders = checkpoints(output_dir)
    if not limit or len(folders) <= limit:
        return []
    kept = {Path(p).name for p in keep if p is not None}
    kept.add(_newest_intact(folders))
    oldest = [p for p in folders if p.name not in kept][: len(folders) - limit]
    for folder in oldest:
        _delete(folder)
    return oldest


def tidy(output_dir: str | Path) -> None:
    """Clean up after a killed run.  Rank 0 calls it at startup, before ``latest_good``.

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


def _delete(folder: Path) -> None:
    """Rename before deleting, so that a kill never leaves a partial checkpoint."""
    doomed = folder.with_name(_DELETING + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _newest_intact(folders: list[Path]) -> str:
    for folder in reversed(folders):
        try:
            verify(folder, contents=False)
        except CheckpointError:
            continue
        return folder.name
    return folders[-1].name


def _find_problem(file: Path, expected: Any, contents: bool) -> str | None:
    entry = expected if isinstance(expected, dict) else {}
    size, crc = entry.get("size"), entry.get("crc32")
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != size:
        return f"must have {size} bytes, got {file.stat().st_size}"
    if contents and _crc32(file) != crc:
        return "has changed since it was written (its CRC-32 differs)"
    return None


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
