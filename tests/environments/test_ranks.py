"""Ranks that share engines and play different numbers of turns: in order, and as completed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.e2e.test_ranks import launch
from tests.environments.toys import CHAT
from tests.ranks import leave

ROWS = 8
ORDER = [*CHAT[::2], CHAT[0], *CHAT[1::2], CHAT[1]]
POOL = {"rollout_schedule": "as_completed", "in_flight_weight_updates": True, "max_lag": 2}


def work(folder: str, out: str) -> None:
    """What each process does."""
    from accelerate.utils import gather_object

    from kedge import PPOConfig, PPOTrainer
    from kedge.environments import NewContext
    from kedge.testing import tiny_policy
    from tests.e2e.small import QUIET, VOCAB
    from tests.environments.toys import Echo, chat_tokenizer
    from tests.on_ray.jobs import local_engines

    class Varied(Echo):
        """Half of the batch plays one turn, the other half four; says the last word of its row."""

        def reset(self, *, seed: int, options: Any) -> Any:
            self.turns = 1 if options["prompt"] in CHAT[::2] else 4
            self.word, self.number = options["prompt"][0]["content"].split()[-1], seed
            return super().reset(seed=seed, options=options)

        def step(self, response: Any) -> Any:
            _, reward, done, *_ = super().step(response)
            numbers = {"success": float(done and reward > 0.2), "tokens": len(response.ids)}
            seed, self.number = self.number, 0
            word = NewContext([{"role": "user", "content": self.word}]) if cut else self.word
            return word, reward, done, False, {"metrics": {**numbers, "seed": seed}}

    cut = os.environ.get("CONTEXTS") == "new"
    engines = os.environ.get("ENGINES", "own")
    pool = engines == "pool"
    made = PPOTrainer(
        args=PPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
            **{"total_episodes": (8 if pool else 3) * ROWS, "response_length": 50},
            **{"max_turn_tokens": 3, "stop_token": "eos", "credit": "turn", "learning_rate": 1e-3},
            **{"adam_epsilon": 1e-3, "num_mini_batches": 2 if cut else 1},
            **QUIET,
            **{"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1},
            shuffle_dataset=False,
            **(POOL if pool else {"max_lag": int(os.environ.get("MAX_LAG", "0"))}),
        ),
        model=tiny_policy("gpt_neox", vocab_size=VOCAB),
        processing_class=chat_tokenizer(),
        train_dataset=[{"prompt": p} for p in ORDER],
        eval_dataset=[{"prompt": p} for p in CHAT[:2]],
        environment=Varied,
        **({} if engines == "own" else {"rollout_engine": local_engines()}),
    )
    trained: list[Any] = []
    train_on = made.engine.train_on

    def noting(_: Any, sample: Any, **named: Any) -> Any:
        x, decode = sample.rollout, made.processing_class.decode
        prompts, numbers = x.prompts.columns["prompt"], x.episodes.columns["metrics"]
        episodes = zip(prompts, numbers, x.episodes.turn, x.ids, x.response_mask, strict=True)
        trained.append(
            [
                (prompt, of_row, turn[mask].tolist(), decode(ids[mask & (turn < 0)]))
                for prompt, of_row, turn, ids, mask in episodes
            ]
        )
        return train_on(sample, **named)

    with patch.object(type(made.engine), "train_on", noting):
        made.train()
    keys = ("objective/scores", "loss/policy_avg", "grad_norm", "completions/mean_length")
    keys += ("environment/turns", "environment/success")
    rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    leave([rows, gather_object([trained])], out)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", ["0", "1"])
def test_ranks_that_share_an_engine(tmp_path: Path, max_lag: str) -> None:
    one, _ = launch(tmp_path / "one", 1, file=__file__, MAX_LAG=max_lag)
    two, _ = launch(tmp_path / "two", 2, file=__file__, MAX_LAG=max_lag, ENGINES="shared")
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert a["environment/turns"] == b["environment/turns"] == 2.5
        assert b == {name: pytest.approx(x, rel=1e-3, abs=1e-5) for name, x in a.items()}


@pytest.mark.slow
def test_new_contexts_on_one_rank_alone(tmp_path: Path) -> None:
    """Mini-batches are drawn from the rows of both ranks, of which one has no new context."""
    one, _ = launch(tmp_path / "one", 1, file=__file__, CONTEXTS="new")
    two, _ = launch(tmp_path / "two", 2, file=__file__, CONTEXTS="new")
    for a, b in zip(one, two, strict=True):
        assert a["environment/turns"] == b["environment/turns"] == 2.5
        assert b == {name: pytest.approx(x, rel=1e-3, abs=1e-5) for name, x in a.items()}


@pytest.mark.slow
def test_ranks_that_share_a_pool_train_on_every_episode_once(tmp_path: Path) -> None:
    """As completed and in flight; metrics are those of the episodes of both ranks."""
    logged, ranks = launch(tmp_path, 2, file=__file__, ENGINES="pool")
    assert [[len(episodes) for episodes in rank] for rank in ranks] == [[ROWS // 2] * 8] * 2
    whole = [first + second for first, second in zip(*ranks, strict=True)]
    played = [episode for episodes in whole for episode in episodes]
    assert len({numbers["seed"] for _, numbers, *_ in played}) == 8 * ROWS
    found = Counter(prompt[0]["content"] for prompt, *_ in played)
    assert found == Counter(prompt[0]["content"] for prompt in ORDER * 8)
    for prompt, numbers, turns, between in played:
        count = 1 if prompt in CHAT[::2] else 4
        assert sorted({*turns} - {-1}) == [*range(count)]
        assert sum(turn >= 0 for turn in turns) == numbers["tokens"]
        words = ["user", prompt[0]["content"].split()[-1], "assistant"]
        assert between.replace("<eos>", "").split() == words * (count - 1)
    for row, episodes in zip(logged, whole, strict=True):
        turns = sum(max(turns) + 1 for _, _, turns, _ in episodes)
        success, tokens = (sum(x[1][name] for x in episodes) for name in ("success", "tokens"))
        assert row["environment/turns"] == pytest.approx(turns / ROWS)
        assert row["environment/success"] == pytest.approx(success / ROWS)
        assert row["completions/mean_length"] == pytest.approx(tokens / ROWS)
    assert len({row["environment/success"] for row in logged}) > 1


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
