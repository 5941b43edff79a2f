"""Episodes: tokens, masks, rewards, limits, seeds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.environments import EpisodeReward, Response
from kedge.records.errors import ConfigError, RewardError
from tests.environments.toys import (
    Echo,
    chat_tokenizer,
    engine,
    played,
    prompts,
    rollouts,
    sampling,
)
from tests.unit.text_toys import EOS


def test_episodes_hold_the_turns_and_the_answers_between_them() -> None:
    rollout = rollouts(max_turn_tokens=6).generate(prompts(), sampling=sampling(), seed=3)
    episodes = rollout.episodes
    assert episodes is not None
    assert torch.equal(rollout.loss_mask, episodes.turn >= 0)
    tokenizer = chat_tokenizer()
    for i in range(4):
        length = int(rollout.response_mask[i].sum())
        turns = episodes.turn[i, :length].tolist()
        assert sorted({t for t in turns if t >= 0}) == [0, 1, 2]
        assert turns[-1] == 2  # nothing follows the last turn
        between = rollout.ids[i, :length][episodes.turn[i, :length] < 0]
        words = tokenizer.decode(between).split()
        assert words.count("user") == words.count("assistant") == 2
        for turn in range(3):  # the reward of a turn is on its last token
            last = max(t for t, n in enumerate(turns) if n == turn)
            said = rollout.ids[i, [t for t, n in enumerate(turns) if n == turn]].tolist()
            text = tokenizer.decode([x for x in said if x != EOS], skip_special_tokens=True)
            assert float(episodes.rewards[i, last]) == pytest.approx(0.1 * len(text.split()))
    assert int((episodes.rewards != 0).sum()) <= 12
    assert bool(rollout.terminated.all())


def test_the_reward_source_gives_returns_and_moves_rewards_to_their_turns() -> None:
    rollout = rollouts(max_turn_tokens=6).generate(prompts(), sampling=sampling(), seed=3)
    output = EpisodeReward().score(rollout)
    assert rollout.episodes is not None
    assert torch.equal(output.scores, rollout.episodes.rewards.sum(1).float())
    assert output.token_rewards is not None
    assert output.token_rewards.sum(1).abs().max() < 1e-6
    placed = output.token_rewards.clone()
    for i in range(4):
        placed[i, int(rollout.loss_mask[i].nonzero().max())] += output.scores[i]
    assert torch.allclose(placed, rollout.episodes.rewards, atol=1e-6)
    with pytest.raises(RewardError, match="EnvironmentRollouts"):
        EpisodeReward().score(replace(rollout, episodes=None))


def test_one_turn_is_what_the_engine_samples() -> None:
    class Once(Echo):
        def reset(self, **options: Any) -> Any:
            super().reset(**options)
            return None, {}

    batch = prompts(6, group=2)
    plain = engine().generate(batch, sampling=sampling(max_new_tokens=9), seed=5)
    played = rollouts(lambda: Once(1)).generate(batch, sampling=sampling(max_new_tokens=9), seed=5)
    assert torch.equal(played.ids, plain.ids)
    assert played.behavior_logprobs is not None
    assert plain.behavior_logprobs is not None
    assert torch.equal(played.behavior_logprobs, plain.behavior_logprobs)
    assert torch.equal(played.prompts.ids, batch.ids)


@pytest.mark.parametrize(
    ("limits", "budget"),
    [({"max_turns": 2}, 40), ({}, 17), ({"max_turn_tokens": 1, "max_turns": 9}, 40)],
)
def test_limits_truncate(limits: dict[str, int], budget: int) -> None:
    play = rollouts(lambda: Echo(99), **{"max_turn_tokens": 5} | limits)
    rollout = play.generate(prompts(), sampling=sampling(max_new_tokens=budget), seed=1)
    assert rollout.ids.shape[1] <= budget
    assert not bool(rollout.terminated.any())
    assert rollout.episodes is not None
    assert int(rollout.episodes.turn.max()) < limits.get("max_turns", 8)
    longest = max(int((rollout.episodes.turn[i] == t).sum()) for i in range(4) for t in range(9))
    assert longest <= limits.get("max_turn_tokens", 5)


def test_a_row_depends_on_its_seed_alone() -> None:
    batch = prompts(6, group=2)
    play = rollouts(max_turn_tokens=6)
    whole = play.generate(batch, sampling=sampling(), seed=3)
    part = play.generate(batch.rows(torch.tensor([4, 5])), sampling=sampling(), seed=3)
    width = part.ids.shape[1]
    assert torch.equal(part.ids, whole.ids[4:, :width])
    again = play.generate(batch, sampling=sampling(), seed=4)
    assert not torch.equal(again.ids[:, :5], whole.ids[:, :5])
    first = whole.prompts.ids[:, -4:]  # the group shares the first observation, others differ
    assert torch.equal(first[0], first[1])


def test_episodes_that_ended_leave_the_batch() -> None:
    seen: list[int] = []

    class Varied(Echo):
        def reset(self, *, seed: int, options: Any) -> Any:
            out = super().reset(seed=seed, options=options)
            self.turns = options["turns"]
            return out

    batch = prompts(4)
    batch = replace(batch, columns={**batch.columns, "turns": [1, 3, 2, 1]})
    play = rollouts(Varied, max_turn_tokens=4)
    inner = play.engine.generate
    play.engine.generate = lambda x, **k: (seen.append(len(x)), inner(x, **k))[1]  # type: ignore[method-assign]
    rollout = play.generate(batch, sampling=sampling(), seed=0)
    assert seen == [4, 2, 1]
    assert rollout.episodes is not None
    assert rollout.episodes.turn.max(1).values.tolist() == [0, 2, 1, 0]


def test_turns_have_their_own_random_numbers() -> None:
    batch = prompts(1)
    play = rollouts(lambda: Echo(6), max_turn_tokens=4, max_turns=6)
    seen: list[int] = []
    inner = play.engine.generate
    play.engine.generate = lambda *a, seed, **k: (seen.append(seed), inner(*a, seed=seed, **k))[1]  # type: ignore[method-assign]
    play.generate(batch, sampling=sampling(max_new_tokens=99), seed=11)
    assert seen[0] == 11
    assert len(set(seen)) == 6


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_turns must be at least 1, got 0"):
        rollouts(max_turns=0)
    with pytest.raises(ConfigError, match="'raise', 'drop' or 'score', got 'skip'"):
        rollouts(on_env_error="skip")


def test_token_ids_need_no_tokenizer() -> None:
    class Ids:
        def reset(self, *, seed: int, options: Any) -> Any:
            return [7, 8], {}

        def step(self, response: Response) -> Any:
            return torch.tensor([9, response.ids[0]]), 1.0, False, False, {}

    play = rollouts(Ids, max_turns=3, max_turn_tokens=2)
    rollout = play.generate(prompts(2, chat=False), sampling=sampling(), seed=0)
    assert rollout.prompts.ids[:, -2:].tolist() == [[7, 8]] * 2
    assert rollout.episodes is not None
    for i in range(2):
        length = int(rollout.response_mask[i].sum())
        foreign = rollout.ids[i, :length][~rollout.loss_mask[i, :length]].tolist()
        assert foreign[0::2] == [9, 9]
        assert foreign[1] == int(rollout.ids[i, 0])


def test_tables_and_token_logs_show_turns(tmp_path: Path) -> None:
    made = played(
        environment=Echo, output_dir=str(tmp_path), num_sample_generations=1, log_token_rows=2
    )
    made.train()
    (file, *_) = sorted(tmp_path.glob("tokens/step-*.jsonl"))
    row = json.loads(file.read_text().splitlines()[0])
    assert sorted(set(row["turn"])) == [-1, 0, 1, 2]
    assert [t >= 0 for t in row["turn"]] == [bool(x) for x in row["trained"]]
    (*_, table) = sorted(tmp_path.glob("completions/step-*.jsonl"))
    sample = json.loads(table.read_text().splitlines()[0])
    assert len(sample["query"].split()) == 5  # role, two words, the first observation, role
    speakers = [line.split("]")[0] for line in sample["model response"].split("\n")]
    assert speakers == ["[turn 1", "[environment", "[turn 2", "[environment", "[turn 3"]
