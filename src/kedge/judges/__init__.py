"""Pairwise evaluation after training, by a judge that training never used."""

from kedge.judges.endpoint import Endpoint
from kedge.judges.match import (
    Answer,
    FunctionJudge,
    Judge,
    Match,
    Pair,
    Prefer,
    Row,
    ScoreJudge,
    match,
    rank,
)

__all__ = [
    "Answer",
    "Endpoint",
    "FunctionJudge",
    "Judge",
    "Match",
    "Pair",
    "Prefer",
    "Row",
    "ScoreJudge",
    "match",
    "rank",
]
