"""Pairwise evaluation after training, by a judge that training never used.

Imports only the standard library.
"""

from kedge.judges.base import Answer, Judge, Pair, Prefer
from kedge.judges.endpoint import Endpoint
from kedge.judges.functions import FunctionJudge, ScoreJudge
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
