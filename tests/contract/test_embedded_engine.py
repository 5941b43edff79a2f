"""The responses of the embedded engine: distribution, ends, and what does not change them."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from kedge.records.types import Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine

from .embedded import FAMILIES, PAD, VOCAB, full_logits, logprobs_of, policy, prompts, sample


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    made = policy(request.param)
    with torch.no_grad():
        for p in made.parameters():  # far from uniform, so that mistakes show
            p.mul_(4.0) if p.ndim > 1 else p
    return made


@pytest.fixture(scope="module")
def llama():
    return policy("llama", initializer_range=0.3)


class TestAgainstTransformers:
    def test_greedy_is_the_greedy_of_transformers(self, model):
        batch = prompts()
        sampling = Sampling(max_new_tokens=12, temperature=0.0)
        rollout = EmbeddedEngine(model, pad_id=PAD).generate(batch, sampling=sampling, seed=0)
        want = model.eval().generate(
            batch.ids,
            attention_mask=batch.mask.long(),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=PAD,
            eos_token_id=None,
        )
        assert torch.equal(rollout.ids, want[:, batch.ids.shape[1] :])
        assert len(rollout.ids.unique()) > 3
        assert (rollout.behavior_logprobs == 0).all()  # the only token that could be sampled

    def test_long_responses_outgrow_what_the_cache_first_holds(self, llama):
        rollout = sample(llama, max_new_tokens=110, stop_ids=(5,))
        assert rollout.response_mask.sum(1).max() > 80  # the first allocation has 64 spare slots
        want = logprobs_of(full_logits(llama, rollout), rollout)
        assert (rollout.behavior_logprobs - want).abs().max() < 1e-5

    def test_recorded_logprobs_are_those_of_a_full_forward_pass(self, model):
        rollout = sample(model, max_new_tokens=12, temperature=0.7, stop_ids=tuple(range(5, 16)))
        assert rollout.terminated.any()
        want = logprobs_of(full_logits(model, rollout) / 0.7, rollout)
        assert (rollout.behavior_logprobs - want).abs().max() < 1e-5

    def test_the_generation_config_of_the_model_does_not_leak_in(self, llama):
        model = copy.deepcopy(llama)
        engine = EmbeddedEngine(model, pad_id=PAD)
        sampling = Sampling(max_new_tokens=12)
        want = engine.generate(prompts(), sampling=sampling, seed=0)
        generation = model.generation_config
        generation.repetition_penalty, generation.top_k, generation.eos_token_id = 1.5, 2, [8, 9]
        got = engine.generate(prompts(), sampling=sampling, seed=0)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.behavior_logprobs, want.behavior_logprobs)

    def test_min_new_tokens_bans_stop_ids_and_says_so_in_the_logprobs(self, llama):
        stops = tuple(range(5, 50))
        sampling = Sampling(max_new_tokens=9, min_new_tokens=4, stop_ids=stops)
        rollout = EmbeddedEngine(llama, pad_id=PAD).generate(prompts(), sampling=sampling, seed=0)
        assert rollout.response_mask[:, :5].sum(1).min() >= 5
        logits = full_logits(llama, rollout)
        logits[:, :4, list(stops)] = -math.inf
        want = logprobs_of(logits, rollout)
        assert (rollout.behavior_logprobs - want).abs().max() < 1e-5


@pytest.fixture(scope="module")
def want(llama):
    """Three responses to each of six prompts, which end at different times."""
    engine = EmbeddedEngine(llama, pad_id=PAD)
    return engine.generate(prompts(copies=3), sampling=TestWhatChangesNothing.sampling, seed=4)


class TestWhatChangesNothing:
    sampling = Sampling(max_new_tokens=16, stop_ids=(5, 6, 7, 8))

    def same(self, got, want):
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.response_mask, want.response_mask)
        assert torch.equal(got.terminated, want.terminated)
        assert torch.allclose(got.behavior_logprobs, want.behavior_logprobs, atol=2e-6)

    @pytest.mark.parametrize("fill", [PAD, 5, 63])
    def test_padding(self, llama, want, fill):
        p = want.prompts
        ids = p.ids.masked_fill(~p.mask, fill)
        wide = replace(
            p,
            ids=torch.nn.functional.pad(ids, (9, 0), value=fill),
            mask=torch.nn.functional.pad(p.mask, (9, 0), value=False),
        )
        got = EmbeddedEngine(llama, pad_id=PAD).generate(wide, sampling=self.sampling, seed=4)
        self.same(got, want)

    @pytest.mark.parametrize("pad_id", [5, 6, 63])
    def test_the_pad_id_even_if_it_is_a_stop_id(self, llama, want, pad_id):
        engine = EmbeddedEngine(llama, pad_id=pad_id)
        got = engine.generate(want.prompts, sampling=self.sampling, seed=4)
        assert (got.ids[~got.response_mask] == pad_id).all()
        self.same(replace(got, ids=got.ids.masked_fill(~got.response_mask, PAD)), want)


class TestEnds:
    @pytest.mark.parametrize(("limit", "slots"), [(9, 2), (1, 1)])
    def test_the_spare_slot(self, llama, limit, slots):
        sampling = Sampling(max_new_tokens=limit, stop_ids=tuple(range(VOCAB)))
        engine = EmbeddedEngine(llama, pad_id=PAD, extra_column=True)
        rollout = engine.generate(prompts(), sampling=sampling, seed=0)
        assert rollout.ids.shape == (6, slots)
        assert rollout.response_mask.sum(1).tolist() == [1] * 6

    def test_compaction_happens_and_the_batch_shrinks(self, llama):
        sizes = []
        hook = llama.register_forward_pre_hook(
            lambda _, __, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        sampling = Sampling(max_new_tokens=16, stop_ids=(5, 6, 7, 8))
        try:
            rollout = EmbeddedEngine(llama, pad_id=PAD).generate(
                prompts(copies=3), sampling=sampling, seed=4
            )
        finally:
            hook.remove()
        assert sizes[0] == 6  # each prompt is read once
        assert sizes[1] == 18
        assert sizes[-1] < 18
        assert sizes[1:] == sorted(sizes[1:], reverse=True)
        assert len(sizes) == rollout.response_mask.sum(1).max()


class TestTruncation:
    def test_support_is_what_the_logprobs_are_normalized_over(self, llama):
        sampling = Sampling(max_new_tokens=8, temperature=0.8, top_k=5, top_p=0.9, stop_ids=(5, 6))
        rollout = EmbeddedEngine(llama, pad_id=PAD, chunk_rows=4).generate(
            prompts(copies=2), sampling=sampling, seed=0
        )
        allowed = rollout.allowed_tokens
        assert allowed.shape[:2] == rollout.ids.shape
        assert allowed.shape[2] <= 5
        assert ((allowed == rollout.ids[..., None]).any(-1) == rollout.response_mask).all()
        assert (allowed[~rollout.response_mask] == -1).all()
        logits = full_logits(llama, rollout) / 0.8
        inside = logits.gather(-1, allowed.clamp(min=0)).masked_fill(allowed < 0, -math.inf)
        picked = logits.gather(-1, rollout.ids[..., None])[..., 0]
        want = (picked - inside.logsumexp(-1)).masked_fill(~rollout.response_mask, 0.0)
        assert (rollout.behavior_logprobs - want).abs().max() < 1e-5

    def test_support_is_recorded_only_when_needed(self, llama):
        engine, plain = EmbeddedEngine(llama, pad_id=PAD), Sampling(max_new_tokens=2)
        assert engine.generate(prompts(), sampling=plain, seed=0).allowed_tokens is None

    def test_a_banned_stop_token_never_leaves_an_empty_support(self, llama):
        sampling = Sampling(
            max_new_tokens=4, min_new_tokens=3, top_k=1, stop_ids=tuple(range(1, VOCAB))
        )
        rollout = EmbeddedEngine(llama, pad_id=PAD).generate(prompts(), sampling=sampling, seed=0)
        assert (rollout.ids[:, :3] == 0).all()
        assert torch.isfinite(rollout.behavior_logprobs).all()
