"""Turn credit against a reference in float64 that walks over turns, one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kedge.algorithms import AdvantageInputs, Algorithm, grpo, ppo, rloo
from kedge.math.turns import number_turns
from kedge.records.types import Episodes, ModelOutputs, RewardOutput
from tests.unit.advantage_inputs import rollout

# Turns (from 0) of the tokens; -1: the environment's or padding.  Rows 0-3 are one group, 4-7 the
# other; row 7 is not valid.  Rows 1 and 5 have two turns without a token between them.
TURNS = [
    [0, 0, -1, 1, 1, 1, -1, -1, 2, -1, -1],
    [0, 1, 1, -1, 2, 2, -1, -1, -1, -1, -1],
    [0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1],
    [0, -1, -1, 1, -1, 2, -1, 3, -1, -1, -1],
    [0, -1, 1, 1, -1, -1, -1, -1, -1, -1, -1],
    [0, 0, 1, -1, -1, 2, 2, 2, -1, -1, -1],
    [-1, -1, 0, 0, -1, 1, -1, -1, -1, -1, -1],
    [0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1],
]
GROUP = [0, 0, 0, 0, 1, 1, 1, 1]
KL_COEF = 0.3


def batch(seed: int = 0, *, episodes: bool = True) -> AdvantageInputs:
    """Random rewards, values and log-ratios on these turns."""
    rng = torch.Generator().manual_seed(seed)
    turn = torch.tensor(TURNS)
    shape = turn.shape
    valid = torch.tensor([True] * 7 + [False])
    mask = (turn >= 0) & valid[:, None]
    rewards = torch.zeros(shape)
    for i, row in enumerate(TURNS):
        for k in range(max(row) + 1):
            at = max(t for t, number in enumerate(row) if number == k)
            rewards[i, at] = torch.randn((), generator=rng)
    scores = rewards.sum(1)
    last = torch.tensor([max(t for t, k in enumerate(row) if k >= 0) for row in TURNS])
    dense = rewards.clone()
    dense[torch.arange(8), last] -= scores
    logprobs = -torch.rand(shape, generator=rng)
    return AdvantageInputs(
        rollout=rollout(
            mask,
            group=GROUP,
            # rows 3 and 7 are followed by an observation
            response_mask=torch.arange(shape[1])
            <= (last + torch.tensor([0, 0, 0, 1] * 2))[:, None],
            terminated=torch.tensor([True, False] * 4),
            episodes=Episodes(turn=turn, rewards=rewards, valid=valid) if episodes else None,
        ),
        reward_output=RewardOutput(scores=scores, valid=valid, token_rewards=dense),
        model_outputs=ModelOutputs(
            logprobs=logprobs,
            ref_logprobs=-torch.rand(shape, generator=rng),
            values=torch.randn(shape, generator=rng),
            last_values=torch.randn(8, generator=rng),
        ),
    )


def turns_of(e: AdvantageInputs, i: int) -> list[list[int]]:
    """Token positions of each turn of a valid row."""
    row = TURNS[i] if bool(e.reward_output.valid[i]) else []
    return [[t for t, k in enumerate(row) if k == n] for n in range(max(row, default=-1) + 1)]


def penalized(e: AdvantageInputs, i: int, turn: list[int]) -> float:
    """Reward of a turn: what the environment gave, minus the KL of all its tokens."""
    assert e.rollout.episodes is not None
    outputs = e.model_outputs
    assert outputs.ref_logprobs is not None
    kl = (outputs.logprobs.double() - outputs.ref_logprobs.double())[i, turn].sum()
    return float(e.rollout.episodes.rewards.double()[i, turn].sum() - KL_COEF * kl)


def reference_ppo(
    e: AdvantageInputs, *, gamma: float, lam: float, bootstrap: bool = False, kind: str = "sound"
) -> tuple[Tensor, Tensor]:
    """Advantages (not whitened) and returns by a loop over turns; other kinds are wrong."""
    advantages = torch.zeros(e.rollout.ids.shape, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    values, last = e.model_outputs.values, e.model_outputs.last_values
    assert values is not None
    assert last is not None
    for i in range(8):
        end = int(e.rollout.response_mask[i].sum()) - 1
        observed = not e.rollout.loss_mask[i, end]  # V is trained behind observations
        cut_off = bootstrap and observed and not e.rollout.terminated[i]
        following = float(last[i]) if cut_off else 0.0
        ahead = 0.0
        for turn in reversed(turns_of(e, i)):
            value = float(values[i, turn[-1] if kind == "value of the last token" else turn[0]])
            reward = penalized(e, i, turn[-1:] if kind == "reward of the last token" else turn)
            discount = gamma ** len(turn) if kind == "gamma counts tokens" else gamma
            decay = lam ** len(turn) if kind == "lambda counts tokens" else lam
            delta = reward + discount * following - value
            ahead = delta + discount * decay * ahead
            following = value
            advantages[i, turn] = ahead / (len(turn) if kind == "shared among tokens" else 1)
            if kind == "first token only":
                advantages[i, turn[1:]] = 0.0
            returns[i, turn[0]] = ahead + value
    return advantages, returns


def reference_groups(e: AdvantageInputs, compare: Callable[[list[float], int], float]) -> Tensor:
    """Advantages of rewards from each turn on, against the same turn of the group's other rows."""
    to_go: dict[tuple[int, int], float] = {}
    for i in range(8):
        turns, ahead = turns_of(e, i), 0.0
        for k in reversed(range(len(turns))):
            ahead += penalized(e, i, turns[k])
            to_go[i, k] = ahead
    out = torch.zeros(e.rollout.ids.shape, dtype=torch.float64)
    for i, k in to_go:
        peers = [j for j in range(8) if GROUP[j] == GROUP[i] and (j, k) in to_go]
        out[i, turns_of(e, i)[k]] = compare([to_go[j, k] for j in peers], peers.index(i))
    return out


