"""Reward models: which token is scored, and what may not matter."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kedge.models.packing import JoinedInput
from kedge.models.value_head import scalar_model
from kedge.records.errors import ConfigError, RewardError
from kedge.rewards import Mixture, RewardFunction, RewardModel, TextCache

from .text_toys import (
    EOS,
    TEMPLATE,
    bert_reward,
    eos_adding_tokenizer,
    neox_reward,
    rollout_of,
    word_tokenizer,
)

PAIRS = [([5, 6, 7], [8, 9, EOS]), ([10], [11]), ([12, 13], [EOS]), ([5, 6], [7, 8, 9, 10, 11])]


def by_hand(model, ids, at=-1):
    """The score of one unpadded sequence, without any of Kedge's code."""
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([ids])).last_hidden_state
        return float(model.score(hidden)[0, at, 0])


def test_dropout_is_off_and_nothing_has_a_gradient():
    source = RewardModel(neox_reward(hidden_dropout=0.5, attention_dropout=0.5))
    source.model.train()
    first, second = (source.score(rollout_of(PAIRS)).scores for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad


class Older(nn.Module):
    """The contract of older trainers: a named backbone and a score layer."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _Sums()
        self.score = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.score.weight, 2.0)


class _Sums(nn.Module):
    def forward(self, input_ids, attention_mask, position_ids=None, output_hidden_states=False):
        assert output_hidden_states
        return _States((input_ids * attention_mask).cumsum(1).float()[..., None])


class _States:
    def __init__(self, states):
        self.hidden_states = [states * 0, states]


class Bare(nn.Module):
    """A plain module without parameters: per row, or per token."""

    def __init__(self, per_token: bool) -> None:
        super().__init__()
        self.per_token = per_token

    def forward(self, ids):
        out = ids.cumsum(1).float()
        return out[..., None] if self.per_token else torch.ones(len(ids))


def test_plain_modules_and_the_older_contract():
    sums = [sum(p) + sum(r) for p, r in PAIRS]
    older = RewardModel(Older()).score(rollout_of(PAIRS)).scores
    assert older.tolist() == [2.0 * s for s in sums]
    assert RewardModel(Bare(True)).score(rollout_of(PAIRS)).scores.tolist() == sums
    assert RewardModel(Bare(False)).score(rollout_of(PAIRS)).scores.tolist() == [1.0] * 4


def test_own_tokenizer_reads_the_same_words_under_other_ids():
    policy = word_tokenizer()
    other = word_tokenizer([f"w{i}" for i in range(31, 2, -1)])
    model = neox_reward()
    source = RewardModel(model, other, texts=TextCache(policy), policy_vocab_size=32)
    got = source.score(rollout_of(PAIRS)).scores
    flipped = [[i if i < 3 else 34 - i for i in [*p, *r]] for p, r in PAIRS]
    want = [by_hand(model, ids) for ids in flipped]  # eos ends the finished rows, and no other
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_own_tokenizer_that_adds_eos_does_not_close_unfinished_rows():
    model = neox_reward()
    policy = word_tokenizer([*(f"w{i}" for i in range(3, 32)), "more"])
    source = RewardModel(model, eos_adding_tokenizer(), texts=TextCache(policy))
    got = source.score(rollout_of([([5], [6]), ([5], [6, EOS])])).scores
    want = [by_hand(model, [5, 6]), by_hand(model, [5, 6, EOS])]
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_chats_are_formatted_by_the_reward_models_own_template():
    words = ["user", "assistant", *(f"w{i}" for i in range(3, 32))]
    policy, own = word_tokenizer(chat_template="-"), word_tokenizer(words, chat_template=TEMPLATE)
    model = neox_reward(vocab=34)
    source = RewardModel(model, own, texts=TextCache(policy))
    chat = [{"role": "user", "content": "w5"}]
    rollout = rollout_of([([5], [6, EOS]), ([5], [6])], prompt=[chat, chat])
    ids = own("user w5 <eos> assistant w6")["input_ids"]
    want = [by_hand(model, [*ids, EOS]), by_hand(model, ids)]
    assert source.score(rollout).scores.tolist() == pytest.approx(want, abs=1e-5)


def test_the_same_vocabulary_passes_ids_exactly_even_where_text_cannot():
    model = neox_reward()
    source = RewardModel(model, word_tokenizer(), texts=TextCache(word_tokenizer()))
    got = float(source.score(rollout_of([([5, EOS, 6], [7])])).scores[0])
    assert got == pytest.approx(by_hand(model, [5, EOS, 6, 7]), abs=1e-5)


def test_max_length_keeps_the_end():
    model = neox_reward()
    got = RewardModel(model, max_length=3).score(rollout_of(PAIRS)).scores
    want = [by_hand(model, [*p, *r][-3:]) for p, r in PAIRS]
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_one_of_several_labels_is_the_reward():
    model = neox_reward(labels=3)
    names = "LABEL_0, LABEL_1, LABEL_2"
    with pytest.raises(ConfigError, match=rf"has 3 labels \({names}\).*reward_label.*num_labels=1"):
        RewardModel(model)
    for label in ("good", 3):
        with pytest.raises(ConfigError, match=rf"={label!r} is not a label.*2 \(LABEL_2\)"):
            RewardModel(model, reward_label=label)
    by_name = RewardModel(model, reward_label="LABEL_1").score(rollout_of(PAIRS)).scores
    by_index = RewardModel(model, reward_label=1).score(rollout_of(PAIRS)).scores
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([[10, 11]])).last_hidden_state
        want = float(model.score(hidden)[0, -1, 1])
    assert torch.equal(by_name, by_index)
    assert float(by_name[1]) == pytest.approx(want, abs=1e-5)


def test_a_token_outside_the_vocabulary_is_named():
    source = RewardModel(neox_reward(vocab=10))
    with pytest.raises(RewardError, match=r"token 12 of row 1 \(prompt 'p1'\).*\(10 tokens\)"):
        source.score(rollout_of([([5], [6]), ([5, 12], [6])], prompt=["p0", "p1"]))


def test_a_score_that_is_not_finite_names_row_and_prompt():
    model = neox_reward()
    with torch.no_grad():
        model.get_input_embeddings().weight[11] = torch.nan
    with pytest.raises(RewardError, match=r"score nan for row 1 \(prompt \[10\]\)"):
        RewardModel(model).score(rollout_of(PAIRS))


def test_a_row_longer_than_the_model_is_refused():
    with pytest.raises(RewardError, match=r"row 0 .*70 tokens, more than the 64.*max_length=64"):
        RewardModel(neox_reward()).score(rollout_of([([5] * 30, [6] * 40)]))


def test_autocast_runs_in_its_dtype_and_returns_float32():
    source = RewardModel(neox_reward(), autocast=torch.bfloat16)
    half = source.score(rollout_of(PAIRS))
    full = RewardModel(neox_reward()).score(rollout_of(PAIRS))
    assert half.scores.dtype == torch.float32
    assert not torch.equal(half.scores, full.scores)
    assert torch.allclose(half.scores, full.scores, atol=0.2, rtol=0.1)


def test_real_reward_model(shared):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    where = shared / "data" / "stories260k-sentiment"
    model = AutoModelForSequenceClassification.from_pretrained(where)
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "stories260k")
    texts = ["The film was a great and happy story.", "The film was bad and boring."]
    pairs = [(ids[:5], ids[5:]) for ids in tokenizer(texts)["input_ids"]]
    source = RewardModel(model, tokenizer, texts=TextCache(tokenizer), policy_vocab_size=512)
    good, bad = source.score(rollout_of(pairs, extra=4)).scores.tolist()
    assert good > bad + 1
    assert good == pytest.approx(by_hand(model, [*pairs[0][0], *pairs[0][1]]), abs=1e-4)


@pytest.mark.parametrize("low_weights", [False, True])
def test_scores_under_bfloat16_are_not_rounded_to_it(low_weights):
    """Rounded, scores around 12 would be 1/16 apart, and different responses would tie."""
    model = neox_reward()
    with torch.no_grad():
        model.score.weight.mul_(20)
    if low_weights:
        model.score.bfloat16()
    scores = RewardModel(model, autocast=torch.bfloat16).score(rollout_of(PAIRS)).scores
    assert scores.abs().max() > 4
    assert not torch.equal(scores, scores.bfloat16().float())


def test_values_under_bfloat16_are_not_rounded_to_it():
    value = scalar_model(neox_reward())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lengths = torch.tensor([8])
        row = JoinedInput(ids=torch.arange(5, 13)[None], lengths=lengths, prompt_lengths=lengths)
        found = value(row, torch.arange(8))
    assert not torch.equal(found, found.bfloat16().float())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_model_with_adapters_is_scored_like_any_other():
    peft = pytest.importorskip("peft")
    plain = RewardModel(neox_reward()).score(rollout_of(PAIRS[:2])).scores
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)
    model = peft.get_peft_model(neox_reward(), lora)
    got = RewardModel(model).score(rollout_of(PAIRS[:2], pad=EOS, extra=2)).scores
    assert not torch.allclose(got, plain, atol=1e-2)
    with torch.no_grad():  # rows without padding, last token not the pad token: its own forward
        want = float(model.eval()(torch.tensor([[10, 11]])).logits)
    assert float(got[1]) == pytest.approx(want, abs=1e-5)


TOKENS = st.lists(st.integers(0, 31), min_size=1, max_size=9)
ROWS = st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 31), max_size=9)), min_size=1, max_size=7)
TEXTS = TextCache(word_tokenizer())
OTHER = word_tokenizer([f"w{i}" for i in range(31, 2, -1)])


def letters(completions):
    return [float(len(text)) for text in completions]


def dense(completion_ids):
    return [[0.5 * token for token in ids] for ids in completion_ids]


SOURCES = {
    "causal": RewardModel(neox_reward(), chunk_rows=2),
    "encoder": RewardModel(bert_reward(), chunk_rows=3),
    "own tokenizer": RewardModel(neox_reward(), OTHER, texts=TEXTS, chunk_rows=2),
    "text": RewardFunction(letters, TEXTS),
    "mixture": Mixture(
        [("t", RewardFunction(letters, TEXTS), 0.5), ("d", RewardFunction(dense, TEXTS), 2.0)]
    ),
}


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=15, deadline=None)
@given(pairs=ROWS, extra=st.integers(0, 4), pad=st.integers(0, 31))
def test_a_rows_reward_depends_on_the_row_alone(name, pairs, extra, pad):
    source = SOURCES[name]
    batch = source.score(rollout_of(pairs[::-1], pad=pad, extra=extra))
    for row, pair in enumerate(reversed(pairs)):
        alone = source.score(rollout_of([pair]))
        assert float(batch.scores[row]) == pytest.approx(float(alone.scores[0]), abs=2e-4)
        if alone.token_rewards is not None:
            count = len(pair[1])
            assert torch.equal(batch.token_rewards[row, :count], alone.token_rewards[0, :count])
            assert not batch.token_rewards[row, count:].any()


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_labels": 1,
    "pad_token_id": EOS,
}
LLAMA = SMALL | {"num_key_value_heads": 1, "head_dim": 8}
CAUSAL = {
    "Llama": LLAMA,
    "Mistral": LLAMA,
    "Qwen2": LLAMA,
    "Qwen3": LLAMA,
    "Gemma2": LLAMA,
    "Phi3": LLAMA,
    "GPTNeoX": SMALL,
    "GPT2": SMALL | {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64},
    "GPTJ": SMALL | {"n_embd": 16, "n_head": 2, "n_layer": 2, "rotary_dim": 4},
    "OPT": SMALL | {"ffn_dim": 32, "word_embed_proj_dim": 16, "init_std": 0.3},
    "Bloom": SMALL | {"n_head": 2, "n_layer": 2},
    "Falcon": SMALL,
}
ENCODERS = {
    "Bert": SMALL,
    "Roberta": SMALL | {"pad_token_id": 1, "max_position_embeddings": 66},
    "DistilBert": SMALL | {"dim": 16, "hidden_dim": 32, "n_heads": 2, "n_layers": 2},
    "DebertaV2": SMALL,
    "Electra": SMALL | {"embedding_size": 16},
    "ModernBert": SMALL | {"global_attn_every_n_layers": 1, "eos_token_id": 0, "bos_token_id": 0},
}


def build(family, options):
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**options)
    model = getattr(tf, f"{family}ForSequenceClassification")(config)
    with torch.no_grad():  # heads are small at first: make every token matter
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.3)
            if name.endswith("bias"):
                weight.normal_(0, 0.1)
    return model.eval()


@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models_score_the_last_real_token(family):
    model = build(family, CAUSAL[family])
    wants = []
    for prompt, response in PAIRS:
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([[*prompt, *response]])).last_hidden_state
            wants.append(float(model.score(hidden)[0, -1, 0]))
    got = RewardModel(model).score(rollout_of(PAIRS, pad=EOS, extra=3)).scores
    assert got.tolist() == pytest.approx(wants, abs=1e-4)
    assert len({round(want, 3) for want in wants}) == len(PAIRS)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_ignore_padding(family):
    model = build(family, ENCODERS[family])
    wants = []
    for prompt, response in PAIRS:
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            wants.append(float(model(ids, attention_mask=torch.ones_like(ids)).logits))
    got = RewardModel(model).score(rollout_of(PAIRS, pad=7, extra=3)).scores
    assert got.tolist() == pytest.approx(wants, abs=1e-4)
    assert len({round(want, 3) for want in wants}) == len(PAIRS)


def test_encoder_decoders_keep_the_frame_of_their_tokenizer():
    options = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ids = {"eos_token_id": EOS, "pad_token_id": 1, "decoder_start_token_id": 1}
    model = build("T5", SMALL | options | ids)
    policy = word_tokenizer([*(f"w{i}" for i in range(3, 32)), "more"])  # not T5's vocabulary
    got = RewardModel(model, eos_adding_tokenizer(), texts=TextCache(policy)).score(
        rollout_of(PAIRS)
    )
    for (prompt, response), score in zip(PAIRS, got.scores.tolist(), strict=True):
        read = torch.tensor([[*prompt, *(i for i in response if i != EOS), EOS]])
        with torch.no_grad():
            assert score == pytest.approx(float(model(read).logits), abs=1e-4)
