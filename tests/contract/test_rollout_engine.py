"""What every rollout engine promises.  A new engine joins by one line in engines.ENGINES."""

from dataclasses import replace

import pytest
import torch

from kedge.records.errors import RolloutError
from kedge.records.types import Sampling
from kedge.testing import ScriptedRollouts
from tests.contract.embedded import prompts
from tests.contract.engines import ENGINES, weights_of

STOP = (5, 6, 7)


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param()


@pytest.fixture
def sampler(engine):
    if isinstance(engine, ScriptedRollouts):
        pytest.skip("a script answers by its own count, without probabilities")
    return engine


class TestRolloutEngine:
    sampling = Sampling(max_new_tokens=10, stop_ids=STOP)

    def test_shapes_and_types(self, engine):
        batch = prompts()
        rollout = engine.generate(batch, sampling=self.sampling, seed=0)
        rows, size = rollout.ids.shape
        assert rollout.prompts is batch
        assert rows == len(batch)
        assert size <= self.sampling.max_new_tokens
        assert rollout.ids.dtype == torch.int64
        assert (
            rollout.loss_mask.dtype
            == rollout.response_mask.dtype
            == rollout.terminated.dtype
            == torch.bool
        )
        assert rollout.loss_mask.shape == rollout.response_mask.shape == (rows, size)
        assert rollout.policy_version.tolist() == [0] * rows

    def test_a_response_is_a_prefix_that_ends_at_its_first_stop_token(self, engine):
        rollout = engine.generate(prompts(), sampling=self.sampling, seed=0)
        lengths = rollout.response_mask.sum(1).tolist()
        size = rollout.ids.shape[1]
        for ids, present, length, finished in zip(
            rollout.ids.tolist(),
            rollout.response_mask.tolist(),
            lengths,
            rollout.terminated.tolist(),
            strict=True,
        ):
            assert present == [t < length for t in range(size)]
            stops = [t for t in range(length) if ids[t] in STOP]
            assert finished == bool(stops)
            assert length == (stops[0] + 1 if stops else self.sampling.max_new_tokens)
        assert rollout.terminated.any()
        assert torch.equal(rollout.loss_mask, rollout.response_mask)

    def test_behavior_logprobs_are_as_declared(self, engine):
        rollout = engine.generate(prompts(), sampling=self.sampling, seed=0)
        recorded = rollout.behavior_logprobs
        if engine.logprob_kind == "none":
            assert recorded is None
            return
        assert recorded.dtype == torch.float32
        assert (recorded[rollout.response_mask] <= 0).all()
        assert (recorded[rollout.response_mask] < 0).any()
        assert (recorded[~rollout.response_mask] == 0).all()

    def test_one_new_token(self, engine):
        one = replace(self.sampling, max_new_tokens=1)
        rollout = engine.generate(prompts(), sampling=one, seed=0)
        assert rollout.ids.shape == (6, 1)
        assert rollout.response_mask.all()

    def test_rows_have_limits(self, sampler):
        batch, limits = prompts(), [3, 10, 1, 7, 20, 5]
        whole = sampler.generate(batch, sampling=self.sampling, seed=3)
        short = replace(batch, limit=torch.tensor(limits))
        rollout = sampler.generate(short, sampling=self.sampling, seed=3)
        lengths = whole.response_mask.sum(1).minimum(torch.tensor(limits))
        assert rollout.response_mask.sum(1).tolist() == lengths.tolist()
        for i, length in enumerate(lengths.tolist()):
            assert rollout.ids[i, :length].tolist() == whole.ids[i, :length].tolist()
            assert bool(rollout.terminated[i]) == (int(rollout.ids[i, length - 1]) in STOP)

    def test_tensors_can_be_constants_of_an_autograd_graph(self, engine):
        rollout = engine.generate(prompts(), sampling=self.sampling, seed=0)
        weight = torch.ones(64, requires_grad=True)
        (weight[rollout.ids] * rollout.response_mask).sum().backward()
        assert not any(
            x.is_inference() for x in (rollout.ids, rollout.loss_mask, rollout.response_mask)
        )
        assert weight.grad.sum() == rollout.response_mask.sum()

    def test_the_version_is_the_one_last_loaded(self, engine):
        receipt = engine.load_weights(weights_of(engine), 7)
        if receipt is None:
            assert engine.shares_weights or engine.logprob_kind == "none"
        else:
            assert receipt.version == 7
        rollout = engine.generate(prompts(), sampling=self.sampling, seed=0)
        assert rollout.policy_version.tolist() == [7] * 6

    def test_a_row_is_the_same_in_a_batch_of_any_size(self, sampler):
        whole = sampler.generate(prompts(), sampling=self.sampling, seed=3)
        part = prompts().rows(torch.arange(2, 5))
        alone = sampler.generate(part, sampling=self.sampling, seed=3)
        width = min(whole.ids.shape[1], alone.ids.shape[1])
        assert torch.equal(alone.ids[:, :width], whole.ids[2:5, :width])
        other = sampler.generate(part, sampling=self.sampling, seed=4)
        assert not torch.equal(alone.ids[:, :5], other.ids[:, :5])

    def test_copies_of_a_prompt_are_sampled_apart(self, sampler):
        rollout = sampler.generate(
            prompts(lengths=(7, 3), copies=8), sampling=self.sampling, seed=0
        )
        assert len({tuple(ids[:4].tolist()) for ids in rollout.ids[:8]}) > 4

    def test_greedy_is_certain(self, sampler):
        greedy = replace(self.sampling, temperature=0.0)
        one, two = (sampler.generate(prompts(), sampling=greedy, seed=s) for s in (0, 1))
        assert torch.equal(one.ids, two.ids)
        assert (one.behavior_logprobs == 0).all()

    def test_no_stop_token_comes_before_the_least_length(self, sampler):
        late = replace(self.sampling, min_new_tokens=4)
        rollout = sampler.generate(prompts(), sampling=late, seed=0)
        assert (rollout.response_mask.sum(1) > 4).all()

    def test_empty_prompts_are_refused(self, sampler):
        batch = prompts()
        empty = replace(batch, mask=batch.mask & (batch.group != 2)[:, None])
        with pytest.raises(RolloutError, match="row 2 is empty"):
            sampler.generate(empty, sampling=self.sampling, seed=0)
