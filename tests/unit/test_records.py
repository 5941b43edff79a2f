"""Records cut, joined and patched: in each place where that is done, nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kedge.errors import RolloutError
from kedge.rollout.engines import join_rollouts
from kedge.rollout.scheduler.collector import resample_uniform_groups
from kedge.rollout.scheduler.joining import join_groups
from kedge.types import Episodes, PromptBatch, RewardOutput, Rollout, Sample
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

    def test_partial_batches(self) -> None:
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

    def test_partial_batches_and_groups_sampled_again(self) -> None:
        one = sample([1.0, 1.0], 1)
        two = replace(one, rollout=replace(one.rollout, behavior_logprobs=None))
        with pytest.raises(RolloutError, match="partial batch 1 returned a batch without"):
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
