"""The functions that programs import from ``trl.core``, best-of-n sampling, ChatML."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from kedge.classic import (
    SUPPORTED_ARCHITECTURES,
    AutoModelForCausalLMWithValueHead,
    BestOfNSampler,
    core,
    respond_to_batch,
    setup_chat_format,
)
from kedge.errors import ConfigError
from tests.classic_models import gpt2, letters


def test_logprobs_and_entropy() -> None:
    logits = torch.tensor([[[0.0, np.log(3.0)], [1.0, 1.0]]]).float()
    labels = torch.tensor([[1, 0]])
    want = torch.tensor([[np.log(0.75), np.log(0.5)]], dtype=torch.float32)
    torch.testing.assert_close(core.logprobs_from_logits(logits, labels), want)
    every = core.logprobs_from_logits(logits, labels, gather=False)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(1, 2))
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    torch.testing.assert_close(
        core.entropy_from_logits(logits)[0].float(), torch.tensor([entropy, np.log(2.0)]).float()
    )


def test_masked_reductions() -> None:
    x = torch.tensor([[1.0, 2.0, 100.0], [3.0, 100.0, 100.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(core.masked_mean(x, mask)) == 2.0
    assert core.masked_mean(x, mask, axis=1).tolist() == [1.5, 3.0]
    assert float(core.masked_var(x, mask)) == 1.0
    assert float(core.masked_var(x, mask, unbiased=False)) == pytest.approx(2 / 3)
    white = core.masked_whiten(x, mask)[mask.bool()]
    torch.testing.assert_close(white, torch.tensor([-1.0, 0.0, 1.0]))
    kept = core.masked_whiten(x, mask, shift_mean=False)[mask.bool()]
    torch.testing.assert_close(kept, torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(core.whiten(torch.tensor([1.0, 2.0, 3.0])), white)
    low = torch.tensor([-1.0, 0.5, 0.0])
    clipped = core.clip_by_value(torch.tensor([-2.0, 0.0, 2.0]), low, 1.0)
    assert clipped.tolist() == [-1.0, 0.5, 1.0]
    for empty in (torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]])):
        with pytest.raises(ValueError, match="the variance needs at least"):
            core.masked_var(x, empty)


def test_dictionaries() -> None:
    nested = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert core.flatten_dict(nested) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert core.flatten_dict(nested, sep=".")["a.c.d"] == 2
    with pytest.raises(ValueError, match="the key 'x/y' contains the separator"):
        core.flatten_dict({"x/y": 1})
    stacked = core.stack_dicts([{"a": torch.ones(1, 2)}, {"a": torch.ones(3)}])
    assert stacked["a"].tolist() == [[1, 1, -1], [1, 1, 1]]
    found = core.stats_to_np({"a": torch.ones(2, dtype=torch.bfloat16), "b": 2, "c": "x"})
    assert found["a"].dtype == np.float32
    assert isinstance(found["b"], float)
    scalars = core.convert_to_scalar({"a": torch.ones(1), "b": np.ones(()), "c": torch.ones(2)})
    assert scalars["a"] == scalars["b"] == 1.0
    assert len(scalars["c"]) == 2


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert core.top_k_top_p_filtering(logits, top_k=2).isfinite().tolist() == [[0, 0, 1, 1]]
    assert core.top_k_top_p_filtering(logits, top_p=0.5).isfinite().tolist() == [[0, 0, 1, 1]]
    assert core.top_k_top_p_filtering(logits, top_p=0.3).isfinite().tolist() == [[0, 0, 0, 1]]
    kept = core.top_k_top_p_filtering(logits, top_p=0.0, min_tokens_to_keep=3)
    assert kept.isfinite().tolist() == [[0, 1, 1, 1]]
    assert torch.equal(core.top_k_top_p_filtering(logits), logits)


def test_respond_to_batch() -> None:
    torch.manual_seed(0)
    rows = respond_to_batch(gpt2().eval(), torch.tensor([[3, 4], [5, 6]]), txt_len=5, top_k=3)
    assert rows.shape == (2, 5)


def test_the_cache_decorator_runs_the_block() -> None:
    class Model(nn.Module):
        @core.PPODecorators.empty_device_cache()
        def step(self) -> int:
            return 3

    assert Model().step() == 3
    core.PPODecorators.optimize_device_cache = True
    try:
        assert Model().step() == 3
    finally:
        core.PPODecorators.optimize_device_cache = False


def test_every_name_of_the_package_is_there() -> None:
    import kedge.classic

    for name in kedge.classic.__all__:
        assert getattr(kedge.classic, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'DPOTrainer'; it has"):
        kedge.classic.DPOTrainer  # noqa: B018


OPTIONS = {"do_sample": True, "pad_token_id": 1}


def test_the_best_of_the_samples_are_returned() -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2())
    assert isinstance(model, SUPPORTED_ARCHITECTURES)
    seen: list[list[str]] = []

    def score(texts: list[str]) -> list[float]:
        seen.append(texts)
        return [float(len(set(text))) for text in texts]

    sampler = BestOfNSampler(
        model, letters(28), score, lambda: 5, sample_size=4, seed=0, n_candidates=2
    )
    for queries in ([torch.tensor([3, 4]), torch.tensor([5])], [[3, 4], [5]]):
        seen.clear()
        best = sampler.generate(queries, **OPTIONS)
        assert [len(texts) for texts in seen] == [4, 4]
        for chosen, texts in zip(best, seen, strict=True):
            ranked = sorted((len(set(text)) for text in texts), reverse=True)
            assert [len(set(text)) for text in chosen] == ranked[:2]
    for query in (torch.tensor([3, 4]), [3, 4]):
        assert len(sampler.generate(query, **OPTIONS)) == 1


def test_what_the_sampler_rejects() -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2())
    with pytest.raises(ConfigError, match="n_candidates=5 must be 1 to sample_size=4"):
        BestOfNSampler(model, letters(28), len, lambda: 5, n_candidates=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model must be an AutoModelForCausalLMWithValueHead"):
        BestOfNSampler(gpt2(), letters(28), len, lambda: 5)  # type: ignore[arg-type]


def test_chat_format() -> None:
    model, tokenizer = setup_chat_format(gpt2(), letters(28), resize_to_multiple_of=8)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}], add_generation_prompt=True, tokenize=False
    )
    assert ids == "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    assert model.get_input_embeddings().weight.shape[0] == 32
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 29
    assert model.generation_config.pad_token_id == 29
    with pytest.raises(ConfigError, match="format='zephyr' must be \"chatml\""):
        setup_chat_format(model, tokenizer, format="zephyr")
