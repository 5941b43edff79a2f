"""Best-of-n sampling and the ChatML format."""

from __future__ import annotations

import pytest
import torch

from kedge.classic import (
    SUPPORTED_ARCHITECTURES,
    AutoModelForCausalLMWithValueHead,
    BestOfNSampler,
    setup_chat_format,
)
from kedge.errors import ConfigError
from tests.classic_models import gpt2, letters

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
