"""Pairwise evaluation after training, by a judge that training never used."""

from kedge.judges.base import Answer, FunctionJudge, Judge, Pair, Prefer, ScoreJudge
from kedge.judges.endpoint import Endpoint
from kedge.judges.match import Match, Row, match, rank

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