def leave_one_out(scores: list[float], at: int) -> float:
    others = scores[:at] + scores[at + 1 :]
    return scores[at] - sum(others) / len(others) if others else 0.0


def normalized(scores: list[float], at: int) -> float:
    x = torch.tensor(scores, dtype=torch.float64)
    std = float(x.std()) if len(x) > 1 else 0.0
    return float(x[at] - x.mean()) / (std + 1e-4)


def test_ppo_steps_over_turns() -> None:
    for gamma, lam, bootstrap in ((1.0, 0.95, False), (0.9, 0.8, True), (0.7, 1.0, False)):
        algorithm = ppo(
            gamma=gamma,
            lam=lam,
            whiten_advantages=False,
            bootstrap_truncated=bootstrap,
            credit="turn",
        )
        e = batch()
        out = algorithm.compute_advantages(e, KL_COEF)
        advantages, returns = reference_ppo(e, gamma=gamma, lam=lam, bootstrap=bootstrap)
        torch.testing.assert_close(out.advantages.double(), advantages, rtol=0, atol=2e-6)
        assert out.returns is not None
        torch.testing.assert_close(out.returns.double(), returns, rtol=0, atol=2e-6)
        firsts = [(i, turn[0]) for i in range(8) for turn in turns_of(e, i)]
        assert out.value_mask is not None
        assert [tuple(x) for x in out.value_mask.nonzero().tolist()] == firsts


def test_ppo_whitens_over_turns() -> None:
    e = batch()
    out = ppo(gamma=0.9, lam=0.8, credit="turn").compute_advantages(e, KL_COEF)
    plain, _ = reference_ppo(e, gamma=0.9, lam=0.8)
    firsts = torch.tensor([[i, turn[0]] for i in range(8) for turn in turns_of(e, i)]).T
    per_turn = plain[firsts[0], firsts[1]]
    expected = (plain - per_turn.mean()) / (per_turn.var() + 1e-8).sqrt()
    mask = e.rollout.loss_mask
    torch.testing.assert_close(out.advantages[mask].double(), expected[mask], rtol=0, atol=2e-6)
    assert float(out.advantages[~mask].abs().max()) == 0


@pytest.mark.parametrize(
    ("algorithm", "compare"),
    [(rloo(credit="turn"), leave_one_out), (grpo(credit="turn"), normalized)],
    ids=["rloo", "grpo"],
)
def test_groups_compare_turns(
    algorithm: Algorithm, compare: Callable[[list[float], int], float]
) -> None:
    e = batch()
    out = algorithm.compute_advantages(e, KL_COEF)
    expected = reference_groups(e, compare)
    torch.testing.assert_close(out.advantages.double(), expected, rtol=0, atol=1e-5)
    assert float(expected[3, 7]) == 0  # no other row has a fourth turn


@pytest.mark.parametrize("make", [ppo, rloo, grpo])
def test_one_turn_per_response(make: Callable[..., Algorithm]) -> None:
    """With one turn, turn credit of groups is token credit; that of PPO is a bandit's."""
    e = batch(episodes=False)
    mask = torch.zeros_like(e.rollout.loss_mask)
    mask[:7, :4] = True
    e = replace(e, rollout=replace(e.rollout, loss_mask=mask))
    by_turn = make(credit="turn").compute_advantages(e, 0.0).advantages
    if make is ppo:
        assert all(len(row.unique()) == 1 for row in by_turn[:7, :4])
    else:
        by_token = make().compute_advantages(e, 0.0).advantages
        torch.testing.assert_close(by_turn, by_token, rtol=1e-5, atol=1e-5)


def test_turns_without_episodes_are_the_runs_of_the_mask() -> None:
    mask = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])
    assert number_turns(mask).tolist() == [[0, 0, -1, 1, -1], [-1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "kind",
    [
        *("value of the last token", "reward of the last token", "gamma counts tokens"),
        *("lambda counts tokens", "shared among tokens", "first token only"),
    ],
)
def test_broken_variants_of_ppo_differ(kind: str) -> None:
    e = batch()
    algorithm = ppo(gamma=0.9, lam=0.8, whiten_advantages=False, credit="turn")
    advantages = algorithm.compute_advantages(e, KL_COEF).advantages.double()
    broken, _ = reference_ppo(e, gamma=0.9, lam=0.8, kind=kind)
    assert float((advantages - broken).abs().max()) > 0.05
