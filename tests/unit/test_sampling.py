"""Which token is drawn, what may be drawn, where responses end; decode steps as a graph."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kedge.records.errors import ConfigError, RolloutError
from kedge.records.types import PromptBatch, Rollout, Sampling
from kedge.rollout.embedded import decode
from kedge.rollout.embedded.decode import DecodeGraph
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.embedded.sampling import (
    StopCriteria,
    StopStrings,
    allowed_tokens,
    check_sampling,
    restrict,
    sample_tokens,
    uniforms,
)
from kedge.testing import tiny_policy
from tests.contract.embedded import policy, prompts

NO_STOP = torch.tensor([], dtype=torch.int64)


def chi_square_limit(cells: int) -> float:
    """Exceeded with probability about 1e-5 under the null (Wilson and Hilferty, 1931)."""
    df = cells - 1
    return df * (1 - 2 / (9 * df) + 4.27 * math.sqrt(2 / (9 * df))) ** 3


class TestUniforms:
    def test_known_values(self):
        # From an independent implementation of splitmix64 on Python integers.
        def mix(x):
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
            return x ^ (x >> 31)

        golden = 0x9E3779B97F4A7C15
        for seed, row, t in ((0, 0, 0), (42, 7, 3), (-5, 10**9, 4095), (2**70 + 1, 1, 1)):
            stream = mix((mix((seed + golden) % 2**64) + (row + 1) * golden) % 2**64)
            want = (mix((stream + (t + 1) * golden) % 2**64) >> 12) / 2**52
            assert uniforms(seed, torch.tensor([row]), t).item() == want

    @pytest.mark.parametrize("along", ["rows", "steps", "seeds"])
    def test_uniform_and_uncorrelated(self, along):
        n = 4096
        u = {
            "rows": lambda: uniforms(0, torch.arange(n), 0),
            "steps": lambda: uniforms(0, torch.tensor([0]), torch.arange(n))[0],
            "seeds": lambda: torch.cat([uniforms(s, torch.tensor([0]), 0) for s in range(n)]),
        }[along]()
        assert u.min() >= 0
        assert u.max() < 1
        seen = torch.histc(u, 64, 0, 1)
        assert ((seen - n / 64) ** 2 / (n / 64)).sum() < chi_square_limit(64)
        lag = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
        assert lag.abs() < 5 / math.sqrt(n)


class TestDraw:
    @pytest.mark.parametrize("vocabulary", [5, 1024, 1300, 151_936])
    def test_the_ends_of_the_unit_interval(self, vocabulary):
        logits = torch.zeros(3, vocabulary)
        logits[:, 0] = logits[:, -1] = -math.inf  # the first and the last token have no probability
        token, logprob = sample_tokens(
            logits, torch.tensor([0.0, 0.5, 1 - 2**-52], dtype=torch.float64)
        )
        assert token[0] == 1
        assert token[2] == vocabulary - 2
        assert abs(int(token[1]) - vocabulary / 2) <= 1
        assert logprob == pytest.approx(-math.log(vocabulary - 2), abs=1e-6)

    def test_at_the_edge_of_a_block_that_begins_with_an_impossible_token(self):
        torch.manual_seed(0)
        logits = torch.randn(400, 1280) * 3
        logits[:, 512] = -math.inf  # blocks are 256 wide
        sums = logits.softmax(-1).unflatten(-1, (-1, 256)).sum(-1)
        cumulative = sums.cumsum(-1, dtype=torch.float64)
        for nudge in (-(2**-52), 0.0, 2**-52):
            token, logprob = sample_tokens(logits, cumulative[:, 1] / cumulative[:, -1] + nudge)
            assert ((token - 512).abs() < 40).all()
            assert (token != 512).all()
            assert torch.isfinite(logprob).all()

    def test_rare_tokens_of_a_large_vocabulary_are_reached(self):
        # The last 1000 tokens share one part in a million; u points into the middle of them.
        logits = torch.zeros(150_000)
        logits[-1000:] = math.log(149_000 / 1000 * 1e-6)
        tail = logits.double().softmax(-1)[-1000:].sum()
        u = torch.tensor([1 - float(tail) * f for f in (0.75, 0.5, 0.25)], dtype=torch.float64)
        token = sample_tokens(logits.expand(3, -1), u)[0]
        assert (token - torch.tensor([149_250, 149_500, 149_750])).abs().max() <= 60

    def test_nan_logits_show_in_the_logprob(self):
        for vocabulary in (30, 3000):
            logits = torch.zeros(2, vocabulary)
            logits[1, 7] = math.nan
            token, logprob = sample_tokens(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
            assert torch.isnan(logprob).tolist() == [False, True]
            assert token.max() < vocabulary


class TestRestrict:
    @pytest.mark.parametrize(
        ("options", "allowed"),
        [
            ({"top_k": 2}, [0, 1]),
            ({"top_k": 99}, [0, 1, 2, 3]),
            ({"top_p": 0.79}, [0, 1]),
            ({"top_p": 0.81}, [0, 1, 2]),
            ({"top_p": 1e-9}, [0]),
            ({"min_p": 0.31}, [0, 1]),
            ({"min_p": 1.0}, [0]),
            ({"top_k": 2, "top_p": 0.6}, [0]),  # 0.5 / 0.8 is already more than 0.6
            ({"top_k": 3, "min_p": 0.31}, [0, 1]),
        ],
    )
    def test_truncation_keeps_the_most_likely(self, options, allowed):
        logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
        shuffle = torch.tensor([2, 0, 3, 1])
        got = restrict(logits[shuffle][None], Sampling(max_new_tokens=1, **options), 0, NO_STOP)
        kept = shuffle[(got[0] > -math.inf).nonzero()[:, 0]]
        assert sorted(kept.tolist()) == allowed
        assert torch.equal(got[0][got[0] > -math.inf], logits[kept])

    def test_support_too_wide_to_be_recorded(self):
        assert allowed_tokens(torch.zeros(1, 4096))[0].shape == (1, 4096)
        with pytest.raises(RolloutError, match="left 4097 tokens"):
            allowed_tokens(torch.zeros(1, 4097))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_new_tokens": 9}, "min_new_tokens=9"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"stop_ids": (7,)}, "stop_ids=(7,)"),
        ({"stop_ids": tuple(range(5)), "min_new_tokens": 1}, "all 5 tokens"),
        ({"stop_strings": ("",)}, "empty string"),
    ],
)
def test_impossible_sampling_is_refused(options, words):
    with pytest.raises(ConfigError) as error:
        check_sampling(Sampling(**{"max_new_tokens": 4, **options}), vocabulary=5)
    assert words in str(error.value)


def byte_tokenizer(words=()):
    """One token per byte, then the given words: their bytes are also tokens of their own."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = {f"<0x{b:02X}>": b for b in range(256)}
    vocabulary = letters | {w.replace(" ", "▁"): 256 + i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),  # as Llama's: a leading space is lost
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_stop(ids, stops, tokenizer, **options):
    """Index of the token that ends the response, or None."""
    sampling = Sampling(max_new_tokens=99, stop_strings=stops, **options)
    strings = StopStrings(sampling, tokenizer)
    for t in range(len(ids)):
        if strings.complete(ids[: t + 1]):
            return t
    return None


