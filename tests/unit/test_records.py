"""Records cut, joined and patched, without loss; what reward functions measured, over ranks; groups
whose scores do not differ sampled anew, everything else as it was.
"""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kedge.loop.evaluation import pass_at_k, solve_rates, win_rate
from kedge.loop.metrics import reduce_metrics
from kedge.records.errors import ConfigError, RolloutError
from kedge.records.protocols import EngineInfo, RewardInfo, read_info
from kedge.records.types import Episodes, PromptBatch, RewardOutput, Rollout, Sample
from kedge.rollout.engines import join_rollouts
from kedge.rollout.scheduler.collector import resample_uniform_groups, spare_step
from kedge.rollout.scheduler.joining import join_groups
from kedge.testing import ScriptedRollouts, tiny_policy
from tests.e2e.small import rows, small
from tests.e2e.test_groups import grpo
from tests.unit.advantage_inputs import rollout


def sample(scores: list[float], width: int, *, dense: float | None = None, **judged) -> Sample:
    """Two responses to each prompt, of ``width`` tokens."""
    rows = len(scores)
    mask = torch.ones(rows, width, dtype=torch.bool)
    prompts = PromptBatch(
        ids=torch.ones(rows, width, dtype=torch.long),
        mask=mask,
        group=torch.arange(rows) // 2,
        row=torch.arange(rows),
        columns={"row": list(range(rows))},
    )
    ids, logprobs = torch.full((rows, width), 5), -mask.float()
    made = rollout(mask, prompts=prompts, ids=ids, behavior_logprobs=logprobs)
    rewards = None if dense is None else torch.full((rows, width), dense)
    reward_output = RewardOutput(
        scores=torch.tensor(scores), valid=mask[:, 0], token_rewards=rewards, **judged
    )
    return Sample(rollout=made, reward_output=reward_output)


class TestDenseRewards:
    """Rows that a process reward does not apply to have none: zeros stand in, wherever joined."""

    def test_groups_as_completed(self) -> None:
        with_some, without = sample([0.0, 1.0], 2, dense=0.6), sample([0.0, 1.0], 3)
        like = sample([0.0] * 4, 3).rollout.prompts
        for order in ([with_some, without], [without, with_some]):
            reward_output = join_groups(order, like).reward_output
            assert reward_output.token_rewards is not None
            assert reward_output.token_rewards.shape == (4, 3)
            assert reward_output.token_rewards.sum().item() == pytest.approx(4 * 0.6)
            assert reward_output.token_rewards[:, 2].abs().sum() == 0

    @pytest.mark.parametrize(("before", "after"), [(0.6, None), (None, 0.6)])
    def test_groups_sampled_again(self, before, after) -> None:
        first, fresh = (
            sample([0.0, 1.0, 1.0, 1.0], 2, dense=before),
            sample([0.0, 1.0], 3, dense=after),
        )
        whole = resample_uniform_groups(
            first, prompts=lambda _: first.rollout.prompts, draw=lambda p, _: fresh, rounds=1
        )
        rollout, reward_output = whole.rollout, whole.reward_output
        assert reward_output.token_rewards is not None
        assert reward_output.token_rewards.shape == rollout.ids.shape == (4, 3)
        want = [1.2, 1.2, 0, 0] if after is None else [0, 0, 1.8, 1.8]
        assert reward_output.token_rewards.sum(1).tolist() == pytest.approx(want)

    def test_shares_of_reward_workers(self) -> None:
        shares = [sample([0.0], 2, dense=0.6), sample([1.0, 2.0], 2)]
        reward_output = RewardOutput.cat([share.reward_output for share in shares])
        assert reward_output.token_rewards is not None
        assert reward_output.token_rewards.tolist() == [pytest.approx([0.6, 0.6]), [0, 0], [0, 0]]
        assert RewardOutput.cat([sample([0.0], 2).reward_output] * 2).token_rewards is None


