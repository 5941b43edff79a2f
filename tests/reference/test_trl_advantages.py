"""Advantages of RLOO and GRPO as TRL 1.16 computes them.

Recorded from its ``RLOOTrainer`` and ``GRPOTrainer`` on these rewards (None: not scored), four
responses to each of four prompts, beta 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from kedge.algorithms import grpo, rloo
from tests.unit.advantage_inputs import advantages, evidence

NONE = None
REWARDS = [1.0, 2, 5, 8, 0.5, NONE, 0.5, -3.25, NONE, 7, NONE, NONE, 0.25, 0.25, 0.25, 0.25]
PROMPT = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
# Advantages of the first two prompts; of the others all are 0.
RECORDED: dict[str, tuple[Any, list[float], list[float]]] = {
    "rloo": (
        rloo(),
        [-4.0, -2.6666665077209473, 1.3333332538604736, 5.3333330154418945],
        [1.875, 0.0, 1.875, -3.75],
    ),
    "rloo reward_clip_range=(-1, 2.5)": (
        rloo(reward_clip_range=(-1.0, 2.5)),
        [-1.3333332538604736, 0.0, 0.6666666269302368, 0.6666666269302368],
        [0.75, 0.0, 0.75, -1.5],
    ),
    "rloo normalize_advantages": (
        rloo(normalize_advantage=True),
        [-1.4661506414413452, -0.9774336814880371, 0.48871684074401855, 1.9548673629760742],
        [0.6872581243515015, 0.0, 0.6872581243515015, -1.374516248703003],
    ),
    "grpo scale_rewards=group": (
        grpo(scale_rewards="group"),
        [-0.9486533403396606, -0.6324355602264404, 0.3162177801132202, 1.2648711204528809],
        [0.5773236751556396, 0.0, 0.5773236751556396, -1.1546473503112793],
    ),
    "grpo scale_rewards=batch": (
        grpo(scale_rewards="batch"),
        [-0.9282433986663818, -0.6188289523124695, 0.30941447615623474, 1.237657904624939],
        [0.38676807284355164, 0.0, 0.38676807284355164, -0.7735361456871033],
    ),
    "grpo scale_rewards=none": (
        grpo(scale_rewards="none"),
        [-3.0, -2.0, 1.0, 4.0],
        [1.25, 0.0, 1.25, -2.5],
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_advantages(name: str) -> None:
    algorithm, first, second = RECORDED[name]
    found = advantages(algorithm.compute_advantages(evidence(REWARDS, PROMPT), 0.0))
    assert found == pytest.approx(first + second + [0.0] * 8, rel=1e-6, abs=1e-7)