class TestStopStrings:
    tokenizer = byte_tokenizer(["foo", "bar", " END", "ND of", "\n\n", "x\n", " "])
    foo, bar, end, nd_of, newlines, x_newline, space = range(256, 263)

    def of(self, text):
        return list(text.encode())

    @pytest.mark.parametrize(
        ("ids", "stops", "want"),
        [
            ([*b"hi END it"], ("END",), 5),
            ([foo, end, bar], ("END",), 1),  # inside one token
            ([foo, ord("E"), nd_of, bar], ("END",), 2),  # the completing token holds more
            ([foo, x_newline, ord("\n"), bar], ("\n\n",), 2),  # across two tokens
            ([foo, newlines, bar], ("\n\n",), 1),
            ([foo, bar], ("foobar",), 1),
            ([foo, foo, bar], ("foobar",), 2),
            ([end], ("END",), 0),  # the very first token
            ([foo, end], (" END",), 1),  # a stop string that begins with a space
            ([foo, space, bar], (" ",), 1),  # one that is a space
            ([foo, bar], ("baz", "ar"), 1),  # any of several
            ([*"né ".encode(), bar], ("é",), 2),  # a character of two bytes, by its last byte
            ([*"日本".encode()], ("本",), 5),
            ([foo, bar, foo], ("END",), None),
            ([foo, ord("E"), ord("N"), foo, ord("D")], ("END",), None),
        ],
    )
    def test_ends_with_the_token_that_completes_it(self, ids, stops, want):
        assert first_stop(ids, stops, self.tokenizer) == want

    def test_only_a_tail_is_decoded(self):
        longest = 0

        class Counting:
            def decode(_, ids, **options):
                nonlocal longest
                longest = max(longest, len(ids))
                return self.tokenizer.decode(ids, **options)

        ids = [*b"abc" * 300, *b"END"]
        assert first_stop(ids, ("END",), Counting()) == len(ids) - 1
        assert longest < 20

    def test_a_string_completed_before_min_new_tokens_does_not_end_the_row(self):
        ids = [*b"END..END"]
        assert first_stop(ids, ("END",), self.tokenizer) == 2
        assert first_stop(ids, ("END",), self.tokenizer, min_new_tokens=3) == 2
        assert first_stop(ids, ("END",), self.tokenizer, min_new_tokens=4) == 7
        ids = [*b"END.D.END"]  # the second D completes nothing
        assert first_stop(ids, ("END",), self.tokenizer, min_new_tokens=4) == 8


