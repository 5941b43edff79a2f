"""PPO's losses and its critic against float64 computations, each with a variant that fails."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kedge import AsyncPPOConfig, GRPOConfig, PPOConfig
from kedge.algorithms import ppo
from kedge.algorithms.transforms import divide_by_length
from kedge.cli.arguments import parse
from kedge.config.algorithms import RECIPES
from kedge.learner.reference import frozen_copy
from kedge.loop.control import StepControl
from kedge.loop.stages import EpochPlan, make_experience, optimize
from kedge.math.losses import RatioMask, masked_policy_loss
from kedge.math.ratios import Correction
from kedge.models.freezing import freeze_attention
from kedge.models.model import causal_parts
from kedge.models.value_head import copy_as_value
from kedge.records.errors import ConfigError
from kedge.records.types import PolicyOutput, RewardOutput
from kedge.testing import tiny_policy
from tests.e2e.small import length_reward, rows, small
from tests.learners import VOCAB, experience, learner, rollout, take_step
from tests.unit.advantage_inputs import micro_batch, prefix

LENGTHS = [4, 1, 3]
MASK = prefix(LENGTHS)


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, *MASK.shape, generator=g).mul(0.7)
    return new - 2, old - 2, advantages


def policy_loss(algorithm, new, mb):
    """The policy's part of the loss with log-probabilities ``new``, and their gradient."""
    new = new.clone().requires_grad_()
    zeros = torch.zeros(MASK.shape)
    out = algorithm.loss(PolicyOutput(logprobs=new * MASK, entropy=zeros, values=zeros), mb)
    total = sum(part for name, part in out.parts.items() if name != "value")
    return float(total.detach()), torch.autograd.grad(total, new)[0]


def step_of(algorithm, **fields):
    new, old, advantages = batch()
    mb = micro_batch(algorithm, advantages, MASK, old=old * MASK)
    zeros = torch.zeros(MASK.shape)
    return new, replace(mb, rows=replace(mb.rows, old_values=zeros, returns=zeros, **fields))


class TestMask:
    """Eq. 1 and 3 of arXiv:2607.07508: -r A inside, nothing outside, whatever the sign of A."""

    def reference(self, clipped=False):
        new, old, advantages = (x.double() for x in batch())
        loss, gradient, count = 0.0, torch.zeros(MASK.shape).double(), sum(LENGTHS)
        for i, t in MASK.nonzero().tolist():
            ratio = math.exp(new[i, t] - old[i, t])
            inside = 1 - 0.3 < ratio < 1 + 0.8
            if clipped:
                inside = ratio < 1.8 if advantages[i, t] > 0 else ratio > 0.7
            if inside:
                loss -= ratio * float(advantages[i, t]) / count
                gradient[i, t] = -ratio * advantages[i, t] / count
        return loss, gradient

    @pytest.mark.parametrize("broken", [False, True])
    def test_loss_and_gradient(self, broken):
        algorithm = ppo(cliprange=RatioMask(0.3, 0.8))
        new, mb = step_of(algorithm)
        loss, gradient = policy_loss(algorithm, new, mb)
        expected = self.reference(clipped=broken)
        close = abs(loss - expected[0]) < 1e-6 and torch.allclose(gradient.double(), expected[1])
        assert close is not broken

    def test_the_default_is_the_clipped_loss_and_a_pair_is_clip_higher(self):
        new, mb = step_of(ppo())
        plain, higher = ppo(cliprange=0.2), ppo(cliprange=(0.2, 0.28))
        assert policy_loss(ppo(), new, mb)[0] == policy_loss(plain, new, mb)[0]
        ratio, advantages = torch.tensor([1.25, 1.25]), torch.tensor([1.0, -1.0])
        inside = masked_policy_loss(ratio, advantages, bounds=RatioMask(0.2, 0.28))
        assert inside.tolist() == [-1.25, 1.25]
        assert policy_loss(higher, new, mb)[0] != policy_loss(plain, new, mb)[0]


@pytest.mark.parametrize(
    ("how", "weight"),
    [
        ("token", lambda i: 1 / 8),
        ("sequence", lambda i: 1 / (3 * LENGTHS[i])),
        ("constant", lambda i: 1 / (3 * 10)),
    ],
)
def test_aggregation(how, weight):
    algorithm = ppo(cliprange=math.inf)
    if how == "sequence":
        algorithm = replace(algorithm, weighting="row_then_token_mean")
    elif how == "constant":
        algorithm = divide_by_length(algorithm, response_length=10)
    new, mb = step_of(algorithm)
    _, old, advantages = (x.double() for x in batch())
    expected = -sum(
        weight(i) * math.exp(new[i, t] - old[i, t]) * float(advantages[i, t])
        for i, t in MASK.nonzero().tolist()
    )
    assert policy_loss(algorithm, new, mb)[0] == pytest.approx(expected, rel=1e-5)


