"""Loads datasets by name: files, folders, and the hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.cli.options import Options
from kedge.records.errors import DataError

KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
SANITY_ROWS = 100
HELD_OUT = 100  # evaluation prompts without a test split; at most a tenth of the dataset


def note(text: str) -> None:
    """Print a message on stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"kedge: {text}", file=sys.stderr)


def load_prompts(options: Options) -> tuple[Any, Any]:
    """Training prompts, and evaluation prompts or None if the run does not evaluate."""
    script, config = options.script, options.config
    evaluates, test = config.do_eval or config.eval_on_start, None
    if script.eval_dataset_name is not None:
        if not evaluates:
            raise DataError(
                f"--eval_dataset_name {script.eval_dataset_name} needs an evaluation: add"
                " --eval_strategy steps, --eval_on_start or --do_eval"
            )
        held_out = Splits(script.eval_dataset_name, script.dataset_config)
        test, evaluates = held_out.load(script.dataset_test_split), False
    if script.dataset_mixer_list:
        if script.dataset_name is not None:
            raise DataError(
                f"dataset_name={script.dataset_name!r} and dataset_mixer_list are both given: set"
                " only one"
            )
        train = load_mixture(script.dataset_mixer_list, [script.dataset_train_split], options)
        if evaluates:
            train = train.shuffle(seed=config.seed)  # so that every dataset has held-out rows
            train, test = hold_out(train, script.dataset_test_split)
    elif script.dataset_name is not None:
        splits = Splits(script.dataset_name, script.dataset_config)
        train = splits.load(script.dataset_train_split)
        if evaluates and splits.has(script.dataset_test_split):
            test = splits.load(script.dataset_test_split)
        elif evaluates:
            train, test = hold_out(train, script.dataset_test_split)
    elif config.environment is not None:
        return None, None  # the environment provides the prompts
    else:
        raise DataError("--dataset_name is required: a file, a folder or a hub name with prompts")
    return _select_prompts(train, options), None if test is None else _select_prompts(test, options)


def load_mixture(mixer: Sequence[str], splits: Sequence[str], options: Options) -> Any:
    """The rows of a mixture of datasets; all use one split, or each its own."""
    from kedge.data.mixer import mix, parse_mixer

    count = len(parse_mixer(mixer))
    if len(splits) not in (1, count):
        raise DataError(
            "the splits of a mixture must be one for all datasets or one for each, got"
            f" {len(splits)} splits ({', '.join(splits)}) for {count} datasets"
        )
    # A dataset may be named twice with different splits; `mix` loads in this order.
    remaining = iter(splits if len(splits) > 1 else list(splits) * count)

    def load(name: str) -> Any:
        return Splits(name, options.script.dataset_config).load(next(remaining))

    return mix(mixer, load, seed=options.config.seed)


class Splits:
    """The splits of a dataset: a file, a folder (of files or ``save_to_disk``), or a hub name."""

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
            raise DataError(f"dataset_name={name!r}: the file or folder does not exist")
        else:
            from datasets.config import HF_DATASETS_CACHE

            from kedge.models.load import check_source

            if not Path(HF_DATASETS_CACHE, name.replace("/", "___")).exists():
                check_source(name, "the dataset", "dataset")

    def _open_folder(self, path: Path) -> None:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            from datasets import load_from_disk

            saved = load_from_disk(str(path))
            self._saved = saved if hasattr(saved, "keys") else {"train": saved}
            return
        for folder in (path, path / "data"):
            for file in sorted(folder.glob("*")):
                if file.suffix in KINDS and file.name != "dataset_info.json":
                    split = file.stem.split("-0")[0]  # for example train-00000-of-00002.parquet
                    self._files.setdefault(split, []).append(str(file))
        if not self._files:
            raise DataError(
                f"dataset_name={str(path)!r} must be a folder with {', '.join(KINDS)} files, or "
                "written by save_to_disk"
            )

    @property
    def names(self) -> list[str]:
        """The splits of a local dataset."""
        return list(self._saved or self._files)

    def has(self, split: str) -> bool:
        """Whether the dataset has the split."""
        if self.local:
            return split in self.names
        from datasets import get_dataset_split_names

        try:
            return split in get_dataset_split_names(self.name, self.config)
        except (OSError, ValueError) as error:
            raise DataError(f"dataset_name={self.name!r}: {error}") from error

    def load(self, split: str) -> Any:
        """The rows of a split; a local dataset with a single split returns it for any name."""
        import datasets

        if not self.local:
            try:
                return datasets.load_dataset(self.name, self.config, split=split)
            except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
                raise DataError(
                    f"dataset_name={self.name!r} is not a local file or folder, and loading "
                    f"split={split!r} from the hub failed: {error}"
                ) from error
        if split not in self.names:
            if len(self.names) > 1:
                raise DataError(
                    f"dataset_name={self.name!r} has no split {split!r}; its splits: "
                    f"{', '.join(self.names)}"
                )
            one_file = Path(self.name).expanduser().is_file()
            if not one_file or split not in ("train", "test"):  # files have no splits by default
                note(f"{self.name} has no split {split!r}; all of its rows are read")
            split = self.names[0]
        if self._saved is not None:
            return self._saved[split]
        files = self._files[split]
        suffix = Path(files[0]).suffix
        if suffix not in KINDS:
            raise DataError(f"{files[0]} must be one of {', '.join(KINDS)}")
        try:
            return datasets.load_dataset(KINDS[suffix], data_files=files, split="train")
        except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
            cause, listed = error.__cause__ or error, ", ".join(files)
            own = {Path(file).name for file in files}
            if isinstance(cause, OSError) and Path(cause.filename or "").name not in own:
                raise DataError(
                    f"{listed} cannot be cached ({cause}); set HF_HOME to a folder of yours"
                ) from error
            raise DataError(
                f"{listed} has no rows, or is not readable as {KINDS[suffix]}: {cause}"
            ) from error


