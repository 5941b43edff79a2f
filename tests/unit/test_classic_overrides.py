"""Which steps of PPO an override replaces, with which arguments, and that its results are used.

The weights show each change by its amount; an override that returns what it would have returned
leaves the weights as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.ext.trl.classic import PPOTrainer
from kedge.ext.trl.classic.stats_recorder import KEYS
from kedge.ext.trl.classic.steps import STEPS
from kedge.records.errors import ConfigError, DataError
from tests.classic_models import gpt2, lora, moved, samples, t5, trainer, watching

pytestmark = pytest.mark.filterwarnings("ignore:the KL to the reference")
SIZES = {"sgd": 0.1, "ppo_epochs": 2}  # two mini-batches of four to an optimizer step


def weights(found: PPOTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in found.model.parameters()])


class Doubled(PPOTrainer):
    def loss(self, *args: Any) -> Any:
        policy, value, stats = super().loss(*args)
        return 2 * policy, 2 * value, stats | {"loss/total": stats["loss/total"] * 2}


class Late(PPOTrainer):
    """Advantages that are twice as large, and returns one higher."""

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> Any:
        values, advantages, returns = super().compute_advantages(values, rewards, mask)
        return values, 2 * advantages, returns + mask


class Generous(PPOTrainer):
    def compute_rewards(self, scores: Tensor, *rest: Tensor) -> Any:
        rewards, penalty, kls = super().compute_rewards(scores, *rest)
        return rewards + 3 * rest[-1], penalty, kls


class Sevenfold(PPOTrainer):
    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        return 7 * super()._kl_penalty(logprob, ref_logprob)


class Skipping(PPOTrainer):
    """The optimizer moves three times as far: written as TRL's method is."""

    def train_minibatch(self, old: Any, values: Any, new: Any, logits: Any, *rest: Any) -> Any:
        vpreds, mask, advantages, returns = rest
        policy, value, stats = self.loss(
            old, values, logits, vpreds, new, mask, advantages, returns
        )
        self.accelerator.backward(3 * (policy + value))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return stats


def one_update(kind: type | None, **options: Any) -> tuple[Tensor, Any, Any]:
    found = trainer(gpt2(), kind=kind, **SIZES | options)
    before = weights(found)
    stats = found.step(*samples(seed=1))
    return weights(found) - before, found, stats


@pytest.mark.parametrize("kind", [Doubled, Skipping])
def test_with_one_mini_batch_the_gradient_is_exact(kind: type) -> None:
    once = {"ppo_epochs": 1, "sgd": 1e-3, "mini_batch_size": 8}
    change, _, stats = one_update(None, **once)
    more, _, told = one_update(kind, **once)
    factor = 2.0 if kind is Doubled else 3.0
    assert torch.allclose(more, factor * change, atol=1e-6)
    if kind is Doubled:
        assert told["ppo/loss/total"] == pytest.approx(2 * stats["ppo/loss/total"], rel=1e-3)


def test_an_overridden_train_minibatch_accumulates_as_trl_does() -> None:
    """Its optimizer steps once for two mini-batches, on the mean of their gradients."""
    steps: list[float] = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(
                float(sum(p.grad.abs().sum() for g in self.param_groups for p in g["params"]))
            )
            return super().step(closure)

    found = trainer(gpt2(), kind=Skipping, **SIZES)
    found.optimizer = Counted(found.model.parameters(), lr=0.1)
    found.step(*samples(seed=1))
    assert len(steps) == 2  # epochs; four mini-batches


def test_rewards_and_kl_and_advantages() -> None:
    whole = {"mini_batch_size": 8}
    _, _, stats = one_update(None, **whole)
    _, _, generous = one_update(Generous, gamma=0.0, lam=0.0, **whole)
    _, _, plain = one_update(None, gamma=0.0, lam=0.0, **whole)
    # Without discount a return is its token's reward.
    assert generous["ppo/returns/mean"] == pytest.approx(plain["ppo/returns/mean"] + 3, abs=1e-4)
    _, _, kl = moved(None)
    _, _, seven = moved(Sevenfold)
    assert abs(kl["objective/kl"]) > 1e-3
    _, _, late = one_update(Late, **whole)
    assert late["ppo/returns/mean"] == pytest.approx(stats["ppo/returns/mean"] + 1, abs=1e-4)
    first = len(stats["ppo/policy/advantages"]) // 2
    assert late["ppo/policy/advantages"][:first].std() == pytest.approx(
        2 * stats["ppo/policy/advantages"][:first].std(), rel=1e-3
    )
    assert seven["objective/kl_dist"] == pytest.approx(7 * kl["objective/kl_dist"], rel=0.2)