class TestEntropyBonus:
    def test_fixed(self):
        """It raises the entropy of a policy; with the sign turned around it lowers it."""
        entropies = {}
        for coef in (10.0, 0.0, -10.0):
            found = learner(entropy_grad=True)
            plan = EpochPlan(epochs=5, minibatches=1, micro_rows=3, seed=0)
            control = StepControl(entropy_coef=coef)
            optimize(experience(rollout()), found, ppo(), plan, control)
            entropies[coef] = take_step(found)["policy/entropy_avg"]
        assert entropies[10.0] > entropies[0.0] + 1e-3
        assert entropies[-10.0] < entropies[0.0] - 0.1

    def test_where_no_token_trains_the_policy_does_not_move(self):
        found = learner(entropy_grad=True)
        take_step(found)  # momentum
        data = experience(rollout())
        data = replace(data, loss_mask=torch.zeros_like(data.loss_mask))
        before = {n: p.detach().clone() for n, p in found.policy.named_parameters()}
        plan = EpochPlan(epochs=1, minibatches=1, micro_rows=3, seed=0)
        metrics = optimize(data, found, ppo(), plan, StepControl(entropy_coef=0.1))
        assert all(torch.equal(p, before[n]) for n, p in found.policy.named_parameters())
        assert "val/ratio" not in metrics


class TestCritic:
    def critic(self, family="llama"):
        policy = tiny_policy(family, vocab_size=VOCAB)
        return policy, copy_as_value(policy, causal_parts(policy))

    @pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
    def test_a_copy_has_the_backbone_of_the_policy_and_gives_0(self, family):
        policy, value = self.critic(family)
        backbone = causal_parts(policy).backbone.state_dict()
        assert all(torch.equal(backbone[n], x) for n, x in value.backbone.state_dict().items())
        assert not any(a is b for a in policy.parameters() for b in value.parameters())
        found = learner(policy=policy, value=value, reference=frozen_copy(policy))
        values = found.compute_logprobs(
            rollout(), values=True, reference=False, full_kl=False
        ).values
        assert values.abs().max() == 0

    @pytest.mark.parametrize(("family", "mixer"), [("llama", "self_attn"), ("gpt2", "attn")])
    def test_frozen_attention(self, family, mixer):
        policy, value = self.critic(family)
        freeze_attention(value.backbone, what="the value model")
        found = learner(policy=policy, value=value, reference=frozen_copy(policy))
        before = {n: p.detach().clone() for n, p in value.named_parameters()}
        take_step(found)
        take_step(found)
        moved = {n for n, p in value.named_parameters() if not torch.equal(p, before[n])}
        assert moved
        assert not any(f".{mixer}." in name for name in moved)
        assert any(".mlp." in name for name in moved)

    def trained(self, passes):
        """The policy's weights and the metrics after two steps, each with so many of the value."""
        policy, value = self.critic()
        found = learner(policy=policy, value=value, reference=frozen_copy(policy))
        data, steps = experience(rollout()), []
        plan = EpochPlan(epochs=1, minibatches=2, micro_rows=3, seed=0, value_passes=passes)
        control = StepControl(after_step=lambda: steps.append(1))
        metrics = optimize(data, found, ppo(), plan, control)
        assert len(steps) == 2 * passes
        return dict(policy.named_parameters()), metrics

    @pytest.mark.parametrize("passes", [2, 4])
    def test_value_passes_move_the_value_alone(self, passes):
        (weights, metrics), (want, usual) = self.trained(passes), self.trained(1)
        assert all(torch.equal(weights[n], x) for n, x in want.items())
        assert metrics == usual


class TestRatioToTheSampler:
    def denominators(self, correction):
        found = learner()
        sampled = rollout()
        behavior = torch.where(sampled.loss_mask, -3.0, 0.0)
        sampled = replace(sampled, behavior_logprobs=behavior)
        scores = RewardOutput(scores=torch.arange(6.0), valid=torch.ones(6, dtype=torch.bool))
        made, terms = make_experience(sampled, scores, found, ppo(), 0.0, correction)
        return made.old_logprobs, behavior, terms

    def test_every_token_has_that_of_the_sampler(self):
        old, behavior, terms = self.denominators(Correction(kind="ratio"))
        assert torch.equal(old, behavior)
        assert terms.weight is None

    def test_without_it_fresh_tokens_have_the_learner_s(self):
        old, behavior, _ = self.denominators(None)
        assert not torch.equal(old, behavior)