class TestWhatFunctionsReport:
    def test_metrics_cover_every_round_of_dynamic_sampling(self) -> None:
        first = sample([1.0, 1.0], 1, metrics={"solved": (2.0, 2.0)})
        fresh = sample([0.0, 1.0], 1, metrics={"solved": (1.0, 2.0), "late": (3.0, 1.0)})
        whole = resample_uniform_groups(
            first, prompts=lambda _: first.rollout.prompts, draw=lambda p, _: fresh, rounds=1
        )
        assert whole.reward_output.metrics == {"solved": (3.0, 4.0), "late": (3.0, 1.0)}

    def test_a_source_or_column_that_some_rows_lack(self) -> None:
        """Partial batches and replaced groups agree: NaN in scores, None in columns."""
        one = sample([1.0, 1.0], 1, components={"a": torch.ones(2)}, columns={"x": ["u", "v"]})
        two = sample([0.0, 1.0], 1, components={"b": torch.zeros(2)}, columns={"y": [1, 2]})
        like = sample([0.0] * 4, 1).rollout.prompts
        together = join_groups([one, two], like).reward_output
        assert together.components["a"].isnan().tolist() == [False, False, True, True]
        assert together.columns == {"x": ["u", "v", None, None], "y": [None, None, 1, 2]}
        patched = resample_uniform_groups(
            one, prompts=lambda _: one.rollout.prompts, draw=lambda p, _: two, rounds=1
        ).reward_output
        assert patched.components["a"].isnan().all()
        assert patched.components["b"].tolist() == [0, 0]
        assert patched.columns == {"x": [None, None], "y": [1, 2]}


class TestLogProbabilities:
    """They cannot be made up: an engine that records none is named."""

    def test_shares_of_engines(self) -> None:
        one = sample([0.0], 1).rollout
        two = replace(one, behavior_logprobs=None)
        whole = sample([0.0, 0.0], 1).rollout.prompts
        with pytest.raises(
            RolloutError, match=r"rollout engine 1 of 2 .*without behavior_logprobs"
        ):
            join_rollouts(whole, [one, two], pad_id=0)
        assert join_rollouts(whole, [two, two], pad_id=0).behavior_logprobs is None

    def test_groups_as_completed_and_sampled_again(self) -> None:
        one = sample([1.0, 1.0], 1)
        two = replace(one, rollout=replace(one.rollout, behavior_logprobs=None))
        with pytest.raises(RolloutError, match="part 1 returned a batch without"):
            join_groups([one, two], sample([0.0] * 4, 1).rollout.prompts)
        with pytest.raises(RolloutError, match="a later round returned a batch without behavior"):
            resample_uniform_groups(
                one, prompts=lambda _: one.rollout.prompts, draw=lambda p, _: two, rounds=1
            )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_versions_of_tokens_are_as_wide_as_a_wider_rollout_without_them(order) -> None:
    """In flight, the widest part may be one that a single version sampled."""
    narrow, wide = sample([0.0, 1.0], 2).rollout, sample([0.0, 1.0], 3).rollout
    narrow = replace(narrow, token_version=torch.tensor([[3, 4], [4, 4]]))
    parts = [(narrow, wide)[i] for i in order]
    joined_versions = Rollout.cat(parts).token_versions
    rows = [[[3, 4, 0], [4, 4, 0]], [[0, 0, 0], [0, 0, 0]]]
    assert joined_versions.tolist() == [row for i in order for row in rows[i]]


def test_episodes_keep_the_columns_of_their_rollout() -> None:
    rollout = sample([0.0, 1.0], 3).rollout
    turn, rewards = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
    episodes = Episodes(turn=turn, rewards=rewards, valid=rollout.terminated)
    cut = replace(rollout, episodes=episodes).trim(2)
    assert cut.episodes is not None
    assert cut.episodes.turn.shape == cut.episodes.rewards.shape == cut.ids.shape == (2, 2)
    assert cut.prompts.ids.shape == (2, 3)


def test_rows_are_copies_in_the_order_asked_for() -> None:
    rollout = sample([0.0, 1.0, 2.0, 3.0], 2).rollout
    picked = rollout.rows(torch.tensor([3, 0]))
    assert picked.prompts.row.tolist() == [3, 0]
    assert picked.prompts.columns == {"row": [3, 0]}
    cut = rollout.rows(slice(1, 3))
    cut.ids.fill_(0)
    assert rollout.ids.sum().item() == 40
    assert cut.prompts.columns == {"row": [1, 2]}


