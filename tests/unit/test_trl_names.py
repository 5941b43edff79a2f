"""What code written for TRL reads of a run: last row, names of metrics, evaluation loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import TrainerCallback

from kedge.loop.metrics import TRL_NAMES
from kedge.testing import tiny_policy
from kedge.trainers.spec import trl_names
from tests.e2e.small import PROMPTS
from tests.e2e.test_groups import grpo, rloo

# Logged by TRL 1.16 in every row of training; its extremes over micro-batches are left out.
OF_TRL = {
    *("loss", "grad_norm", "learning_rate", "num_tokens", "reward", "reward_std", "step_time"),
    *("rewards/long/mean", "rewards/long/std", "frac_reward_zero_std", "entropy", "mine"),
    *(f"completions/{k}_length" for k in ("mean", "min", "max")),
    "completions/clipped_ratio",
    *(f"clip_ratio/{k}_mean" for k in ("low", "high", "region")),
}


def long(completions: Any, log_metric: Any, **_: Any) -> list[float]:
    log_metric("mine", 3.0)
    return [float(len(text)) for text in completions]


def made(kind: str, folder: Path, **options: Any) -> Any:
    sizes = {"max_steps": 3, "total_episodes": None, "logging_steps": 2, "output_dir": str(folder)}
    sizes |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}
    parts: dict[str, Any] = {"beta": 0.1, "reward_funcs": long, "model": tiny_policy(vocab_size=32)}
    parts["eval_dataset"] = {"a": PROMPTS[:2], "b": PROMPTS[2:5]}
    return {"rloo": rloo, "grpo": grpo}[kind](**sizes | parts | options)


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_run_and_its_evaluation_have_trls_names(kind: str, tmp_path: Path) -> None:
    trainer = made(kind, tmp_path)
    done = trainer.train()
    rows, last = trainer.state.log_history, trainer.state.log_history[-1]
    assert [row["step"] for row in rows] == [2, 3]  # the last interval is unfinished
    for row in rows:
        assert {*OF_TRL, "kl"} <= row.keys()
        assert row["reward"] == row["rewards/long/mean"] == row["objective/scores"]
        assert row["reward_std"] == pytest.approx(row["objective/scores_std"] * (4 / 3) ** 0.5)
        assert row["reward_std"] == pytest.approx(row["rewards/long/std"])
        assert (row["mine"], row["learning_rate"]) == (3.0, row["lr"])
    assert rows[1]["num_tokens"] > rows[0]["num_tokens"] > 2 * 4 * 3
    loss = (2 * rows[0]["loss"] + rows[1]["loss"]) / 3
    assert last["train_loss"] == done.training_loss == pytest.approx(loss)
    totals = {k: x for k, x in last.items() if k.startswith("train_") or k == "epoch"}
    assert len(totals) == 5
    assert totals.items() <= done.metrics.items()
    assert last["train_samples_per_second"] == pytest.approx(12 / last["train_runtime"])
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert logged["train_loss"] == last["train_loss"]

    found = trainer.evaluate()
    for name in ("a", "b"):
        # Scores are lengths: minus the score, and 0.1 per nat of KL.
        penalty = 0.1 * found[f"eval_{name}_objective/kl"]
        want = penalty - found[f"eval_{name}_objective/scores"]
        assert found[f"eval_{name}_loss"] == pytest.approx(want)
        assert found[f"eval_{name}_reward"] == found[f"eval_{name}_rewards/long/mean"]
    assert "eval_loss" in trainer.evaluate(PROMPTS[:2])


def test_aliases_by_hand() -> None:
    row = {
        "objective/scores_std": 1.0,
        "rollout/dropped_rows": 2.0,
        "objective/kl": 6.0,
        "completions/mean_length": 3.0,
        "loss": 0.5,
        "log/loss": 9.0,
    }
    found = trl_names(row, rows=6, token_kl=False)
    assert found == {"reward_std": pytest.approx((4 / 3) ** 0.5), "kl": 2.0}
    assert set(TRL_NAMES) & set(TRL_NAMES.values()) == set()


def test_cosmetic_options_never_stop_a_run(tmp_path: Path, caplog: Any) -> None:
    cosmetic = {
        **{"num_completions_to_print": 1, "log_unique_prompts": True, "log_multimodal": False},
        **{"pad_to_multiple_of": 8, "use_transformers_continuous_batching": True},
        **{"dataloader_num_workers": 2, "vllm_group_port": 1, "use_liger_kernel": True},
    }
    trainer = made("grpo", tmp_path, **cosmetic)
    said = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert sorted(text.split("=")[0] for text in said) == [
        *("dataloader_num_workers", "log_multimodal", "pad_to_multiple_of", "use_liger_kernel"),
        *("use_transformers_continuous_batching", "vllm_group_port"),
    ]
    shown: list[list[dict[str, object]]] = []
    trainer._run.callbacks.tracker.table = lambda name, rows, step: shown.append(rows)
    rows = trainer.generate_completions()
    assert len(rows) == len(shown[0]) == 2
    trainer._run._show_table([rows[0], rows[1], rows[0]], "x")
    assert shown[1] == rows
    trainer.args.log_unique_prompts = False
    trainer._run._show_table([rows[0], rows[0], rows[1]], "x", most=2)
    assert shown[2] == rows  # another prompt before another answer
    assert trainer.aux_loss_enabled is False
    assert trainer.reward_processing_classes == [None]


def test_a_batch_without_any_reward_teaches_nothing_and_ends_nothing(
    tmp_path: Path, caplog: Any
) -> None:
    calls: list[int] = []

    def sometimes(completions: Any, **_: Any) -> list[float | None]:
        calls.append(1)
        if len(calls) > 1:
            return [None] * len(completions)
        return [float(len(text)) for text in completions]

    trainer = made("grpo", tmp_path, reward_funcs=sometimes, learning_rate=1e-2)
    trainer.args.logging_steps = 1
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}

    class Watch(TrainerCallback):
        moved: ClassVar[list[bool]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = dict(trainer.model.named_parameters())
            self.moved.append(any(not torch.equal(now[n], p) for n, p in before.items()))
            before.update({n: p.detach().clone() for n, p in now.items()})

    trainer.add_callback(Watch)
    trainer.train()
    assert Watch.moved == [True, False, False]
    rows = trainer.state.log_history[:3]
    assert [row["rollout/dropped_rows"] for row in rows] == [0, 4, 4]
    assert ["reward" in row for row in rows] == [True, False, False]
    assert caplog.text.count("could be scored; it is skipped") == 2
