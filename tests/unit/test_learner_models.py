"""Models of the learner: heads, value models, loading, memory, and grouping rows by length."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, modeling_utils

from kedge.algorithms import ppo
from kedge.errors import ConfigError
from kedge.learner.reference import frozen_copy
from kedge.loop.stages import micro_batches
from kedge.models.fingerprint import fingerprint
from kedge.models.model import causal_parts, run_backbone
from kedge.models.packing import by_length, padding_budget
from kedge.models.value_head import ScalarHead, load_value, scalar_model
from kedge.testing import tiny_policy, tiny_reward_model
from tests.largest import Largest
from tests.learners import experience, learner, one_rank, random_head, rollout, take_step


def test_missing_models_are_named():
    bare = learner(value=None, reference=None)
    with pytest.raises(ConfigError, match="values need a value model"):
        bare.compute_logprobs(rollout(), values=True, reference=False, full_kl=False)
    with pytest.raises(ConfigError, match="reference"):
        bare.compute_logprobs(rollout(), values=False, reference=True, full_kl=False)


def test_a_model_without_a_head_is_no_policy():
    with pytest.raises(ConfigError, match="is not a causal language model"):
        causal_parts(tiny_reward_model())


def test_logits_changed_after_the_head_are_noticed():
    policy = tiny_policy()
    plain = policy.forward

    def warped(*args, **options):
        out = plain(*args, **options)
        out.logits = out.logits * 2
        return out

    policy.forward = warped
    with pytest.raises(ConfigError, match="differ from the model's own"):
        causal_parts(policy)


def test_bidirectional_models_are_no_value_models():
    config = AutoConfig.for_model(
        "distilbert", vocab_size=64, dim=32, hidden_dim=64, n_layers=1, n_heads=2, num_labels=1
    )
    with pytest.raises(ConfigError, match="must be causal"):
        load_value(AutoModelForSequenceClassification.from_config(config))


def test_states_may_depend_on_the_length_of_a_row():
    """As rounding in bfloat16 does: a trained model of 30 layers was refused for it."""

    def rounded(_module, _inputs, output):
        return output + 4 / output.shape[1]

    policy, value = tiny_policy().to(torch.bfloat16), tiny_reward_model()
    for model in (policy, value):
        model.base_model.norm.register_forward_hook(rounded)
    causal_parts(policy)
    scalar_model(value)


def test_a_value_model_has_one_label():
    config = tiny_reward_model().config
    config.num_labels = 3
    with pytest.raises(ConfigError, match="num_labels=1"):
        load_value(AutoModelForSequenceClassification.from_config(config))


def test_reference_copy_does_not_move():
    found = learner()
    r = rollout()
    before = found.compute_logprobs(r, values=False, reference=True, full_kl=False)
    take_step(found)
    after = found.compute_logprobs(r, values=False, reference=True, full_kl=False)
    assert torch.equal(before.ref_logprobs, after.ref_logprobs)
    assert not torch.equal(before.logprobs, after.logprobs)
    assert frozen_copy(found.policy).model is not found.policy


def test_value_models_and_heads_come_back_from_disk(tmp_path):
    model = load_value(tiny_reward_model())
    model.save(tmp_path / "model")
    loaded = load_value(str(tmp_path / "model"))
    assert fingerprint(dict(loaded.named_parameters())) == fingerprint(
        dict(model.named_parameters())
    )
    head = random_head(8)
    head.save(tmp_path / "head")
    assert [p.name for p in (tmp_path / "head").iterdir()] == ["value_head.safetensors"]
    x = torch.randn(3, 8)
    restored = ScalarHead(8)
    restored.load_state_dict(load_file(tmp_path / "head" / "value_head.safetensors"))
    assert torch.equal(restored(x), head(x))


def test_no_tensor_holds_the_logits_of_a_batch():
    rows, vocab = 64, 20_000
    r = rollout(rows, response=40)
    policy = tiny_policy(vocab_size=vocab, hidden_size=8, layers=1, heads=2)
    found = learner(policy=policy)
    tokens = int(r.response_mask.sum())
    batch, algo = experience(r), ppo()
    with Largest() as seen:
        found.compute_logprobs(r, values=True, reference=True, full_kl=True)
        found.optimizer_step(
            micro_batches(batch, torch.arange(rows), algo, rows, one_rank), algo.loss
        )
    assert tokens * vocab > 20_000_000
    assert seen.elements <= 1 << 20  # one tile


def test_padding_is_worth_less_the_larger_the_model():
    small = tiny_policy()
    assert padding_budget(small, small.lm_head) > 1000
    policy = tiny_policy(hidden_size=512, layers=4, vocab_size=1000)
    weights = sum(p.numel() for p in policy.parameters())
    backbone = weights - 2 * 1000 * 512
    seconds = 8e-3 + 12 * weights / 1e10
    assert padding_budget(policy, policy.lm_head) == 1 + int(seconds / (6 * backbone / 1e11))


def test_rows_are_grouped_by_length():
    groups = by_length([5, 90, 7, 88, 6], tokens=1000, max_padding=4)
    assert groups == [[1, 3], [2, 4, 0]]
    assert by_length([5, 90, 7, 88, 6], tokens=1000, max_padding=0) == [[1], [3], [2], [4], [0]]
    assert by_length([5, 5, 5], tokens=10, max_padding=99) == [[0, 1], [2]]
    assert by_length([], tokens=10, max_padding=9) == []


def test_rows_padded_at_the_end_are_no_reason_to_ask_for_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    model = tiny_policy("gpt2", vocab_size=16)
    model.config.pad_token_id = 7
    ids = torch.tensor([[3, 4, 7]])
    model.transformer(input_ids=ids)
    assert "attention_mask" in said.pop()
    run_backbone(causal_parts(model).backbone, ids)
    assert said == []