class Rank:
    """Sums tensors over threads."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, laid: dict) -> None:
        self.rank, self.world_size, self.barrier, self.laid = rank, world_size, barrier, laid

    def all_reduce(self, x: Tensor) -> Tensor:
        self.laid[self.rank] = x
        self.barrier.wait(10)
        found = sum(self.laid.values())
        self.barrier.wait(10)
        return found


def over(*said: dict[str, tuple[float, float]]) -> list[dict[str, float]]:
    shared = threading.Barrier(len(said)), {}
    with ThreadPoolExecutor(len(said)) as pool:
        each = [Rank(i, len(said), *shared) for i in range(len(said))]
        return list(pool.map(reduce_metrics, said, each))  # type: ignore[arg-type]


def test_names_of_all_ranks_and_means_over_all_calls() -> None:
    found = over(
        {"gsm8k_reward": (3.0, 4.0)}, {"gsm8k_reward": (0.0, 1.0), "größe": (5.0, 2.0)}, {}
    )
    assert found == [{"gsm8k_reward": pytest.approx(3 / 5), "größe": 2.5}] * 3
    assert over({}) == [{}]  # one rank alone, and ranks that say nothing
    assert over({"a": (1.0, 2.0)}) == [{"a": 0.5}]
    assert over({}, {}) == [{}, {}]


NAN = math.nan


def scores(*rows: float) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_that_solve(n: int) -> None:
    for c in range(n + 1):
        outcomes = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(outcomes, k))
            want = sum(any(draw) for draw in draws) / len(draws)
            got = pass_at_k(torch.tensor([n]), torch.tensor([c]), k)
            assert float(got) == pytest.approx(want, abs=1e-14)


def test_pass_at_k_of_many_samples_needs_no_large_number() -> None:
    got = float(pass_at_k(torch.tensor([10_000]), torch.tensor([3]), 100))
    assert got == pytest.approx(1 - math.comb(9_997, 100) / math.comb(10_000, 100), rel=1e-12)
    assert got != pytest.approx(1 - (1 - 3 / 10_000) ** 100, rel=1e-3)  # the biased one


def test_pass_at_k_wants_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(torch.tensor([4, 2]), torch.tensor([1, 1]), 3)


def test_solved_by_hand() -> None:
    # Two prompts of four: two of four solve the first, none the second.
    found = solve_rates(scores(1, 0, 0.9, 0.8, 0, 0, 0, 0.1), per_prompt=4, success=0.9)
    assert found == pytest.approx({"accuracy": 0.25, "pass@2": (1 - 1 / 6) / 2, "pass@4": 0.5})
    assert solve_rates(scores(1, 0, 1), per_prompt=1, success=1.0) == pytest.approx(
        {"accuracy": 2 / 3}
    )
    assert list(solve_rates(scores(*[1.0] * 6), per_prompt=6, success=1.0)) == [
        *("accuracy", "pass@2", "pass@4", "pass@6")
    ]


def test_what_could_not_be_scored_counts_neither_way() -> None:
    found = solve_rates(scores(1, NAN, 0, 0, NAN, NAN), per_prompt=2, success=1.0)
    assert found == {"accuracy": 0.5, "pass@2": 0.0}  # the first and the third have fewer than two
    assert win_rate(scores(2, NAN, 1), scores(1, 0, NAN)) == {"win_rate": 1.0}
    assert win_rate(scores(NAN), scores(1)) == {}


def test_win_rate_by_hand() -> None:
    assert win_rate(scores(2, 1, 0, 5), scores(1, 1, 1, 4)) == {"win_rate": 0.625}


def batch(names: list[str], width: int) -> PromptBatch:
    """Two responses to each named prompt; prompt tokens count the letters of the name."""
    named = [name for name in names for _ in range(2)]
    return PromptBatch(
        ids=torch.tensor([[0] * (width - 1) + [len(name)] for name in named]),
        mask=torch.tensor([[False] * (width - 1) + [True]] * len(named)),
        group=torch.arange(len(names)).repeat_interleave(2) + 10,
        row=torch.arange(len(named)),
        columns={"name": named},
    )


def answer(prompts: PromptBatch, scores: list[float], width: int) -> Sample:
    count = len(prompts)
    mask = torch.ones(count, width, dtype=torch.bool)
    responses = rollout(
        mask,
        prompts=prompts,
        ids=torch.full((count, width), width),
        policy_version=torch.full((count,), width),
        behavior_logprobs=-mask.float(),
        allowed_tokens=torch.full((count, width, width), 7),
    )
    found = torch.tensor(scores)
    judged = RewardOutput(
        scores=found, valid=torch.ones(count, dtype=torch.bool), components={"part": found * 2}
    )
    return Sample(rollout=responses, reward_output=judged)


def test_by_hand() -> None:
    first = answer(batch(["a", "bb", "ccc"], 1), [0.0, 1.0, 1.0, 1.0, 0.0, 0.0], 2)
    asked: list[tuple[int, list[int], list[object]]] = []

    def draw(prompts: PromptBatch, turn: int) -> Sample:
        asked.append((turn, prompts.row.tolist(), list(prompts.columns["name"])))
        scores = [0.0, 1.0, 1.0, 1.0] if turn == 0 else [1.0, 0.0]
        return answer(prompts, scores, 3 if turn == 0 else 1)

    sample = resample_uniform_groups(
        first,
        prompts=lambda turn: batch([f"{turn}{'x' * i}" for i in range(3)], 2),
        draw=draw,
        rounds=5,
    )
    # Groups bb and ccc are replaced in the first round, what stands in for ccc in the second.
    assert asked == [(0, [2, 3, 4, 5], ["0x", "0x", "0xx", "0xx"]), (1, [4, 5], ["1xx", "1xx"])]
    responses, judged = sample.rollout, sample.reward_output
    assert sample.times == {"rollout/resampled_groups": 3}
    assert responses.prompts.columns["name"] == ["a", "a", "0x", "0x", "1xx", "1xx"]
    assert responses.prompts.ids.tolist() == [[0, 1], [0, 1], [0, 2], [0, 2], [0, 3], [0, 3]]
    assert responses.prompts.group.tolist() == [10, 10, 11, 11, 12, 12]
    assert responses.ids.tolist() == [[2, 2, 0]] * 2 + [[3, 3, 3]] * 2 + [[1, 0, 0]] * 2
    assert responses.loss_mask.sum(1).tolist() == [2, 2, 3, 3, 1, 1]
    assert responses.allowed_tokens is not None
    assert responses.allowed_tokens[0, 0].tolist() == [7, 7, -1]
    assert judged.scores.tolist() == [0, 1, 0, 1, 1, 0]
    assert judged.components["part"].tolist() == [0, 2, 0, 2, 2, 0]


def test_it_gives_up_after_its_rounds_and_asks_for_nothing_without_need() -> None:
    same = answer(batch(["a"], 1), [1.0, 1.0], 1)
    turns: list[int] = []

    def draw(prompts: PromptBatch, turn: int) -> Sample:
        turns.append(turn)
        return answer(prompts, [0.0, 0.0], 1)

    def replaced(sample: Sample) -> float:
        others = resample_uniform_groups(
            sample, prompts=lambda turn: batch(["b"], 1), draw=draw, rounds=2
        )
        return others.times["rollout/resampled_groups"]

    named = [spare_step(step, turn, 3) for step in range(100) for turn in range(3)]
    assert len(set(named)) == 300  # spare prompts are those of no step and of no other round
    assert min(named) > 10**12
    assert (replaced(same), turns) == (2, [0, 1])
    assert (replaced(answer(batch(["a"], 1), [1.0, 0.0], 1)), turns) == (0, [0, 1])


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_trains_on_groups_that_differ(tmp_path, lag) -> None:
    def rare(completions, **columns):
        return [float("w3" in text.split()) for text in completions]

    def train(rounds: int, folder: str) -> list[dict[str, float]]:
        torch.manual_seed(0)
        trainer = grpo(
            output_dir=str(tmp_path / folder),
            model=tiny_policy(vocab_size=32),
            reward_funcs=rare,
            train_dataset=[{"prompt": f"w{i} w{i + 1}"} for i in range(3, 25)],
            per_device_train_batch_size=16,
            response_length=4,
            total_episodes=None,
            max_steps=4,
            learning_rate=1e-3,
            dynamic_sampling=rounds,
            max_lag=lag,
        )
        trainer.train()
        return rows(trainer)

    plain, refilled = train(0, "plain"), train(8, "refilled")
    assert sum(row["objective/uniform_groups"] for row in plain) > 0.5
    assert sum(row["objective/uniform_groups"] for row in refilled) < 0.3
    assert sum(row["rollout/resampled_groups"] for row in refilled) > 0
    again = train(8, "again")
    keys = ("objective/scores", "loss/policy_avg", "rollout/resampled_groups")
    assert [[r[k] for k in keys] for r in again] == [[r[k] for k in keys] for r in refilled]


def test_what_is_not_declared_has_its_default() -> None:
    class Plain:
        info = {"name": "its own"}  # noqa: RUF012  (of something else)

    class Declares:
        info = EngineInfo(slots=3)

    class Method:
        def info(self) -> EngineInfo:
            return EngineInfo(slots=3)

    assert read_info(Plain(), RewardInfo) == RewardInfo()
    assert (read_info(None, EngineInfo).slots, read_info(Declares(), EngineInfo).slots) == (0, 3)
    with pytest.raises(ConfigError, match="must be an attribute or a property"):
        read_info(Method(), EngineInfo)


def test_an_attribute_that_belongs_into_info_is_refused() -> None:
    class Batches(ScriptedRollouts):
        slots = 4

    class Scores:
        parallel = 2

        def score(self, rollout: Rollout) -> RewardOutput:
            raise AssertionError

    with pytest.raises(ConfigError, match=r"set Batches.info = .*EngineInfo\(slots=...\)"):
        small(rollout_engine=Batches([[[3, 1]] * 4]))
    with pytest.raises(ConfigError, match=r"RewardInfo\(parallel=...\)"):
        small(reward_funcs=Scores())