def test_forward_passes_and_inputs_of_ones_own() -> None:
    """Values that are 5 higher act; padding on the left changes nothing."""

    class Higher(PPOTrainer):
        def batched_forward_pass(self, *args: Any, **kwargs: Any) -> Any:
            logprobs, logits, values, mask = super().batched_forward_pass(*args, **kwargs)
            return logprobs, logits, values + 5, mask

    class Left(PPOTrainer):
        def prepare_model_inputs(self, queries: Any, responses: Any) -> Any:
            inputs = super().prepare_model_inputs(queries, responses)
            sizes = inputs["attention_mask"].sum(1).tolist()
            shift = [inputs["input_ids"].shape[1] - n for n in sizes]
            turned = {
                k: torch.stack([row.roll(n) for row, n in zip(x, shift, strict=True)])
                for k, x in inputs.items()
            }
            places = (turned["attention_mask"].cumsum(1) - 1).clamp(min=0)
            return turned | {"position_ids": places}

    change, _, stats = one_update(None, mini_batch_size=8)
    _, _, higher = one_update(Higher, mini_batch_size=8)
    assert higher["ppo/val/mean"] == pytest.approx(stats["ppo/val/mean"] + 5, abs=1e-4)
    same, _, _ = one_update(Left, mini_batch_size=8)
    assert torch.allclose(change, same, atol=1e-5)


def test_a_collator_of_ones_own_pads_the_rows() -> None:
    from transformers import DataCollatorWithPadding

    from tests.classic_models import letters

    sizes = []

    class Wide(DataCollatorWithPadding):
        def __call__(self, features: Any) -> Any:
            batch = super().__call__(features)
            sizes.append(batch["input_ids"].shape)
            return batch

    change, _, _ = one_update(None)
    own, _, _ = one_update(None, collator=Wide(letters(28), pad_to_multiple_of=16))
    assert sizes == [(8, 16)]
    assert torch.allclose(change, own, atol=1e-5)


def test_early_stop_and_statistics() -> None:
    class Once(PPOTrainer):
        def _early_stop(self, policykl: Tensor) -> bool:
            assert policykl.shape == ()
            return True

    class Told(PPOTrainer):
        def record_step_stats(self, kl_coef: float, **data: Any) -> Any:
            stats = super().record_step_stats(kl_coef, **data)
            stats["objective/kl"] = torch.tensor(60.0)  # ten times the target
            return stats | {"mine": stats["ppo/mean_scores"].item() + 1}

    once, _, _ = one_update(Once, early_stopping=True)
    single, _, _ = one_update(None, ppo_epochs=1)
    assert torch.allclose(once, single, atol=1e-6)
    _, found, stats = one_update(Told, horizon=80.0)
    assert stats["mine"] == pytest.approx(stats["ppo/mean_scores"] + 1)
    assert found.kl_ctl.value == pytest.approx(0.2 * (1 + 0.2 * 8 / 80))


def test_methods_that_are_put_onto_a_trainer() -> None:
    found = trainer(gpt2(), **SIZES)
    before = found._kl_penalty
    found._kl_penalty = lambda new, ref: before(new, ref) + 1  # type: ignore[method-assign]
    queries, responses, scores = samples(seed=1)
    stats = found.step(queries, responses, scores)
    assert stats["objective/kl_dist"] == pytest.approx([len(r) for r in responses], abs=1e-3)


def test_checks_of_ones_own_may_change_the_rows() -> None:
    class Negated(PPOTrainer):
        def _step_safety_checker(self, *args: Any) -> Any:
            queries, responses, scores, masks = super()._step_safety_checker(*args)
            return queries, responses, [-s for s in scores], masks

    queries, responses, scores = samples(seed=1)
    found = trainer(gpt2(), kind=Negated, **SIZES)
    stats = found.step(queries, responses, scores)
    assert stats["ppo/mean_scores"] == pytest.approx(-float(torch.stack(scores).mean()))


