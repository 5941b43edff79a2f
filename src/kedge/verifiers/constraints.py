"""Verifiable instruction following (IFEval)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from kedge.errors import ConfigError, RewardError
from kedge.verifiers.base import Verifier, read_column, read_record
from kedge.verifiers.constraint_checks import CHECKS
from kedge.verifiers.languages import load_identifier

EXAMPLE = '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'


class ConstraintVerifier(Verifier):
    """A verifier of the instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911).

    A row holds ``instruction_id_list`` and ``kwargs`` (one mapping per instruction) in two columns,
    as in the dataset, or both as a mapping or JSON object in the ground-truth column.  Text before
    ``</think>`` and ``<answer>`` tags are ignored.  A blank response follows no instruction.
    Instructions about the language of a response need ``pip install 'kedge-rl[ifeval]'``.

    Args:
        score: ``"mean"``, the share of instructions followed, or ``"all"``, 1 only if all are.
        column: dataset column with the ground truth.
        name: of the verifier.

    Raises:
        ConfigError: an option does not fit.
    """

    def __init__(
        self,
        *,
        score: Literal["mean", "all"] = "mean",
        column: str = "ground_truth",
        name: str = "ifeval",
    ) -> None:
        if score not in ("mean", "all"):
            raise ConfigError(f"score={score!r} must be 'mean' or 'all'")
        check = partial(_check, every=score == "all", name=name)
        super().__init__(check, name=name, column=column, prepare=load_identifier)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score all rows.

        Raises:
            RewardError: an instruction is unknown, or its arguments are missing or invalid.
            ConfigError: an instruction about languages needs py3langid, which is not installed.
        """
        assert self.column is not None
        if self.column not in columns:
            rows = len(completions)
            ids = read_column(columns, "instruction_id_list", rows, self.__name__)
            kwargs = read_column(columns, "kwargs", rows, self.__name__)
            columns[self.column] = [
                None if one is None else {"instruction_id_list": one, "kwargs": two}
                for one, two in zip(ids, kwargs, strict=True)
            ]
        return super().__call__(completions, **columns)


def followed(response: str, instruction: str, arguments: dict[str, Any], name: str) -> bool:
    """Whether a response follows one instruction; arguments that are None count as missing."""
    check: Callable[..., bool] | None = CHECKS.get(instruction)
    if check is None:
        raise RewardError(
            f"verifier {name}: unknown instruction {instruction!r}; known: {', '.join(CHECKS)}"
        )
    known = {key: value for key, value in arguments.items() if value is not None}
    text = response.rpartition("</think>")[2].replace("<answer>", "").replace("</answer>", "")
    try:
        return bool(text.strip()) and check(text, **known)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardError(
            f"verifier {name}: invalid arguments {known} for {instruction!r}: {error}"
        ) from error


def _check(text: str, truth: Any, *, every: bool, name: str) -> float:
    record = read_record(truth, name, EXAMPLE)
    ids, kwargs = record.get("instruction_id_list"), record.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise RewardError(
            f"verifier {name}: the ground truth must list instructions, for example {EXAMPLE}"
        )
    kwargs = [{}] * len(ids) if kwargs is None else kwargs
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        raise RewardError(
            f"verifier {name}: kwargs must be a list of {len(ids)} mappings, one for each of {ids}"
        )
    results = [
        followed(text, instruction, dict(options or {}), name)
        for instruction, options in zip(ids, kwargs, strict=True)
    ]
    return float(all(results)) if every else sum(results) / len(results)


ifeval = ConstraintVerifier()
