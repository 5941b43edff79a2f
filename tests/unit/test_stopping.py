import pytest
import torch

from kedge.errors import ConfigError
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.embedded.sampling import StopCriteria, StopStrings
from kedge.testing import tiny_policy
from kedge.types import PromptBatch, Sampling


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

    def test_a_tokenizer_is_needed(self):
        with pytest.raises(ConfigError, match="tokenizer"):
            StopStrings(Sampling(max_new_tokens=1, stop_strings=("x",)), None)


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