class TestStopCriteria:
    def test_rows_stay_with_their_texts_when_some_are_dropped(self):
        sampling = Sampling(max_new_tokens=9, stop_strings=("ab",), stop_ids=(ord("!"),))
        criteria = StopCriteria(sampling, byte_tokenizer())
        criteria.add(3)
        assert criteria.ended(torch.tensor([list(b"!ax")])).tolist() == [[True, False, False]]
        criteria.select(torch.tensor([2, 1]))
        assert criteria.ended(torch.tensor([list(b"bb")])).tolist() == [[False, True]]

    def test_several_tokens_at_once_are_the_same_tokens_one_by_one(self):
        sampling = Sampling(max_new_tokens=9, stop_strings=("ab",), stop_ids=(ord("!"),))
        tokens = torch.tensor([list(b"xa!"), list(b"abc"), list(b"bxa"), list(b"!ab")])
        once, each = (StopCriteria(sampling, byte_tokenizer()) for _ in range(2))
        once.add(3)
        each.add(3)
        assert once.ended(tokens).tolist() == [each.ended(row[None])[0].tolist() for row in tokens]


def test_generation_ends_rows_at_their_stop_strings():
    tokenizer = byte_tokenizer()
    model = tiny_policy("llama", vocab_size=256)
    with torch.no_grad():  # uniform over a, b and c
        model.lm_head.weight.zero_()
        bias = torch.full((256,), -100.0)
        bias[list(b"abc")] = 0
    model.lm_head.register_forward_hook(lambda *call: call[-1] + bias)
    rows = 40
    prompts = PromptBatch(
        ids=torch.full((rows, 1), ord("a")),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        group=torch.zeros(rows, dtype=torch.int64),
        row=torch.arange(rows),
    )
    sampling = Sampling(max_new_tokens=20, stop_strings=("ab", "cc"))
    engine = EmbeddedEngine(model, pad_id=0, tokenizer=tokenizer)
    rollout = engine.generate(prompts, sampling=sampling, seed=0)
    for ids, present, finished in zip(
        rollout.ids, rollout.response_mask, rollout.terminated.tolist(), strict=True
    ):
        text = tokenizer.decode(ids[present])
        assert finished == (text[-2:] in ("ab", "cc"))
        assert "ab" not in text[:-1]
        assert "cc" not in text[:-1]
        assert finished or len(text) == 20
    assert rollout.terminated.sum() > 30
    assert len(rollout.response_mask.sum(1).unique()) > 4


