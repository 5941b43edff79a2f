"""Datasets by name: files, folders, and the hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from kedge.cli.arguments import Options
from kedge.config.ppo import PPOv2Config
from kedge.errors import DataError

KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
SANITY_ROWS = 100
HELD_OUT = 100  # prompts, at most a tenth of them, where there is no test split


def note(text: str) -> None:
    """Tell the user something, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(f"kedge: {text}", file=sys.stderr)


def load_prompts(options: Options) -> tuple[Any, Any]:
    """Training prompts, and evaluation prompts or None when no evaluation is asked for.

    Raises:
        DataError: no dataset, or one that cannot be read.
    """
    script, config = options.script, options.config
    if script.dataset_mixer_list:
        return _mixed(options)
    if script.dataset_name is None:
        raise DataError("--dataset_name is missing: a file, a folder or a hub name with prompts")
    splits = Splits(script.dataset_name, script.dataset_config)
    train = splits.load(script.dataset_train_split)
    test = None
    if config.do_eval or config.eval_on_start:
        if splits.has(script.dataset_test_split):
            test = splits.load(script.dataset_test_split)
        else:
            train, test = hold_out(train, script.dataset_test_split)
    train = _shaped(train, options)
    return train, None if test is None else _shaped(test, options)


def _mixed(options: Options) -> tuple[Any, Any]:
    script, config = options.script, options.config
    if script.dataset_name is not None:
        raise DataError(
            f"dataset_name={script.dataset_name!r} and dataset_mixer_list are both given: choose"
            " one"
        )
    from kedge.backends.data.mixer import mix

    def load(name: str) -> Any:
        return Splits(name, script.dataset_config).load(script.dataset_train_split)

    train, test = mix(script.dataset_mixer_list or (), load, seed=config.seed), None
    if config.do_eval or config.eval_on_start:
        train = train.shuffle(seed=config.seed)  # so that prompts of every dataset are held out
        train, test = hold_out(train, script.dataset_test_split)
    return _shaped(train, options), None if test is None else _shaped(test, options)


class Splits:
    """The splits of a dataset: a file, a folder of files or of ``save_to_disk``, or a hub name."""

    def __init__(self, name: str, config: str | None = None) -> None:
        self.name, self.config = name, config
        path = Path(name).expanduser()
        self._saved: Any = None
        self._files: dict[str, list[str]] = {}
        self.local = path.exists()
        if path.is_file():
            self._files = {"train": [str(path)]}
        elif path.is_dir():
            self._open_folder(path)
        elif path.suffix in KINDS or name.startswith((".", "/", "~")):
            raise DataError(f"dataset_name={name!r}: there is no such file or folder")

    def _open_folder(self, path: Path) -> None:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            from datasets import load_from_disk

            saved = load_from_disk(str(path))
            self._saved = saved if hasattr(saved, "keys") else {"train": saved}
            return
        for folder in (path, path / "data"):
            for file in sorted(folder.glob("*")):
                if file.suffix in KINDS and file.name != "dataset_info.json":
                    split = file.stem.split("-0")[0]  # train-00000-of-00002.parquet
                    self._files.setdefault(split, []).append(str(file))
        if not self._files:
            raise DataError(
                f"dataset_name={str(path)!r} has no {', '.join(KINDS)} file and was not written "
                "by save_to_disk"
            )

    @property
    def names(self) -> list[str]:
        """The splits, as far as they can be known without a download."""
        return list(self._saved or self._files)

    def has(self, split: str) -> bool:
        """Whether there is such a split."""
        if self.local:
            return split in self.names
        from datasets import get_dataset_split_names

        try:
            return split in get_dataset_split_names(self.name, self.config)
        except (OSError, ValueError) as error:
            raise DataError(f"dataset_name={self.name!r}: {error}") from error

    def load(self, split: str) -> Any:
        """The rows of a split; a local dataset of one split has that one under any name.

        Raises:
            DataError: there is no such split, or it cannot be read.
        """
        import datasets

        if not self.local:
            try:
                return datasets.load_dataset(self.name, self.config, split=split)
            except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
                raise DataError(
                    f"dataset_name={self.name!r} is no file or folder here, and split={split!r} "
                    f"could not be had from the hub: {error}"
                ) from error
        if split not in self.names:
            if len(self.names) > 1:
                raise DataError(
                    f"dataset_name={self.name!r} has no split {split!r}; it has "
                    f"{', '.join(self.names)}"
                )
            note(f"{self.name} has one split, {self.names[0]!r}; it stands for {split!r}")
            split = self.names[0]
        if self._saved is not None:
            return self._saved[split]
        return self._read(self._files[split])

    def _read(self, files: list[str]) -> Any:
        import datasets

        suffix = Path(files[0]).suffix
        if suffix not in KINDS:
            raise DataError(f"{files[0]} is none of {', '.join(KINDS)}")
        try:
            return datasets.load_dataset(KINDS[suffix], data_files=files, split="train")
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            cause = error.__cause__ or error
            raise DataError(f"{files[0]} cannot be read as {KINDS[suffix]}: {cause}") from error


def hold_out(rows: Any, missing: str) -> tuple[Any, Any]:
    """The last rows for evaluation, where there is no test split."""
    held = min(HELD_OUT, len(rows) // 10)
    if held == 0:
        raise DataError(
            f"evaluation is asked for, but there is no split {missing!r}, and {len(rows)} rows are "
            "too few to hold some out; name one with --dataset_test_split"
        )
    note(f"there is no split {missing!r}; the last {held} prompts are held out")
    train = rows.select(range(len(rows) - held))
    return train, rows.select(range(len(rows) - held, len(rows)))


def _shaped(rows: Any, options: Options) -> Any:
    column = options.script.dataset_prompt_column
    if column is not None:
        if column not in rows.column_names:
            raise DataError(
                f"dataset_prompt_column={column!r} is no column; there are "
                f"{', '.join(rows.column_names)}"
            )
        others = [n for n in ("input_ids", "prompt") if n in rows.column_names and n != column]
        rows = rows.remove_columns(others)
        rows = rows if column == "prompt" else rows.rename_column(column, "prompt")
    elif rows.column_names == ["text"]:
        rows = rows.rename_column("text", "prompt")
    config = options.config
    if isinstance(config, PPOv2Config) and config.sanity_check:
        rows = rows.select(range(min(SANITY_ROWS, len(rows))))
    return rows
