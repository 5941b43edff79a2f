"""Ranks that sample unequally often, and share an engine or a policy, have the numbers of one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ranks import launch
from tests.ranks import leave

ROWS = 16


def first_word(completions: list[str], **_: Any) -> list[float]:
    """Rarely differs between responses to one prompt."""
    return [float(text.split()[:1] == ["w5"]) for text in completions]


def work(folder: str, out: str) -> None:
    """What each process does."""
    from kedge import GRPOConfig, GRPOTrainer
    from kedge.testing import tiny_policy
    from tests.e2e.small import PROMPTS, QUIET, VOCAB
    from tests.on_ray.jobs import local_engines
    from tests.unit.text_toys import word_tokenizer

    shared = os.environ.get("ENGINES") == "shared"
    made = GRPOTrainer(
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
            num_generations=4,
            total_episodes=5 * ROWS,
            dynamic_sampling=3,
            response_length=3,
            learning_rate=1e-3,
            adam_epsilon=1e-3,  # Adam would blow rounding up to the size of the learning rate
            **QUIET,
            max_lag=int(os.environ.get("MAX_LAG", "0")),
        ),
        model=tiny_policy("gpt_neox", vocab_size=VOCAB),
        processing_class=word_tokenizer(),
        reward_funcs=[first_word],
        train_dataset=PROMPTS,
        **({"rollout_engine": local_engines()} if shared else {}),
    )
    asked = []
    generate = made.engine.rollout_engine.generate
    made.engine.rollout_engine.generate = lambda *a, **k: (
        asked.append(len(a[0])),
        generate(*a, **k),
    )[1]
    made.train()
    keys = ("objective/scores", "loss/policy_avg", "grad_norm", "rollout/resampled_groups")
    rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    rank = os.environ["RANK"]
    Path(out).with_suffix(f".{rank}").write_text(json.dumps(asked))
    leave(rows, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "max_lag"),
    [({"ENGINES": "shared"}, "1"), ({"ACCELERATE_USE_FSDP": "true"}, "0")],
    ids=["shared engines", "sharded policy"],
)
def test_dynamic_sampling(tmp_path: Path, env: dict[str, str], max_lag: str) -> None:
    one = launch(tmp_path / "one", 1, file=__file__, MAX_LAG=max_lag)
    two = launch(tmp_path / "two", 2, file=__file__, MAX_LAG=max_lag, **env)
    assert len(one) == 5
    assert sum(row["rollout/resampled_groups"] for row in one) > 5
    assert any(row["grad_norm"] > 0 for row in one)
    for a, b in zip(one, two, strict=True):
        names = ("objective/scores", "loss/policy_avg", "grad_norm")
        assert b["rollout/resampled_groups"] == a["rollout/resampled_groups"]
        assert [b[n] for n in names] == pytest.approx([a[n] for n in names], rel=1e-3, abs=1e-5)
    rounds = [json.loads((tmp_path / "two" / f"rows.{rank}").read_text()) for rank in (0, 1)]
    assert len(rounds[0]) != len(rounds[1])  # else this shows nothing


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