@pytest.mark.parametrize("stop", ["\n", " girl", "named", "upon a time"])
def test_stop_strings_of_a_real_tokenizer(shared, stop):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "stories260k")
    text = "Once upon a time there was a little girl named Lily.\nShe had a dog."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    at = first_stop(ids, (stop,), tokenizer)
    assert stop in tokenizer.decode(ids[: at + 1])
    assert stop not in tokenizer.decode(ids[:at])


FAMILIES = ["llama", "qwen2", "gpt2", "gpt_neox"]


class Rerun:
    """Runs the step where a CUDA graph would replay it, into the same tensors each time."""

    def __init__(self, graph: Any, forward: Any) -> None:
        self.graph, self.forward = graph, forward

    def replay(self) -> None:
        with self.graph._fixed_slots():
            results = self.graph._run(self.forward)
        for kept, new in zip(_tensors(self.graph._result), _tensors(results), strict=True):
            kept.copy_(new)


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


@contextlib.contextmanager
def graphs(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Decode steps are "captured"; yields the batch size of each capture."""
    captured: list[int] = []

    def capture(graph: Any, tokens: torch.Tensor, forward: Any) -> bool:
        captured.append(len(tokens))
        graph._tokens.copy_(tokens[:, None])
        with graph._fixed_slots():
            graph._result = graph._run(forward)
        graph._graph = Rerun(graph, forward)
        return True

    with patch.context() as p:
        p.setattr(torch.cuda, "CUDAGraph", object)
        p.setattr(decode, "can_capture", lambda *_: True)
        p.setattr(DecodeGraph, "capture", capture)
        yield captured


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step_samples_the_same_tokens(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EmbeddedEngine(policy(family, max_positions=256), pad_id=0)
    batch = prompts(copies=2)
    sampling = Sampling(max_new_tokens=200, stop_ids=(1, 2, 3))
    plain = engine.generate(batch, sampling=sampling, seed=3)
    with graphs(monkeypatch) as captured:
        replayed = engine.generate(batch, sampling=sampling, seed=3)
    assert len(captured) > 1  # rows were dropped, or the slots were full
    assert torch.equal(plain.ids, replayed.ids)
    assert torch.equal(plain.terminated, replayed.terminated)
    torch.testing.assert_close(plain.behavior_logprobs, replayed.behavior_logprobs)


def test_continuous_sampling_with_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for context in (graphs(monkeypatch), contextlib.nullcontext([1])):
        model = policy("llama", max_positions=256)
        engine = EmbeddedEngine(model, pad_id=0, shares_weights=False, chunk_rows=5)
        with context as captured:
            sampling = Sampling(max_new_tokens=90, stop_ids=(1, 2, 3), min_new_tokens=4)
            engine.submit(prompts(copies=2), sampling=sampling, seed=3)
            parts = [engine.advance()]
            weights = {k: v * 0.9 for k, v in engine.model.state_dict().items()}
            engine.load_weights(weights, version=1)
            while engine.unfinished:
                parts.append(engine.advance())
        assert captured
        rollout = Rollout.cat([x for x in parts if x is not None])
        order = rollout.prompts.row.argsort()
        results.append([x[order] for x in (rollout.ids, rollout.token_version)])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
