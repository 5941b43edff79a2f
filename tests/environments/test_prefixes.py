"""A conversation is read once: later turns read only what is new, and sample the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.rollout.embedded import decode
from kedge.testing import tiny_policy
from tests.environments.toys import VOCAB, Echo, engine, prompts, rollouts, sampling


def played(model: Any, *, keep: bool, rows: int = 6, **options: Any) -> tuple[Any, int]:
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
    kept, few = played(model, keep=True)
    again, many = played(model, keep=False)
    assert torch.equal(kept.ids, again.ids)
    assert torch.equal(kept.response_mask, again.response_mask)
    gap = (kept.behavior_logprobs - again.behavior_logprobs).abs().max()
    assert float(gap) < 1e-5
    assert few < 0.6 * many


def test_batches_of_several_chunks_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_policy("llama", vocab_size=VOCAB, max_positions=256)
    whole, _ = played(model, keep=True)
    monkeypatch.setattr(decode.CausalDecoder, "resume", None)  # not called
    chunks, _ = played(model, keep=True, chunk_rows=3)
    assert torch.equal(whole.ids, chunks.ids)


def test_models_with_sliding_windows_read_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_policy(
        "qwen2", vocab_size=VOCAB, max_positions=256, use_sliding_window=True, sliding_window=8,
        max_window_layers=0, layer_types=["sliding_attention", "sliding_attention"],
    )  # fmt: skip
    monkeypatch.setattr(decode.CausalDecoder, "resume", None)  # not called
    kept, few = played(model, keep=True)
    again, many = played(model, keep=False)
    assert torch.equal(kept.ids, again.ids)
    assert few == many
