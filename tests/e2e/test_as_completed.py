"""Groups as completed, through the public trainer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge import GRPOConfig, GRPOTrainer, remax, rloo
from kedge.loop import updater
from kedge.records.errors import ConfigError
from kedge.records.types import RewardOutput, Rollout
from kedge.rollout.embedded import generation
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import ScriptedRollouts, tiny_policy
from kedge.trainers import assembly
from tests.reference.test_whole_update import Batch
from tests.unit.callback_runs import StopAt
from tests.unit.text_toys import EOS, PAD

from .small import VOCAB, rows, small
from .test_groups import make

OPTIONS: dict[str, Any] = {
    "rollout_schedule": "as_completed",
    "max_lag": 2,
    "total_episodes": 24,
    "sampler_correction": "truncate",
}


def test_it_goes_on_from_a_checkpoint_with_what_was_sampled(tmp_path: Path) -> None:
    first = small(output_dir=str(tmp_path), save_steps=1, save_strategy="steps", **OPTIONS,
                  callbacks=[StopAt(3)])  # fmt: skip
    first.train()
    assert first.state.global_step == 3
    second = small(output_dir=str(tmp_path), **OPTIONS)
    second.train(resume_from_checkpoint=True)
    assert [row["episode"] for row in rows(second)] == [4, 8, 12, 16, 20, 24]
    assert all(row["rollout/lag"] <= 2 for row in rows(second))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_lag": 0}, "max_lag=0 does not sample during training; set max_lag=1"),
        (
            {"rollout_schedule": "in_order", "in_flight_weight_updates": True},
            "needs rollout_schedule=.as_completed.",
        ),
        ({"sampler_correction": "mask_old"}, "leaves out tokens older than max_lag, which only"),
        ({"rollout_schedule": "random"}, "rollout_schedule='random'"),
        (
            {"rollout_engine": ScriptedRollouts([]), "sampler_correction": "off"},
            "ScriptedRollouts samples whole batches .*; set rollout_schedule=.in_order.",
        ),
        (
            {"algorithm": remax()},
            "remax needs a greedy response .* set rollout_schedule=.in_order.",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(**(OPTIONS | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": remax()}, "remax needs a greedy response"),
        ({"freeze_value_attention": True, "value_source": "policy"}, "freeze_value_attention"),
    ],
)
def test_what_is_known_is_refused_before_weights_load(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "load_models", lambda _: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=said):
        small(**(OPTIONS | changes))


class Paced(EmbeddedEngine):
    """Completes four responses per policy version, so long ones have tokens of many versions."""

    complete = 0

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Any:
        self.complete = 0
        return super().load_weights(weights, version)

    def advance(self) -> Rollout | None:
        if self.complete >= 4:
            time.sleep(1e-3)
            return None
        rollout = super().advance()
        self.complete += 0 if rollout is None else len(rollout)
        return rollout


@pytest.mark.parametrize("correction", ["auto", "mask_old"])
def test_in_flight_every_token_trains_with_its_own_weight_or_old_ones_are_left_out(
    correction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and KL by hand: min(exp(learner - recorded), 2), the models by plain transformers."""
    monkeypatch.setattr(generation, "POLL", 1)
    real, seen = updater.make_experience, []

    def watched(rollout: Rollout, scores: RewardOutput, *rest: Any) -> Any:
        made = real(rollout, scores, *rest)
        batch = Batch(None, None, None, rollout, scores, 1.0, rows=[*range(len(rollout))])
        with torch.no_grad():
            both = [
                [batch.logprobs(model, row)[1] for row in batch.rows]
                for model in (trainer.model, trainer.ref_model)
            ]
        seen.append((batch, made[0], *both))
        return made

    monkeypatch.setattr(updater, "make_experience", watched)
    policy = tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=EOS)
    trainer = small(
        **{"output_dir": str(tmp_path), "model": policy, "algorithm": rloo()},
        rollout_engine=Paced(policy, pad_id=PAD, shares_weights=False),
        **{"num_generations": 2, "kl_coef": 0.05, "temperature": 1.0, "learning_rate": 3e-2},
        **{"adaptive_kl": True, "kl_target": 2.2, "kl_horizon": 20},
        **{"in_flight_weight_updates": True, "max_lag": 1, "rollout_schedule": "as_completed"},
        **{"response_length": 24, "total_episodes": 48, "sampler_correction": correction},
    )
    trainer.train()
    oldest = bounded = adapted = 0
    coef = 0.05
    for version, (batch, experience, learner, reference) in enumerate(seen):
        entropy = kl = 0.0  # of the learner, by importance sampling
        gaps = [a - b for a, b in zip(learner, reference, strict=True)]
        gain = [batch.score(row) - coef * float(gaps[row].sum()) for row in batch.rows]
        other = {a: b for pair in batch.groups() for a, b in (pair, pair[::-1])}
        for row in batch.rows:
            length = len(learner[row])
            age = version - batch.rollout.token_versions[row, :length]
            trained = age <= (1 if correction == "mask_old" else 99)
            assert torch.equal(experience.loss_mask[row, :length], trained)
            ratio = (learner[row] - batch.rollout.behavior_logprobs[row, :length].double()).exp()
            weight = ratio.clamp(max=10).where(age > 0, 1)
            entropy -= float((learner[row] * weight).sum()) / len(batch.rows)
            kl += float((gaps[row] * weight).sum()) / len(batch.rows)
            found = experience.advantages[row, :length][trained].double()
            want = ((gain[row] - gain[other[row]]) * ratio.clamp(max=2))[trained]
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
            oldest, bounded = max(oldest, int(age.max())), bounded + int((ratio > 2).sum())
        logged = rows(trainer)[version]
        assert logged["objective/entropy"] == pytest.approx(entropy, rel=1e-4)
        assert logged["objective/kl"] == pytest.approx(kl, rel=1e-4, abs=1e-5)
        assert logged["objective/kl_coef"] == pytest.approx(coef, rel=1e-5)
        error = kl / 2.2 - 1
        coef *= 1 + min(max(error, -0.2), 0.2) * 4 / 20
        adapted += abs(error) < 0.2 and kl > 2 * float(sum(x.sum() for x in gaps)) / 4
    assert adapted  # a step inside the clip, which the plain mean of log(pi / ref) would not take
    assert min(oldest, bounded) > 1
    drops, logged = correction == "mask_old", rows(trainer)
    assert max(row["rollout/lag_max"] for row in logged) == (1 if drops else oldest)
    assert any(row.get("rollout/too_old_tokens") for row in logged) == drops


@pytest.mark.parametrize("in_flight", [False, True])
def test_groups_that_depend_on_scores_complete_one_by_one(in_flight: bool, tmp_path: Path) -> None:
    options = OPTIONS | {
        "output_dir": str(tmp_path),
        "in_flight_weight_updates": in_flight,
        "total_episodes": 48,
        "reward_funcs": lambda completions, **_: [len(c.split()) // 4 for c in completions],
    }
    trainer = make(GRPOTrainer, GRPOConfig, dynamic_sampling=2, num_generations=2, **options)
    assert trainer.engine.rollout_engine.info.slots > 0
    trainer.train()
    logged = rows(trainer)
    assert len(logged) == 6
    assert all(row["rollout/lag_max" if in_flight else "rollout/lag"] <= 2 for row in logged)
    assert sum(row["rollout/resampled_groups"] for row in logged) > 0
