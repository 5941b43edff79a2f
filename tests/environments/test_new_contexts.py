"""Environments that replace the conversation: one episode, read as several contexts.

A conversation that stays is read once: later turns read only what is new, and sample the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kedge.environments import NewContext, Response
from kedge.learner.logprobs import build_request
from kedge.learner.settings import LearnerSettings
from kedge.loop import updater
from kedge.models.compatibility import cache_argument
from kedge.models.model import CausalParts
from kedge.records.types import Rollout
from kedge.rollout.embedded import decode, generation
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from tests.e2e.small import rows
from tests.environments.toys import VOCAB, Echo, engine, played, policy, prompts, rollouts, sampling
from tests.unit.text_toys import PAD


class Compact(Echo):
    """After the second turn, only its last word and a summary are left of the conversation."""

    def step(self, response: Response) -> Any:
        observation, *rest = super().step(response)
        if self.turn == 2:
            word = (response.text.split() or ["w4"])[-1]
            summary = [
                {"role": "user", "content": f"w6 w7 {word}"},
                {"role": "assistant", "content": "w8"},
                {"role": "user", "content": observation},
            ]
            return NewContext(summary), *rest
        return observation, *rest


@torch.no_grad()
@pytest.mark.parametrize("joined", [True, False])
def test_rows_are_read_as_their_contexts(joined: bool) -> None:
    """States before tokens and at the end, of rows with none, one and two new contexts."""
    model = policy().eval()
    parts = CausalParts(model.model, model.lm_head, packs_rows=joined)
    rollout = rollouts(max_turn_tokens=5).generate(
        prompts(3), sampling=sampling(max_new_tokens=60), seed=3
    )
    starts = torch.zeros_like(rollout.loss_mask)
    starts[1, 4] = starts[2, 3] = starts[2, 9] = True
    rollout = replace(rollout, context_start=starts)
    request = build_request(
        parts,
        rollout,
        rollout.response_mask,
        LearnerSettings(total_iterations=1),
        torch.device("cpu"),
        value_slots=rollout.response_mask,
        last_values=True,
    )
    assert request.value_states is not None
    states = parts.read(request.packed).flatten(0, 1)
    logprobs = request.place_tokens(request.logprobs(parts, request.hidden(parts))[0])
    ends = states[request.value_states[-3:]]
    for i, cuts in enumerate([[], [4], [3, 9]]):
        length = int(rollout.response_mask[i].sum())
        prompt = rollout.prompts.ids[i][rollout.prompts.mask[i]]
        bounds = [*cuts, length]
        for begin, end in zip([0, *cuts], bounds, strict=True):
            before = prompt if begin == 0 else prompt[:0]
            ids = torch.cat([before, rollout.ids[i, begin:end]])
            output = model(ids[None], output_hidden_states=True)
            want = output.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            first = begin if begin == 0 else begin + 1  # nothing is before the first token
            torch.testing.assert_close(
                logprobs[i, first:end], want[len(want) - (end - first) :], rtol=0, atol=1e-5
            )
        torch.testing.assert_close(ends[i], output.hidden_states[-1][0, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"credit": "turn"}, {"rollout_schedule": "as_completed"}])
def test_ppo_trains_on_episodes_with_new_contexts(options: dict[str, Any]) -> None:
    trainer = played(environment=Compact, response_length=80, max_turns=4, max_lag=1, **options)
    trainer.train()
    found = [row for row in rows(trainer) if "rollout/logprob_gap" in row]
    assert found[0]["environment/new_contexts"] == 1.0
    assert found[0]["rollout/logprob_gap"] < 1e-5  # 0.007 if the learner reads one context


class Unsteady(Compact):
    """Answers after some time, so that turns begin at different ones."""

    def step(self, response: Response) -> Any:
        time.sleep(0.1 * self.random.random())
        return super().step(response)


class Slow(EmbeddedEngine):
    """Takes its time, so that weights arrive within turns."""

    def advance(self) -> Any:
        time.sleep(0.01)
        return super().advance()


@torch.no_grad()
def logprobs_of(models: Sequence[Any], rollout: Rollout, row: int) -> Tensor:
    """Of each token [R, 2]: by the weights of its version, and by the last of ``models``.

    The weights at the start of a turn read its context; each token follows the keys and values that
    the versions before it left.
    """
    assert rollout.episodes is not None
    assert rollout.context_start is not None
    turn, versions = rollout.episodes.turn[row].tolist(), rollout.token_versions[row].tolist()
    before, begin = rollout.prompts.ids[row][rollout.prompts.mask[row]], 0
    found = torch.zeros(len(turn), 2)
    for t, token in enumerate(rollout.ids[row]):
        if rollout.context_start[row, t]:
            before, begin = before[:0], t
        if turn[t] < 0:
            continue
        context = torch.cat([before, rollout.ids[row, begin:t]])[None]
        if not t or turn[t] != turn[t - 1]:
            cache, read = DynamicCache(), context
        own = models[versions[t]](read, **{cache_argument(models[0]): cache})
        last, read = models[-1](context), token[None, None]
        found[t] = torch.stack([x.logits[0, -1].log_softmax(-1)[token] for x in (own, last)])
    return found


def largest_gaps(models: Sequence[Any], trained: Any) -> tuple[float, float]:
    """In nats, of engine and learner; and the smaller one if each is taken for the other."""
    gaps, changed = [], 0
    for step, (rollout, learner) in enumerate(trained):
        known = models[: step + 1]
        want = torch.stack([logprobs_of(known, rollout, i) for i in range(len(rollout))])
        both = torch.stack([rollout.behavior_logprobs, learner], -1)
        gaps.append(torch.stack([both - want, both - want.flip(-1)])[:, rollout.loss_mask].abs())
        turn, version = rollout.episodes.turn, rollout.token_versions
        assert torch.equal(rollout.policy_version, version.where(rollout.loss_mask, 99).amin(1))
        changed += int(((turn.diff() == 0) & (turn[:, 1:] >= 0) & (version.diff() > 0)).sum())
    assert changed  # within a turn
    own, swapped = torch.cat(gaps, 1).amax(1)
    return float(own.max()), float(swapped.min())


def record(monkeypatch: pytest.MonkeyPatch, trainer: Any) -> tuple[list[Any], list[Any]]:
    """The policy before each update, and what is trained on: rollout and log-probabilities."""
    real, models, trained = updater.make_experience, list[Any](), list[tuple[Rollout, Tensor]]()

    def watched(rollout: Rollout, *rest: Any) -> Any:
        made = real(rollout, *rest)
        models.append(copy.deepcopy(trainer.model).eval())
        trained.append((rollout, made[0].old_logprobs))
        return made

    monkeypatch.setattr(updater, "make_experience", watched)
    return models, trained


def test_contexts_are_read_with_the_weights_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updated in flight, within turns: by the engine, and by the learner that trains on them."""
    monkeypatch.setattr(generation, "POLL", 1)
    model = policy()
    trainer = played(
        model=model,
        rollout_engine=Slow(model, pad_id=PAD, chunk_rows=8, shares_weights=False),
        environment=lambda: Unsteady(4),
        **{"response_length": 120, "max_turn_tokens": 10, "total_episodes": 24},
        **{"rollout_schedule": "as_completed", "in_flight_weight_updates": True, "max_lag": 1},
        **{"learning_rate": 3e-2, "temperature": 1.0},
    )
    models, trained = record(monkeypatch, trainer)
    trainer.train()
    assert [row["environment/new_contexts"] for row in rows(trainer)] == [1.0] * 6
    own, swapped = largest_gaps(models, trained)
    assert own < 1e-5
    assert swapped > 0.1