def test_masks_and_scores_of_tokens_reach_overrides() -> None:
    queries, responses, _ = samples(seed=1)
    dense = [torch.linspace(0, 1, len(r)) for r in responses]
    masks = [torch.arange(len(r)) != 1 for r in responses]
    changes = []
    for kind in (None, watching("loss", [])):
        found = trainer(gpt2(), kind=kind, **SIZES | {"mini_batch_size": 8})
        before = weights(found)
        found.step(queries, responses, dense, masks)
        changes.append(weights(found) - before)
    assert torch.allclose(*changes, atol=1e-5)


def test_an_adapter_is_switched_off_for_the_reference() -> None:
    pytest.importorskip("peft")
    calls: list[Any] = []
    want, _, fast = moved(None, peft_config=lora())
    change, _, stats = moved(watching("optional_peft_ctx", calls), peft_config=lora())
    assert len(calls) == 2
    assert torch.allclose(change, want, atol=1e-5)
    assert stats["objective/kl"] == pytest.approx(fast["objective/kl"], abs=1e-4)


def test_a_plain_reference_gets_a_head() -> None:
    def plain(model: Any) -> Any:
        return gpt2(seed=3)

    calls: list[Any] = []
    want, _, _ = moved(None, reference=plain)
    change, _, _ = moved(watching("batched_forward_pass", calls), reference=plain)
    assert torch.allclose(change, want, atol=1e-5)


def test_what_overrides_may_not_return() -> None:
    class Flat(PPOTrainer):
        def compute_rewards(self, scores: Tensor, *rest: Tensor) -> Any:
            return scores[:, None], *super().compute_rewards(scores, *rest)[1:]

    class Constant(PPOTrainer):
        def loss(self, *args: Any) -> Any:
            return *(x.detach() for x in super().loss(*args)[:2]), {}

    class Silent(PPOTrainer):
        def record_step_stats(self, kl_coef: float, **data: Any) -> Any:
            return {}

    for kind, error, message in (
        (Flat, DataError, r"compute_rewards must return rewards as .* got shape \(8, 1\)"),
        (Constant, ConfigError, "must return tensors with gradient"),
        (Silent, DataError, "record_step_stats must return 'objective/kl'"),
    ):
        with pytest.raises(error, match=message):
            one_update(kind)


