"""Every family of sequence classifiers scores a padded batch as it scores each row alone."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from kedge.rewards import RewardModel, TextCache

from .text_toys import EOS, eos_adding_tokenizer, rollout_of, word_tokenizer

PAIRS = [([5, 6, 7], [8, 9, EOS]), ([10], [11]), ([12, 13], [EOS]), ([5, 6], [7, 8, 9, 10, 11])]
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
