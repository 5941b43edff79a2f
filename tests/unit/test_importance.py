"""Weights of learner against sampler: by hand, for stale and fresh rows, and in whole runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge import GRPOConfig, TrlParser
from kedge.algorithms import ppo
from kedge.config.rollout_engines import find_engine
from kedge.ext.trl import options as options_of_trl
from kedge.loop.corrections import build_correction
from kedge.math.ratios import Correction
from kedge.records.errors import ConfigError, RolloutError
from kedge.records.histogram import ratio_range
from kedge.records.types import RewardOutput, Rollout, Sampling
from kedge.testing import tiny_policy
from kedge.trainers.options import correction_options
from tests.e2e.small import small
from tests.e2e.test_groups import grpo, rloo
from tests.learners import with_metrics
from tests.unit.toys import ToyEngine, ToyLearner, ToyPrompts, prefix


def sample(learner: ToyLearner, *, shift: float, version: int) -> tuple[Rollout, RewardOutput]:
    """A toy batch whose sampler says ``shift`` nats less of every token than the learner."""
    engine = ToyEngine()
    engine.load_weights(learner.weights(), version)
    rollout = engine.generate(ToyPrompts().batch(0), sampling=Sampling(max_new_tokens=4), seed=1)
    own = learner.logits.detach().log_softmax(0)[rollout.ids]
    rollout = replace(rollout, behavior_logprobs=own - shift)
    rows = len(rollout)
    scores = torch.arange(rows, dtype=torch.float32)
    return rollout, RewardOutput(scores=scores, valid=torch.ones(rows, dtype=torch.bool))


def learner_at(version: int) -> ToyLearner:
    learner = ToyLearner()
    learner.version = version
    with torch.no_grad():
        learner.logits.copy_(torch.randn(learner.logits.shape, generator=torch.manual_seed(3)))
    return learner


@pytest.mark.parametrize("correction", [Correction(), Correction(kind="ratio"), None])
def test_the_kl_of_stale_tokens_is_the_learner_s(correction: Correction | None) -> None:
    """Every token as often as mu samples it: means over rows are expectations under mu."""
    count = torch.tensor([5, 4, 3, 3, 3, 2])
    mu = count.double() / 20
    pi, ref = (
        torch.tensor([1, 1, 4, 4, 5, 2], dtype=torch.float64) / 17,  # pi / mu is at most 2
        torch.tensor([5, 5, 2, 1, 1, 3], dtype=torch.float64) / 17,
    )
    learner = learner_at(2)
    learner.logits = pi.log().requires_grad_()
    learner.reference = ref.log()
    rollout, _ = sample(learner, shift=0.0, version=1)
    ids = torch.zeros(20, 4, dtype=torch.long)
    ids[:, 0] = torch.arange(6).repeat_interleave(count)
    mask = prefix([1] * 20)
    prompts = ToyPrompts(20, 1).batch(0)
    rollout = replace(
        rollout, prompts=prompts, ids=ids, loss_mask=mask, response_mask=mask,
        terminated=mask[:, 0], policy_version=torch.ones(20, dtype=torch.long),
        behavior_logprobs=mu.log()[ids],
    )  # fmt: skip
    none = RewardOutput(scores=torch.zeros(20), valid=mask[:, 0])
    algorithm = ppo(lam=1.0, whiten_advantages=False)
    made, metrics = with_metrics(rollout, none, learner, algorithm, 0.1, correction)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum()

    of_mu, of_pi = float(kl(mu, ref)), float(kl(pi, ref).detach())
    assert of_mu - float(kl(mu, pi).detach()) < -0.1  # the mean of log(pi / ref) under mu
    want = of_mu if correction is None else of_pi
    assert metrics["objective/kl"] == pytest.approx(want, abs=1e-6)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.1 * want, abs=1e-6)

    learner.logits.grad = None
    logprobs = learner.logits.log_softmax(0)[ids]
    ratio = (logprobs - made.old_logprobs).exp()  # as in the loss; 1 where weights multiply
    (made.advantages * ratio)[mask].mean().backward()
    gradient = learner.logits.grad
    (exact,) = torch.autograd.grad(-0.1 * kl(learner.logits.softmax(0), ref), learner.logits)
    right = torch.allclose(gradient, exact, atol=1e-7)
    assert right == (correction is not None)


IN_FLIGHT = {"rollout_schedule": "as_completed", "in_flight_weight_updates": True}


def run_of(kind: str, folder: Any, **options: Any) -> Any:
    make = {"ppo": small, "rloo": rloo, "grpo": grpo}[kind]
    own = {"response_length": 4}
    own |= {"reward_model": None} if kind == "ppo" else {"num_generations": 2}
    plain = {
        "model": tiny_policy(vocab_size=32),
        "reward_funcs": [lambda completions, **_: [float(len(c)) for c in completions]],
        "train_dataset": [{"prompt": f"w{i} w{i + 1}"} for i in range(3, 20)],
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "total_episodes": None,
        "max_steps": 4,
        "learning_rate": 1e-2,
    }
    return make(**plain | own | options)


@pytest.mark.parametrize(
    ("kind", "options", "want"),
    [
        ("grpo", {"max_lag": 1}, None),
        ("ppo", {"max_lag": 1, **IN_FLIGHT}, Correction()),
        ("ppo", {"sampler_correction": "mask_old", **IN_FLIGHT}, Correction()),
        ("ppo", {"max_lag": 2}, Correction(kind="truncate", level="token", high=2.0)),
        ("rloo", {"max_lag": 2}, Correction(kind="truncate", level="token", high=2.0)),
        ("ppo", {"max_lag": 3, "sampler_correction": "off"}, None),
        ("ppo", {"max_lag": 3, "sampler_correction": None}, None),
        ("ppo", {"max_lag": 1, "sampler_correction_level": "token"}, Correction(high=2.0)),
        ("ppo", {"sampler_correction_high": 3.0}, Correction(high=3.0)),
        ("ppo", {"sampler_correction_low": 0.5}, Correction(high=2.0, low=0.5)),
        (
            "grpo",
            {"sampler_correction": "mask", "sampler_correction_level": "sequence_mean"},
            Correction(kind="mask", level="sequence_mean", high=1.01, low=1 / 1.01),
        ),
    ],
)
def test_when_weights_are_on_and_their_bounds(kind, options, want, tmp_path, caplog) -> None:
    made = run_of(kind, tmp_path, **options)
    assert made.engine.correction == want
    said = [
        r.getMessage() for r in caplog.records if "importance weights of learner over" in r.message
    ]
    assert len(said) == (want is not None and "sampler_correction" not in "".join(options))


VLLM = {"rollout_engine": "http://127.0.0.1:1"}
UNBOUNDED = {
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": math.inf,
}


def correction_of(args: Any) -> Correction | None:
    vllm = find_engine(args).vllm
    sampling = Sampling(max_new_tokens=4)
    options = correction_options(args)
    return build_correction(options, engine="it", vllm=vllm, logprobs="sampled", sampling=sampling)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, ("mask", "sequence", 3.0, 0.0)),
        ({"vllm_importance_sampling_mode": "token_truncate"}, ("truncate", "token", 3.0, 0.0)),
        ({"vllm_importance_sampling_clip_min": 0.5}, ("mask", "sequence", 3.0, 0.5)),
        ({"vllm_importance_sampling_cap": 2.5}, ("mask", "sequence", 2.5, 0.0)),
        (UNBOUNDED, ("mask", "sequence", math.inf, 0.0)),
        ({"vllm_importance_sampling_correction": False}, None),
        ({"sampler_correction": "off"}, None),
        ({"sampler_correction": "truncate"}, ("truncate", "token", 2.0, 0.0)),
        ({"sampler_correction_level": "sequence"}, ("truncate", "sequence", 5.0, 0.0)),
    ],
)
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_with_vllm_what_is_set_acts_at_every_lag(options, want, max_lag, tmp_path, caplog) -> None:
    lag = {"max_lag": max_lag}
    found = correction_of(
        options_of_trl.GRPOConfig(output_dir=str(tmp_path), **VLLM, **lag, **options)
    )
    if want is None:
        assert found is None
    else:
        assert found is not None
        assert (found.kind, found.level, found.high, found.low) == want
    caplog.clear()
    without = {k: v for k, v in options.items() if k.startswith("vllm")}
    found = correction_of(options_of_trl.GRPOConfig(output_dir=str(tmp_path), **lag, **without))
    assert found == (Correction() if max_lag == 2 else None)
    assert ("has no effect: vLLM does not sample" in caplog.text) == bool(without)


def test_a_script_of_trl_keeps_the_weights_of_trl(tmp_path: Any) -> None:
    options = {"output_dir": str(tmp_path), "use_vllm": True, "vllm_mode": "server"}
    flags = ["--use_vllm", "True", "--vllm_mode", "server", "--output_dir", str(tmp_path)]
    (parsed,) = TrlParser(options_of_trl.GRPOConfig).parse_args_and_config(flags)
    for args in (options_of_trl.GRPOConfig(**options), parsed):
        assert correction_of(args) == Correction(kind="mask", level="sequence", high=3.0)
    found = correction_of(options_of_trl.GRPOConfig(sampler_correction_high=3.0, **options))
    assert found == Correction(high=3.0)
    assert correction_of(GRPOConfig(output_dir=str(tmp_path), **VLLM)) == Correction()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "tokens"}, "mode='tokens' must be one of 'token_truncate'"),
        ({"clip_min": 3.0}, "correction_low=3 must be less than sampler_correction_high=3"),
        ({"mode": "token_truncate", "clip_max": math.inf}, "needs a bound"),
        ({"clip_max": float("nan")}, "clip_max=nan must be"),
    ],
)
def test_weights_of_trl_that_cannot_be(options, words, tmp_path) -> None:
    given = {f"vllm_importance_sampling_{k}": v for k, v in options.items()}
    with pytest.raises(ConfigError, match=words):
        correction_of(options_of_trl.GRPOConfig(output_dir=str(tmp_path), **VLLM, **given))


def test_what_cannot_be_weighed_is_refused(tmp_path: Any) -> None:
    learner = learner_at(0)
    rollout, judged = sample(learner, shift=0.1, version=0)
    rollout = replace(rollout, behavior_logprobs=None)
    with pytest.raises(RolloutError, match="which records none"):
        with_metrics(rollout, judged, learner, ppo(), 0.0, Correction())
    both = {"sampler_correction": "mask", "vllm_importance_sampling_mode": "token_mask"}
    with pytest.raises(ConfigError, match="both set the importance weights"):
        options_of_trl.GRPOConfig(output_dir=str(tmp_path), **VLLM, **both)


def test_what_an_engine_of_ones_own_records_is_checked_and_not_believed(tmp_path: Any) -> None:
    from kedge.rollout.embedded.engine import EmbeddedEngine
    from tests.unit.text_toys import EOS

    class Wrong(EmbeddedEngine):
        gap, wrong = 0.1, 4  # nats, in the first rows

        def generate(self, *given: Any, **options: Any) -> Rollout:
            made = super().generate(*given, **options)
            assert made.behavior_logprobs is not None
            gap = self.gap * (torch.arange(len(made)) < self.wrong)[:, None]
            return replace(made, behavior_logprobs=made.behavior_logprobs - gap)

    def first_row(**options: Any) -> dict[str, float]:
        policy = tiny_policy(vocab_size=32)
        engine = Wrong(policy, pad_id=EOS)
        options |= {"rollout_engine": engine, "model": policy, "num_ppo_epochs": 1}
        made = run_of("ppo", tmp_path / str(Wrong.gap), preflight=False, **options)
        made.train()
        return next(row for row in made.state.log_history if "rollout/logprob_gap" in row)

    row = first_row()
    assert row["rollout/logprob_gap"] > 0.05
    assert row["rollout/ratio_max"] == pytest.approx(math.exp(0.1), rel=1e-3)
    assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)  # anchored at the learner
    Wrong.gap, Wrong.wrong = 3.0, 2  # weights of e^3 and more
    rejected = first_row(sampler_correction="mask", sampler_correction_level="sequence")
    assert rejected["rollout/ratio_max"] == pytest.approx(math.exp(3.0), rel=1e-3)  # raw
    assert rejected["rollout/untrained_rows"] == 2  # and leave the denominator of the loss


@pytest.mark.parametrize("scale", [1e-4, 0.1, 5.0])
def test_the_range_of_raw_ratios(scale: float) -> None:
    """Of 20,000 log ratios in float64, on one rank and on two of unequal size."""
    exact = scale * torch.randn(20_000, dtype=torch.float64, generator=torch.manual_seed(1))
    exact[:300] = 0.0
    padded = torch.cat([exact, torch.full((50,), math.nan)]).float()
    sent: list[torch.Tensor] = []
    ratio_range(padded[:700], lambda x: sent.append(x) or x, rank=0, world_size=2)
    two = ratio_range(padded[700:], lambda x: x + sent[0], rank=1, world_size=2)
    assert two == ratio_range(padded, lambda x: x, rank=0, world_size=1)
    inorder, last = exact.sort().values.tolist(), len(exact) - 1
    places = {"min": 0, "p01": int(0.01 * last), "p99": int(0.99 * last), "max": last}
    for name, place in places.items():
        error = 6e-3 if name.startswith("p") else 1e-6
        assert math.log(two[name]) == pytest.approx(inorder[place], rel=error)
    assert ratio_range(padded[-50:], lambda x: x, rank=0, world_size=1) == {}


def test_an_infinite_ratio_is_seen() -> None:
    found = ratio_range(
        torch.tensor([math.inf, 0.1, math.nan, -math.inf]), lambda x: x, rank=0, world_size=1
    )
    assert (found["min"], found["max"]) == (math.exp(-700), math.exp(700))
