import math

import pytest
import torch

from kedge.errors import ConfigError, RolloutError
from kedge.rollout.embedded.sampling import (
    allowed_tokens,
    check_sampling,
    restrict,
    sample_tokens,
    uniforms,
)
from kedge.types import Sampling

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
    @pytest.mark.parametrize("vocabulary", [2, 97, 1024, 1025, 1280, 50304])
    def test_frequencies_are_the_probabilities(self, vocabulary):
        torch.manual_seed(0)
        n = 20_000 if vocabulary < 5000 else 2000
        logits = torch.randn(vocabulary) * 2
        drawn = torch.cat(
            [
                sample_tokens(logits.expand(500, -1), uniforms(3, torch.arange(i, i + 500), 1))[0]
                for i in range(0, n, 500)
            ]
        )
        # Cells of about equal probability, made of neighboring tokens.
        cells = min(vocabulary, 40)
        cell = (logits.double().softmax(-1).cumsum(-1) * cells).long().clamp(max=cells - 1)
        want = torch.zeros(cells, dtype=torch.float64)
        want.index_add_(0, cell, logits.double().softmax(-1) * n)
        seen = torch.bincount(cell[drawn], minlength=cells)
        used = want > 0
        statistic = ((seen - want)[used] ** 2 / want[used]).sum()
        assert statistic < chi_square_limit(max(int(used.sum()), 2))

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
    def test_stop_tokens_are_banned_until_min_new_tokens(self):
        sampling = Sampling(max_new_tokens=9, min_new_tokens=2, stop_ids=(1,))
        for t, allowed in ((0, False), (1, False), (2, True)):
            got = restrict(torch.zeros(1, 3), sampling, t, torch.tensor([1]))
            assert bool(got[0, 1] == 0) is allowed
            assert got[0, [0, 2]].tolist() == [0, 0]

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
