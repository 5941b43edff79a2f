"""Folders called ``checkpoint-N``: written whole, checked, listed, rotated.

A folder is filled under the name ``.saving-checkpoint-N``, flushed to disk and renamed, so that a
folder called ``checkpoint-N`` is always whole, whenever the process dies.
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
    """Where ``final`` is written before it is whole."""
    return final.with_name(_SAVING + final.name)


def checkpoints(output_dir: str | Path) -> list[Path]:
    """All ``checkpoint-N`` folders, by step."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.is_dir() and parse_step(p) >= 0]
    return sorted(found, key=parse_step)


def parse_step(folder: str | Path) -> int:
    """N of ``checkpoint-N``, -1 if the folder is not called so."""
    match = _NAME.fullmatch(Path(folder).name)
    return int(match.group(1)) if match else -1


def verify(folder: str | Path, *, contents: bool = True) -> None:
    """Compare a checkpoint with its manifest.

    Args:
        folder: a ``checkpoint-N`` folder.
        contents: also compare checksums (reads every file); False compares sizes alone.

    Raises:
        CheckpointError: names the folder, the file, and what is wrong with it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        near = [p.name for p in checkpoints(folder.parent)]
        others = f"; there are {', '.join(near)} beside it" if near else ""
        raise CheckpointError(f"there is no checkpoint {folder}{others}")
    inside = [p.name for p in checkpoints(folder)]
    if inside:
        raise CheckpointError(
            f"{folder} is a run's folder, not a checkpoint; give {folder / inside[-1]}, or"
            " resume_from_checkpoint=True for the newest"
        )
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written by Kedge, or was copied in part"
        )
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} lists no {STATE}")
    for name, want in files.items():
        problem = _problem(folder / name, want, contents)
        if problem:
            raise CheckpointError(f"{folder} is damaged: {name} {problem}")


def latest_good(output_dir: str | Path, *, before: Path | None = None) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named in a warning and passed over.

    Args:
        output_dir: folder of all checkpoints of the run.
        before: only checkpoints of earlier steps than this one.

    Returns:
        Its folder, or None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
    """
    problems: list[str] = []
    found = checkpoints(output_dir)
    if before is not None:
        found = [folder for folder in found if parse_step(folder) < parse_step(before)]
    for folder in reversed(found):
        try:
            verify(folder)
        except CheckpointError as e:
            problems.append(str(e))
            continue
        for problem in problems:
            warnings.warn(f"{problem}. Resuming from {folder} instead.", stacklevel=2)
        return folder
    if problems:
        raise CheckpointError(f"no checkpoint in {output_dir} is whole: {'; '.join(problems)}")
    return None


def rotate(
    output_dir: str | Path, limit: int | None, *, keep: Iterable[str | Path | None] = ()
) -> list[Path]:
    """Delete the oldest checkpoints until ``limit`` are left.  Rank 0 calls it, after ``save``.

    Args:
        output_dir: folder of all checkpoints of the run.
        limit: how many to leave; None or 0 leaves all.
        keep: folders never to delete: the one just saved, the best one.  The newest whole one is
            kept in any case, so more than ``limit`` may be left.

    Returns:
        What was deleted.
    """
    found = checkpoints(output_dir)
    if not limit or len(found) <= limit:
        return []
    kept = {Path(p).name for p in keep if p is not None}
    kept.add(_newest_whole(found))
    spare = [p for p in found if p.name not in kept][: len(found) - limit]
    for folder in spare:
        _delete(folder)
    return spare


def tidy(output_dir: str | Path) -> None:
    """Clear away what a killed run left.  Rank 0 calls it at start, before ``latest_good``.

    Unfinished saves and deletions are removed; a checkpoint that was about to be replaced by a
    newer one of the same step comes back if the newer one is not there.
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
    """List every file with size and checksum, and force all of it to disk."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = {
        p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "crc32": _crc32(p)}
        for p in files
    }
    write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})
    for path in (*files, folder / MANIFEST, *{p.parent for p in files}):
        _flush(path)


def publish(temporary: Path, final: Path) -> None:
    """Rename into place; a checkpoint of the same step steps aside first."""
    aside = final.with_name(_OLD + final.name)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    _flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _delete(folder: Path) -> None:
    """Rename first, so that a kill never leaves half a folder under a checkpoint's name."""
    doomed = folder.with_name(_DELETING + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _newest_whole(found: list[Path]) -> str:
    for folder in reversed(found):
        try:
            verify(folder, contents=False)
        except CheckpointError:
            continue
        return folder.name
    return found[-1].name


def _problem(file: Path, want: Any, contents: bool) -> str | None:
    size, crc = (want.get("size"), want.get("crc32")) if isinstance(want, dict) else (None, None)
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != size:
        return f"has {file.stat().st_size} bytes, {size} were written"
    if contents and _crc32(file) != crc:
        return "has other contents than were written (its CRC-32 differs)"
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
    """Force a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
