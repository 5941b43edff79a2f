"""Pairs of answers that share their common start have the scores and gradients of separate rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kedge.backends.hf.freezing import find_layers
from kedge.backends.hf.joined_rows import joins_rows
from kedge.backends.trl.joined_pairs import JoinedPairs, join_pairs
from kedge.testing import tiny_reward_model

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
PAD, VOCAB = 0, 32
START = [5] * 12 + [6] * 8
CHOSEN = [[*START, 7, 8, 9], [3, 4], [*START, 7], [*START, 8]]
REJECTED = [[*START, 7], [3, 5, 6], [*START[:10], 9], [*START, 8]]  # the last pair: the same answer


def inputs() -> dict[str, Tensor]:
    rows = [torch.tensor(row) for row in CHOSEN + REJECTED]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def model(family: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    found = tiny_reward_model(family, vocab_size=VOCAB, **options).train()
    found.config.pad_token_id = PAD
    for module in found.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return found


def results(found: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    scores = found(**inputs(), **options).logits
    (scores[:, 0] * torch.arange(1.0, 9.0)).sum().backward()
    gradients = [p.grad.clone() for p in found.parameters() if p.grad is not None]
    found.zero_grad()
    return scores.detach(), gradients


def test_a_common_start_stands_once() -> None:
    ids = inputs()["input_ids"]
    packed = join_pairs(ids, (ids != PAD).sum(1))
    assert packed.groups == ((21, 2), (2,), (3,), (21,), (11,), (21,))
    assert packed.ids.numel() == 81
    assert packed.ids[0, packed.ends].tolist() == [9, 4, 7, 8, 7, 6, 9, 8]
    assert packed.ends[3] == packed.ends[7]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2"])
def test_scores_and_gradients_are_those_of_separate_rows(family: str, checkpointing: bool) -> None:
    found = model(family)
    if checkpointing:
        found.gradient_checkpointing_enable({"use_reentrant": False})
    expected = results(found, use_cache=False)
    pairs = JoinedPairs(found)
    assert pairs.acts
    tokens: list[int] = []
    last = find_layers(pairs._backbone)[1][-1].mlp
    last.register_forward_hook(lambda _, x, __: tokens.append(x[0][..., 0].numel()))
    with pairs.active():
        ours = results(found, use_cache=False)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert max(tokens) == 81  # joined, and not 8 rows of 23
    again = results(found, use_cache=False)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_other_calls_are_the_usual_ones() -> None:
    found = model()
    expected = found(input_ids=torch.tensor([[3, 4, 5]])).logits
    states = found(**inputs(), output_hidden_states=True)
    with JoinedPairs(found).active():
        found(**inputs(), use_cache=False)
        torch.testing.assert_close(found(input_ids=torch.tensor([[3, 4, 5]])).logits, expected)
        same = found(**inputs(), output_hidden_states=True)
    torch.testing.assert_close(same.logits, states.logits)
    assert len(same.hidden_states) == len(states.hidden_states)


def test_a_model_with_dropout_is_left_as_it_is() -> None:
    found = model()
    found.model.layers[0].self_attn.attention_dropout = 0.5
    assert joins_rows(found.model)
    before = torch.random.get_rng_state()
    pairs = JoinedPairs(found)
    assert not pairs.acts
    assert torch.equal(torch.random.get_rng_state(), before)
    with pairs.active():
        assert "forward" not in vars(found.model)


def test_the_end_token_as_padding_is_read_as_transformers_reads_it() -> None:
    found, rows = model(), inputs()
    rows["input_ids"][0, 22] = rows["input_ids"][4, 20] = PAD  # an end token with the id of padding
    expected = found(**rows).logits
    with JoinedPairs(found).active():
        torch.testing.assert_close(found(**rows).logits, expected, rtol=1e-4, atol=1e-5)


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"])
    found = peft.get_peft_model(model(), lora).train()
    found.base_model.model.score.modules_to_save["default"].weight.data.normal_()
    expected = results(found)
    pairs = JoinedPairs(found)
    assert pairs.acts
    with pairs.active():
        torch.testing.assert_close(results(found), expected, rtol=1e-4, atol=1e-5)
