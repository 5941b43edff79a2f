"""Ranks that share an engine and play different numbers of turns have the numbers of one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ranks import launch
from tests.ranks import leave

ROWS = 8


def work(folder: str, out: str) -> None:
    """What each process does."""
    from kedge import PPOConfig, PPOTrainer
    from kedge.testing import tiny_policy
    from tests.e2e.small import QUIET, VOCAB
    from tests.environments.toys import CHAT, Echo, chat_tokenizer
    from tests.on_ray.jobs import local_engines

    class Varied(Echo):
        """Half of the batch plays one turn, the other half four."""

        def reset(self, *, seed: int, options: Any) -> Any:
            answer = super().reset(seed=seed, options=options)
            self.turns = 1 if options["prompt"] in CHAT[::2] else 4
            return answer

    shared = os.environ.get("ENGINES") == "shared"
    made = PPOTrainer(
        args=PPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
            total_episodes=3 * ROWS,
            response_length=50,
            max_turn_tokens=3,
            stop_token="eos",
            credit="turn",
            learning_rate=1e-3,
            adam_epsilon=1e-3,
            **QUIET,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=1,
            max_lag=int(os.environ.get("MAX_LAG", "0")),
            shuffle_dataset=False,
        ),
        model=tiny_policy("gpt_neox", vocab_size=VOCAB),
        processing_class=chat_tokenizer(),
        train_dataset=[{"prompt": p} for p in [*CHAT[::2], CHAT[0], *CHAT[1::2], CHAT[1]]],
        eval_dataset=[{"prompt": p} for p in CHAT[:2]],
        environment=Varied,
        **({"rollout_engine": local_engines()} if shared else {}),
    )
    made.train()
    keys = ("objective/scores", "loss/policy_avg", "grad_norm", "environment/turns")
    rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    leave(rows, out)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", ["0", "1"])
def test_ranks_that_share_an_engine(tmp_path: Path, max_lag: str) -> None:
    one = launch(tmp_path / "one", 1, file=__file__, MAX_LAG=max_lag)
    two = launch(tmp_path / "two", 2, file=__file__, MAX_LAG=max_lag, ENGINES="shared")
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert a["environment/turns"] == b["environment/turns"] == 2.5
        assert b == {name: pytest.approx(x, rel=1e-3, abs=1e-5) for name, x in a.items()}


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
