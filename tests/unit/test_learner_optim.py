"""Optimizers, precision and compilation do what the options say."""

from dataclasses import replace

import pytest
import torch
from transformers import Adafactor

from kedge.errors import CheckpointError, ConfigError, DamagedCheckpointError
from kedge.learner.optim import build_optimizer, parameter_groups
from kedge.models.value_head import load_value
from kedge.testing import tiny_policy, tiny_reward_model
from tests.learners import VOCAB, arguments, experience, learner, rollout, take_step


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, torch.optim.AdamW),
        ({"optim": "adamw_torch"}, torch.optim.AdamW),
        ({"optim": "sgd"}, torch.optim.SGD),
        ({"optim": "rmsprop"}, torch.optim.RMSprop),
        ({"optim": "adagrad"}, torch.optim.Adagrad),
        ({"optim": "adafactor"}, Adafactor),
    ],
)
def test_the_optimizer_is_the_one_named_and_its_state_is_loaded(options, kind):
    first, second = (learner(args=arguments(**options)) for _ in range(2))
    assert type(first.optimizer) is kind
    before = first.fingerprint()
    take_step(first)
    assert first.fingerprint() != before
    second.load_state_dict(first.state_dict())
    assert second.fingerprint() == first.fingerprint()
    assert take_step(second) == take_step(first)


@pytest.mark.parametrize("betas", [(0.8, 0.9), (0, 0)])
def test_adam_gets_its_betas_and_epsilon(betas):
    args = arguments(adam_beta1=betas[0], adam_beta2=betas[1], adam_epsilon=1e-5)
    group = learner(args=args).optimizer.param_groups[0]
    assert group["betas"] == betas
    assert group["eps"] == 1e-5


def test_an_optimizer_whose_package_is_missing_is_named():
    with pytest.raises(ConfigError, match="optim='adamw_torch_npu_fused' with optim_args="):
        learner(args=arguments(optim="adamw_torch_npu_fused"))


@pytest.mark.slow
def test_a_backend_that_torch_does_not_know_is_named():
    with pytest.raises(ConfigError, match="torch_compile_backend='x' with torch_compile_mode=None"):
        learner(args=arguments(torch_compile=True, torch_compile_backend="x"))


def test_nothing_to_train_is_refused():
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ConfigError, match="at least one weight must have requires_grad"):
        build_optimizer(arguments(), parameter_groups({"policy": (frozen, 0.1)}, 0.0))


def test_an_optimizer_and_schedule_of_your_own():
    found = learner()
    mine = torch.optim.SGD(found.module.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.StepLR(mine, 1, gamma=0.5)
    found = learner(policy=found.policy, value=found.value, optimizers=(mine, schedule))
    assert take_step(found)["lr"] == 0.25
    found.advance_version()
    assert take_step(found)["lr"] == 0.125


@pytest.mark.slow
def test_compiled_backbones_give_the_same_numbers():
    args = arguments(torch_compile=True, torch_compile_backend="aot_eager")
    plain, compiled = (
        learner(
            policy=tiny_policy(vocab_size=VOCAB, layers=1),
            value=load_value(tiny_reward_model(vocab_size=VOCAB, layers=1)),
            args=each,
        )
        for each in (None, args)
    )
    inner = plain.policy.model
    assert type(compiled.module.parts.backbone) is not type(inner)
    assert type(compiled.policy.model) is type(inner)  # sampling is not compiled
    for _ in range(2):
        assert take_step(compiled) == pytest.approx(take_step(plain), rel=1e-4, abs=1e-6)
    a, b = (
        x.compute_logprobs(rollout(), values=True, reference=True, full_kl=False)
        for x in (plain, compiled)
    )
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(a.values, b.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"optim": "adamw_torch"}])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x[:1].clone(), r"torch.float32 \(1,"),
        (lambda x: x.double(), "torch.float64"),
        (lambda x: 3.0, "3.0"),
        (None, "None"),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused(options, change, said):
    """Fused AdamW (the default) would write past the end of the weight."""
    first, second = (learner(args=arguments(**options)) for _ in range(2))
    take_step(first)
    state = first.state_dict()
    index, one = next(
        (i, x) for i, x in state["optimizer"]["state"].items() if first_matrix(x) is not None
    )
    name = first_matrix(one)
    if change is None:
        del one[name]
    else:
        one[name] = change(one[name])
    with pytest.raises(
        DamagedCheckpointError, match=rf"state/{index}/{name} must be .*, got {said}.*of the weight"
    ):
        second.load_state_dict(state)


def first_matrix(state):
    return next((n for n, x in state.items() if torch.is_tensor(x) and x.dim() == 2), None)


def test_an_optimizer_of_other_weights_is_refused():
    first, second = learner(), learner()
    take_step(first)
    state = first.state_dict()
    state["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(CheckpointError, match="train the same weights"):
        second.load_state_dict(state)


def test_scaled_losses_give_the_same_step_and_the_scale_falls_until_it_fits():
    plain, scaled = learner(max_grad_norm=0.5), learner(max_grad_norm=0.5)
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert take_step(scaled) == pytest.approx(take_step(plain), rel=1e-4, abs=1e-6)
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before, skipped = scaled.fingerprint(), 0
    batch = experience(rollout())
    large = replace(batch, returns=batch.returns * 1e4)
    while scaled.fingerprint() == before:
        skipped = take_step(scaled, large)["skipped_steps"]
    assert skipped > 3
    assert scaled.scaler.get_scale() == 2.0 ** (127 - skipped)