class Forgetful(Echo):
    """Only the latest observation is left of the conversation after every turn."""

    def step(self, response: Response) -> Any:
        observation, *rest = super().step(response)
        return NewContext([{"role": "user", "content": observation}]), *rest


def test_an_episode_may_be_longer_than_the_context_of_the_model() -> None:
    model = tiny_policy("llama", vocab_size=VOCAB, max_positions=32)
    trainer = played(
        model=model, environment=lambda: Forgetful(12), response_length=160, max_turn_tokens=8
    )
    trainer.train()
    assert [row["environment/turns"] for row in rows(trainer)] == [12.0, 12.0]
    assert [row["environment/ended_done"] for row in rows(trainer)] == [1.0, 1.0]


def test_a_context_that_does_not_fit_ends_the_episode() -> None:
    rollout = rollouts(Compact, engine(), max_turn_tokens=5).generate(
        prompts(3), sampling=sampling(max_new_tokens=24), seed=3
    )
    assert rollout.context_start is None
    assert rollout.terminated.tolist() == [False] * 3


def sampled_and_read(model: Any, *, keep: bool, rows: int = 6, **options: Any) -> tuple[Any, int]:
    """An episode batch, and how many tokens the model read."""
    inner = engine(model, **options)
    if not keep:
        inner.keep_prefixes = torch.no_grad  # type: ignore[method-assign]
    read = [0]

    def count(module: Any, args: Any, kwargs: Any) -> None:
        read[0] += kwargs["input_ids"].numel()

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    play = rollouts(lambda: Echo(5), inner=inner, max_turn_tokens=6, max_turns=5)
    rollout = play.generate(prompts(rows, group=2), sampling=sampling(max_new_tokens=99), seed=2)
    hook.remove()
    return rollout, read[0]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2", "gpt2"])
def test_turns_with_kept_prefixes_are_the_same(family: Any) -> None:
    model = tiny_policy(family, vocab_size=VOCAB, max_positions=256)
    kept, few = sampled_and_read(model, keep=True)
    again, many = sampled_and_read(model, keep=False)
    assert torch.equal(kept.ids, again.ids)
    assert torch.equal(kept.response_mask, again.response_mask)
    gap = (kept.behavior_logprobs - again.behavior_logprobs).abs().max()
    assert float(gap) < 1e-5
    assert few < 0.6 * many


def test_batches_of_several_chunks_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_policy("llama", vocab_size=VOCAB, max_positions=256)
    whole, _ = sampled_and_read(model, keep=True)
    monkeypatch.setattr(decode.CausalDecoder, "resume", None)  # not called
    chunks, _ = sampled_and_read(model, keep=True, chunk_rows=3)
    assert torch.equal(whole.ids, chunks.ids)


def test_models_with_sliding_windows_read_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_policy(
        "qwen2", vocab_size=VOCAB, max_positions=256, use_sliding_window=True, sliding_window=8,
        max_window_layers=0, layer_types=["sliding_attention", "sliding_attention"],
    )  # fmt: skip
    monkeypatch.setattr(decode.CausalDecoder, "resume", None)  # not called
    kept, few = sampled_and_read(model, keep=True)
    again, many = sampled_and_read(model, keep=False)
    assert torch.equal(kept.ids, again.ids)
    assert few == many
