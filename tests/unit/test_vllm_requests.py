"""Requests to vLLM and its results, without vLLM."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kedge.errors import ConfigError, RolloutError
from kedge.rollout.vllm.service import (
    GenerationResult,
    allowed_tokens,
    build_requests,
    build_rollout,
    build_sampling_params,
    row_seed,
)
from kedge.types import Sampling
from tests.contract.test_rollout_engine import prompts


def test_every_row_has_a_seed_of_its_own():
    seeds = {row_seed(seed, row) for seed in range(-20, 20) for row in range(100)}
    assert len(seeds) == 4000
    assert all(0 <= s < 2**56 for s in seeds)
    asks = build_requests(prompts(), Sampling(max_new_tokens=3), 5, vocabulary=64)
    assert [a.params["seed"] for a in asks] == [row_seed(5, row) for row in range(6)]
    assert asks[1].prompt == prompts().ids[1, 4:].tolist()


def test_requests_ask_for_the_distribution_that_trains():
    sampling = Sampling(max_new_tokens=9, min_new_tokens=2, temperature=0.7, stop_ids=(5, 6))
    params = build_sampling_params(sampling, vocabulary=64)
    assert params["temperature"] == 0.7
    assert params["stop_token_ids"] == [5, 6]
    assert (params["max_tokens"], params["min_tokens"]) == (9, 2)
    assert params["ignore_eos"] is True


def test_temperatures_that_vllm_would_change_are_refused():
    with pytest.raises(
        ConfigError, match=r"temperature=0.001 must be 0 .* or at least 0.01 with vLLM"
    ):
        build_sampling_params(Sampling(max_new_tokens=1, temperature=0.001), vocabulary=64)


def record(answers, sampling, **options):
    made = {"pad_id": 9, "tokenizer": None, "extra_column": False, "vocabulary": 64} | options
    batch = prompts(rows=len(answers))
    return build_rollout(answers, batch, sampling, **made)


def answer(tokens, stopped=False, version=3):
    return GenerationResult(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        stopped=stopped,
        version=version,
    )


def test_answers_become_a_record():
    found = record([answer([5, 6]), answer([7], stopped=True)], Sampling(max_new_tokens=2))
    assert found.ids.tolist() == [[5, 6], [7, 9]]
    assert found.response_mask.tolist() == [[True, True], [True, False]]
    assert found.terminated.tolist() == [False, True]
    assert found.version.tolist() == [3, 3]
    assert found.behavior_logprobs.tolist() == [[-0.5, -0.5], [-0.5, 0.0]]


def test_a_spare_slot_is_left_where_there_is_room():
    short = [answer([5], stopped=True)]
    sizes = [
        record(short, Sampling(max_new_tokens=n), extra_column=True).ids.shape[1] for n in (1, 2, 9)
    ]
    assert sizes == [1, 2, 2]


def test_a_stop_string_ends_a_response_where_it_is_complete():
    class Letters:
        def decode(self, ids, **_):
            return "".join(chr(97 + i) for i in ids)

    stops = Sampling(max_new_tokens=5, stop_strings=("cd",))
    late = answer([0, 2, 3, 1], stopped=True)  # vLLM noticed one token late
    found = record([late, answer([2, 2, 2, 2, 2])], stops, tokenizer=Letters())
    assert found.response_mask.sum(1).tolist() == [3, 5]
    assert found.terminated.tolist() == [True, False]


@pytest.mark.parametrize("tokens", [[], [1, 2, 3]])
def test_too_little_or_too_much_is_an_error(tokens):
    with pytest.raises(RolloutError, match=f"responses of {len(tokens)} to {len(tokens)} tokens"):
        record([answer(tokens)], Sampling(max_new_tokens=2))


def test_nan_is_an_error_that_names_row_and_version():
    bad = replace(answer([1]), logprobs=np.array([math.nan], np.float32), version=4)
    with pytest.raises(
        RolloutError, match="NaN or infinite log-probabilities for row 1, sampled by version 4"
    ):
        record([answer([1]), bad], Sampling(max_new_tokens=1))


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        ({}, 0),
        ({"top_k": 5}, 19),  # with ties
        ({"top_k": 500}, 64),  # the whole vocabulary
        ({"top_p": 0.9}, 64),
        ({"top_p": 0.9, "temperature": 0.0}, 0),  # greedy
    ],
)
def test_as_many_log_probabilities_are_requested_as_tokens_can_be_allowed(sampling, want):
    params = build_sampling_params(Sampling(max_new_tokens=1, **sampling), vocabulary=64)
    assert params["logprobs"] == want


def test_allowed_tokens_are_those_of_positive_probability():
    half = math.log(0.5)
    assert allowed_tokens([(7, half), (3, half), (7, half), (9, -math.inf)]) == [7, 3]
    assert allowed_tokens([(7, 0.0), (9, -9999.0)]) == [7]  # -inf over HTTP
    with pytest.raises(RolloutError, match=r"than the 2 .* probability 0.75: .*set top_k, or a"):
        allowed_tokens([(7, half), (3, math.log(0.25))])


def test_a_rollout_records_what_could_be_sampled():
    results = [
        replace(answer([5, 6]), allowed=np.array([[5, 1, 2], [6, -1, -1]])),
        replace(answer([7], stopped=True), allowed=np.array([[8, 7]])),
    ]
    rollout = record(results, Sampling(max_new_tokens=2, top_p=0.9))
    none = [-1, -1, -1]
    assert rollout.allowed_tokens.tolist() == [[[5, 1, 2], [6, -1, -1]], [[8, 7, -1], none]]
    assert record(results, Sampling(max_new_tokens=2)).allowed_tokens is None
    greedy = record([answer([5, 6])], Sampling(max_new_tokens=2, top_k=3, temperature=0.0))
    assert greedy.allowed_tokens.tolist() == [[[5], [6]]]
