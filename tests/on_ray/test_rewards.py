"""Reward workers: the reward outputs of this process, through any death of theirs."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from kedge.ext.ray.workers import between_groups
from kedge.records.errors import ConfigError, RewardError
from tests.e2e.small import VOCAB, small
from tests.on_ray.clusters import local, needs_ray
from tests.on_ray.test_engines import numbers
from tests.unit.text_toys import neox_reward

PROMPTS = [{"prompt": f"w{i} w{i + 1}", "wanted": f"w{i % 5}"} for i in range(3, 16)]


def wanted(completions, wanted, trainer_state, log_metric, log_extra, **_):
    """Counts words, reads a column and the state, and reports beside its scores."""
    scores = [
        text.split().count(word) + 0.1 * len(text.split()) + 0.01 * trainer_state.global_step
        for text, word in zip(completions, wanted, strict=True)
    ]
    log_metric("words", sum(len(text.split()) for text in completions) / len(completions))
    log_extra("first", [text.split()[:1] for text in completions])
    return scores


def deadly(completions, flag, **_):
    """Dies with its process as long as a file says so."""
    if flag.exists():
        how = flag.read_text()
        if how == "once":
            flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]


def made(workers=2, **options):
    local()
    return small(
        reward_model=options.pop("reward_model", neox_reward(vocab=VOCAB)),
        train_dataset=PROMPTS,
        num_generations=2,
        total_episodes=32,
        per_device_train_batch_size=8,
        ray_reward_workers=workers,
        **options,
    )


class TestOnRay:
    pytestmark = needs_ray

    def test_a_run_has_the_numbers_of_one_without_ray(self):
        here = small(
            reward_model=neox_reward(vocab=VOCAB),
            reward_funcs=[wanted],
            train_dataset=PROMPTS,
            num_generations=2,
            total_episodes=32,
            per_device_train_batch_size=8,
        )
        want = numbers(here)
        there = made(reward_funcs=[wanted])
        found = numbers(there)
        there.engine.reward.close()
        assert len(want) == 4
        for a, b in zip(found, want, strict=True):
            assert a.keys() == b.keys()
            # A reward model computes rows in other batches, which rounds the last digit.
            assert {
                k: v for k, v in a.items() if k.startswith(("objective", "rewards", "log"))
            } == {
                k: pytest.approx(v, rel=1e-5, abs=1e-6)
                for k, v in b.items()
                if k.startswith(("objective", "rewards", "log"))
            }
        assert "log/words" in want[0]

    def test_a_worker_that_dies_scores_its_share_once_more_or_ends_the_run(
        self, tmp_path, monkeypatch
    ):
        flag = tmp_path / "deadly"
        reward = partial(deadly, flag=flag)
        here = small(reward_model=None, reward_funcs=[reward], train_dataset=PROMPTS)
        there = made(workers=1, reward_model=None, reward_funcs=[reward])
        rollout = here.engine.rollout_engine.generate(
            here.engine.source.batch(0), sampling=here.engine.sampling, seed=0
        )
        want = here.engine.reward.score(rollout)
        flag.write_text("once")
        found = there.engine.reward.score(rollout)
        assert there.engine.reward.workers[0].restarts == 1
        assert torch.equal(found.scores, want.scores)
        struck = there.engine.reward.workers[0].process.pid
        os.kill(struck, signal.SIGKILL)
        assert torch.equal(there.engine.reward.score(rollout).scores, want.scores)
        assert there.engine.reward.workers[0].restarts == 2
        monkeypatch.setattr("kedge.ext.ray.actor._MAX_RESTARTS", 0)
        flag.write_text("always")
        with pytest.raises(RewardError, match="reward worker 0 was lost 1 times in a row"):
            there.train()
        there.engine.reward.close()

    def test_two_groups_are_scored_at_the_same_time_and_what_is_slow_or_fails_is_named(
        self, monkeypatch, caplog
    ):
        def slow(completions, **_):
            time.sleep(2.0)
            return [float("nan")] * len(completions)

        monkeypatch.setattr("kedge.rewards.mixture.SLOW", 0.5)
        there = made(reward_model=None, reward_funcs=[slow], on_reward_error="drop")
        source, engine = there.engine.reward, there.engine
        batch = engine.source.batch(0).rows(slice(0, 2))  # a group
        rollout = engine.rollout_engine.generate(batch, sampling=engine.sampling, seed=0)
        begin = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            outputs = list(threads.map(source.score, [rollout, rollout]))
        assert time.monotonic() - begin < 3.5
        source.close()
        assert [output.metrics["reward_errors/slow"] for output in outputs] == [(2.0, 1.0)] * 2
        for worker in range(2):
            assert f"reward worker {worker} has not returned after 0.5 s" in caplog.text
            assert f"reward worker {worker}: 2 rows dropped: reward function slow" in caplog.text

    def test_an_error_of_a_function_names_function_and_row(self):
        def broken(completions, **_):
            return [float("nan")] * len(completions)

        there = made(workers=1, reward_model=None, reward_funcs=[broken])
        with pytest.raises(RewardError, match=r"reward function broken .*on_reward_error"):
            there.train()
        there.engine.reward.close()

    def test_what_cannot_be_sent_is_refused(self):
        lock = threading.Lock()

        def locked(completions, **_):
            with lock:
                return [0.0] * len(completions)

        with pytest.raises(ConfigError, match="cannot be pickled for ray_reward_workers"):
            made(reward_model=None, reward_funcs=[locked])


@pytest.mark.parametrize(
    ("group", "parts", "want"),
    [
        ([0, 0, 1, 1, 2, 2], 2, [(0, 2), (2, 6)]),
        ([0, 0, 1, 1, 2, 2, 3, 3], 2, [(0, 4), (4, 8)]),
        ([0, 0, 0, 0], 3, [(0, 4)]),
        ([0, 1, 2], 8, [(0, 1), (1, 2), (2, 3)]),
        ([0, 1, 0, 1], 2, [(0, 4)]),
    ],
)
def test_rows_of_one_prompt_stay_together(group, parts, want):
    assert [(s.start, s.stop) for s in between_groups(torch.tensor(group), parts)] == want