def hold_out(rows: Any, missing: str) -> tuple[Any, Any]:
    """Split off the last rows for evaluation, for a dataset without test split."""
    count = min(HELD_OUT, len(rows) // 10)
    if count == 0:
        raise DataError(
            f"evaluation needs a test split: there is no split {missing!r}, and {len(rows)} rows "
            "are too few to hold some out; name a split with --dataset_test_split"
        )
    note(f"there is no split {missing!r}; holding out the last {count} prompts for evaluation")
    train = rows.select(range(len(rows) - count))
    return train, rows.select(range(len(rows) - count, len(rows)))


def _select_prompts(rows: Any, options: Options) -> Any:
    """Rename the prompt column, and cut the dataset for a sanity check."""
    column = options.script.prompt_column
    rows = name_columns(rows, {"prompt": column})
    if column is not None and "input_ids" in rows.column_names:
        rows = rows.remove_columns("input_ids")  # it would be read instead
    elif rows.column_names == ["text"]:
        rows = rows.rename_column("text", "prompt")
    if options.script.sanity_check:
        rows = rows.select(range(min(SANITY_ROWS, len(rows))))
    return rows


# -- columns ---------------------------------------------------------------------------------------

TIES = {"", "0", "tie", "draw", "same", "equal", "both", "neither", "none"}


def name_columns(rows: Any, given: Mapping[str, str | None]) -> Any:
    """Give columns the names that training reads.

    ``{"prompt": "ticket"}`` is the flag ``--prompt_column ticket``; None leaves a column as it is.
    Another column that has the name already is dropped.
    """
    found = {column: name for name, column in given.items() if column is not None}
    for column, name in found.items():
        _check_column(rows, f"{name}_column", column)
    hidden = [name for name in found.values() if name in rows.column_names and name not in found]
    return rows.remove_columns(hidden).rename_columns(found) if found else rows


def read_winners(rows: Any, a: str, b: str, winner: str) -> Any:
    """Columns ``chosen`` and ``rejected`` of two answers and the name of the better one.

    The winner is a, b, 1 or 2 in either case, the name of a column, or the text of the answer;
    ties are dropped and counted.
    """
    for flag, column in (("a_column", a), ("b_column", b), ("winner_column", winner)):
        _check_column(rows, flag, column)
    labels = [{"a", "1", a.lower()}, {"b", "2", b.lower()}]
    kept, chosen, rejected = [], [], []
    for number, (won, *answers) in enumerate(zip(rows[winner], rows[a], rows[b], strict=True)):
        whole = isinstance(won, float) and won.is_integer()  # integers beside an empty cell
        word = str("" if won is None else int(won) if whole else won).strip()
        best = [i for i in (0, 1) if word.lower() in labels[i]]
        best = best or [i for i in (0, 1) if word == str(answers[i]).strip()]
        if not best and word.lower() not in TIES:
            raise DataError(
                f"--winner_column {winner}, row {number + 1}: {word[:80]!r} is neither a, b, 1 or"
                " 2, nor the text of an answer, nor a tie (tie or empty)"
            )
        if len(best) == 1 and answers[0] != answers[1]:
            kept.append(number)
        chosen.append(answers[best[0] if best else 0])
        rejected.append(answers[1 - best[0] if best else 1])
    if not kept:
        raise DataError(f"--winner_column {winner} names no winner: all {len(rows)} pairs are ties")
    old = {a, b, winner} | ({"chosen", "rejected"} & {*rows.column_names})
    rows = rows.add_column("_chosen", chosen).add_column("_rejected", rejected)
    rows = rows.remove_columns(sorted(old))
    rows = rows.rename_columns({"_chosen": "chosen", "_rejected": "rejected"})
    if len(kept) < len(rows):
        note(f"{len(rows) - len(kept)} of {len(rows)} pairs are ties, and left out")
        rows = rows.select(kept)
    return rows


def _check_column(rows: Any, flag: str, column: str) -> None:
    if column not in rows.column_names:
        raise DataError(
            f"--{flag} {column} does not exist; columns: {', '.join(rows.column_names)}"
        )