def test_other_hooks_are_called(tmp_path: Any) -> None:
    """Outside of ``step``: sampling, batches of a dataset, saving."""
    from tests.unit.test_classic_loop import words

    calls: list[str] = []

    class Own(PPOTrainer):
        def _generate_batched(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("_generate_batched")
            return super()._generate_batched(*args, **kwargs)

        def _remove_unused_columns(self, dataset: Any) -> Any:
            calls.append("_remove_unused_columns")
            return dataset

        def _save_pretrained(self, save_directory: Any) -> None:
            (save_directory / "mine.txt").write_text("mine")

    found = trainer(gpt2(), kind=Own, dataset=words())
    assert set(next(iter(found.dataloader))) == {"query", "input_ids", "extra"}
    queries, _, _ = samples()
    rows = found.generate(
        queries, max_new_tokens=3, return_prompt=False, remove_padding=False, pad_to_multiple_of=8
    )
    assert {len(r) for r in rows} == {3}
    found.save_pretrained(tmp_path / "model")
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["mine.txt"]
    assert calls == ["_remove_unused_columns", "_generate_batched"]


CALLS = {  # of one step: two forward passes before, and two epochs of two mini-batches
    "_step_safety_checker": 1,
    "prepare_model_inputs": 1,
    "batched_forward_pass": 6,
    "compute_rewards": 1,
    "_kl_penalty": 8,
    "compute_advantages": 1,
    "loss": 4,
    "train_minibatch": 4,
    "_early_stop": 2,
    "record_step_stats": 1,
    "gather_stats": 0,  # on several processes: tests/e2e/test_ranks.py
    "optional_peft_ctx": 0,  # with an adapter: see below
}


def test_the_table_of_steps_is_whole() -> None:
    assert set(CALLS) == set(STEPS)


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    held: dict[str, Any] = {}
    for make in (gpt2, t5):
        change, _, stats = moved(None, make, early_stopping=True, target_kl=100.0)
        held[make.__name__] = (change, stats)
    return held


@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.parametrize("name", STEPS)
def test_an_override_is_called_and_changes_nothing_by_itself(
    name: str, make: Any, usual: dict[str, Any]
) -> None:
    calls: list[Any] = []
    change, found, stats = moved(watching(name, calls), make, early_stopping=True, target_kl=100.0)
    assert len(calls) == 2 * CALLS[name]  # two updates
    want, fast = usual[make.__name__]
    # An overridden loss counts as in TRL: the mean of the mini-batches' means.  Exact: see below.
    if name == "loss":
        assert (change - want).norm() < 0.2 * want.norm()
    else:
        assert torch.allclose(change, want, atol=1e-5)
    assert list(stats) == list(KEYS)
    assert found.current_step == 2
    assert found.kl_ctl.value == pytest.approx(trainer_kl(fast, found), rel=1e-4)
    for key in ("objective/kl", "ppo/mean_scores", "ppo/policy/approxkl", "ppo/val/error"):
        near = 0.1 if name == "loss" else 0.05
        assert stats[key] == pytest.approx(fast[key], rel=near, abs=1e-4), key
    assert stats["objective/logprobs"].shape == fast["objective/logprobs"].shape


def trainer_kl(stats: dict[str, Any], found: PPOTrainer) -> float:
    error = max(-0.2, min(0.2, stats["objective/kl"] / found.config.target - 1))
    return float(stats["objective/kl_coef"] * (1 + error * 8 / found.config.horizon))


def test_arguments_are_those_of_trl() -> None:
    """Shapes of TRL 0.11.4: B = 8 rows of S - 1 = 10 tokens, mini-batches of 4."""
    queries, responses, _ = samples(seed=1)
    width = max(len(q) + len(r) for q, r in zip(queries, responses, strict=True)) - 1
    whole, mini, vocabulary = (8, width), (4, width), 28
    every: dict[str, list[Any]] = {name: [] for name in STEPS}
    methods = {name: vars(watching(name, calls))[name] for name, calls in every.items()}
    moved(type("Watching", (PPOTrainer,), methods))
    seen = {name: calls[len(calls) // 2 :] for name, calls in every.items()}
    ((args, kwargs),) = seen["_step_safety_checker"]
    assert args[0] == 8
    assert [len(x) for x in args[1:4]] == [8, 8, 8]
    assert args[4] is None
    ((args, kwargs),) = seen["prepare_model_inputs"]
    assert [x.tolist() for x in args[0]] == [q.tolist() for q in queries]
    first, second, *others = seen["batched_forward_pass"]
    for args, kwargs in (first, second):
        assert args[3]["input_ids"].shape == args[3]["attention_mask"].shape == (8, width + 1)
        assert kwargs["return_logits"] is False
    assert first[1]["response_masks"] is None
    for args, kwargs in others:
        assert len(args[1]) == len(args[2]) == 4
        assert args[3]["input_ids"].shape == (4, width + 1)
        assert kwargs == {"return_logits": True}
    ((args, _),) = seen["compute_rewards"]
    assert [tuple(x.shape) for x in args] == [(8,), whole, whole, whole]
    assert args[3].dtype == torch.int64
    for args, _ in seen["_kl_penalty"]:
        assert [tuple(x.shape) for x in args] == [(width,), (width,)]
    ((args, _),) = seen["compute_advantages"]
    assert [tuple(x.shape) for x in args] == [whole] * 3
    for args, _ in seen["train_minibatch"]:
        shapes = [tuple(x.shape) for x in args]
        assert shapes == [mini, mini, mini, (*mini, vocabulary), mini, mini, mini, mini]
        assert [x.requires_grad for x in args] == [False, False, True, True, True, *[False] * 3]
    for args, _ in seen["loss"]:
        assert tuple(args[2].shape) == (*mini, vocabulary)
        assert args[5].dtype == torch.int64
    ((args, kwargs),) = seen["record_step_stats"]
    assert not args
    assert set(kwargs) == {
        *("scores", "logprobs", "ref_logprobs", "non_score_reward", "train_stats", "kl_coef"),
        *("masks", "queries", "responses", "kls"),
    }
    assert kwargs["train_stats"]["loss/total"].shape == (4, 1)  # one of each mini-batch
    assert kwargs["train_stats"]["policy/ratio"].shape[0] == 1