class TestRecipe:
    @pytest.mark.parametrize("name", RECIPES)
    def test_it_sets_options_that_changes_override(self, tmp_path, name):
        given = {"output_dir": str(tmp_path), "use_cpu": True, "rollout_engine": "embedded"}
        flags = ["--recipe", name, "--output_dir", str(tmp_path), "--use_cpu", "True"]
        here = ["--rollout_engine", "embedded"]
        configs = [kind.recipe(name, **given) for kind in (PPOConfig, AsyncPPOConfig)]
        configs += [parse([*flags, *here], prog="kedge ppo").config]
        configs += [replace(configs[0], seed=3)]
        for config in configs:
            assert {n: getattr(config, n) for n in RECIPES[name]} == RECIPES[name]
        changed = parse([*flags, "--kl_coef", "0.3"], prog="kedge ppo").config
        for config in changed, PPOConfig.recipe(name, **given, kl_coef=0.3):
            own = {n: getattr(config, n) for n in RECIPES[name]}
            assert own == {**RECIPES[name], "kl_coef": 0.3}

    def test_a_file_may_unset_an_option(self, tmp_path):
        file = tmp_path / "sao.yaml"
        file.write_text("recipe: sao\nlam_alpha: null\nnum_value_epochs: 1\nkl_coef: 0.05\n")
        config = parse(["--config", str(file), "--use_cpu"], prog="kedge ppo").config
        found = config.lam_alpha, config.num_value_epochs, config.kl_coef, config.value_source
        assert found == (None, 1, 0.05, "copy")

    def test_what_does_not_go_with_it_is_refused(self, tmp_path):
        given = {"output_dir": str(tmp_path), "use_cpu": True}
        with pytest.raises(ConfigError, match=r"dual_clip=3\.0 has no effect with policy_loss"):
            PPOConfig.recipe("sao", **given, dual_clip=3.0)
        with pytest.raises(ConfigError, match="recipe='soa' must be one of 'sao', 'agent'"):
            PPOConfig.recipe("soa", **given)
        with pytest.raises(ConfigError, match="--recipe sao is for PPO: it sets "):
            parse(["--recipe", "sao"], prog="kedge grpo", config=GRPOConfig)

    def test_as_completed_the_critic_trains_first(self):
        """Lag and schedule of the recipe itself: no row older than 1, no step of the policy."""
        scores = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
        trainer = small(
            **{**RECIPES["sao"], "value_warmup_steps": 2, "total_episodes": 24, **scores},
            reward_model=None,
        )
        trainer.train()
        log = rows(trainer)
        assert [row["lr"] == 0 for row in log[:3]] == [True, True, False]
        assert all(row["rollout/lag"] <= 1 for row in log)
        assert max(row["rollout/lag"] for row in log) > 0
        assert log[0]["policy/policykl_avg"] == pytest.approx(0.0, abs=1e-6)

    def test_at_lag_0_it_is_the_same_options_bit_for_bit(self, tmp_path):
        """The sampler's log-probabilities are the learner's, so the ratio starts at 1."""
        sao = {**RECIPES["sao"], "max_lag": 0, "rollout_schedule": "in_order"}
        sao |= {"value_warmup_steps": 1, "total_episodes": 16, "reward_model": None}
        sao |= {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
        first, again = (small(**sao, output_dir=str(tmp_path / n)) for n in "ab")
        plain = small(**{**sao, "sampler_correction": "off"}, output_dir=str(tmp_path / "c"))
        for trainer in (first, again, plain):
            trainer.train()
        names = ("objective/scores", "loss/policy_avg", "loss/value_avg", "val/ratio")
        runs = [[[row[n] for n in names] for row in rows(t)] for t in (first, again, plain)]
        assert runs[0] == runs[1] == runs[2]
        assert next(row["val/ratio"] for row in rows(first)) == pytest.approx(1, abs=1e-6)
        weights = [dict(t.model.named_parameters()) for t in (first, plain)]
        assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


def test_running_reward_scale():
    """Runs with scores times 1 and 50 train alike; the log has the scores as they are.

    The scale of iteration k is the deviation of the scores of iterations 1 to k, in float64.
    """
    seen = {1.0: [], 50.0: []}

    def trainer(factor):
        def reward(completions, **_):
            seen[factor].append([factor * x for x in length_reward(completions)])
            return seen[factor][-1]

        given = {"reward_model": None, "reward_funcs": [reward], "preflight": False}
        return small(scale_rewards="running", whiten_advantages=False, **given)

    runs = {f: trainer(f) for f in seen}
    for run in runs.values():
        run.train()
    for one, other in zip(rows(runs[1.0]), rows(runs[50.0]), strict=True):
        assert other["objective/scores"] == pytest.approx(50 * one["objective/scores"])
        assert other["loss/value_avg"] == pytest.approx(one["loss/value_avg"], rel=1e-5)
    scale = runs[1.0].engine.reward_scale
    scores = torch.tensor(seen[1.0][:2], dtype=torch.float64).flatten()
    assert scale.std == pytest.approx(float(scores.std()), rel=1e-12)
