"""One frozen base under policy, value, reference and reward: the numbers of separate models."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from kedge.algorithms import ppo
from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.learner.reference import AdapterReference, FrozenModel
from kedge.loop.stages import micro_batches
from kedge.models.peft import REWARD_ADAPTER, VALUE_ADAPTER, adapter_parameters, with_adapter
from kedge.models.shared_base import AdapterRewardModel, AdapterValue, value_adapter
from kedge.models.value_head import ScalarModel
from kedge.records.errors import ConfigError
from kedge.rewards import RewardModel
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy, tiny_reward_model
from tests.learners import VOCAB, Recorder, experience, learner, one_rank, rollout

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(task="CAUSAL_LM", **options):
    return LoraConfig(r=4, target_modules=TARGETS, task_type=task, lora_dropout=0.3, **options)


def randomize(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def shared_base(dtype=torch.float64):
    """A policy and a value adapter on one base, with random adapters and a random head."""
    policy = with_adapter(tiny_policy(vocab_size=VOCAB).to(dtype), lora())
    value = value_adapter(policy)
    for p in policy.parameters():
        p.data = p.data.to(dtype)
    value.head.to(dtype)
    randomize(adapter_parameters(policy, "default").values(), 1)
    randomize(adapter_parameters(policy, VALUE_ADAPTER).values(), 2)
    randomize(value.head.parameters(), 3)
    return policy, value


def separate_models(policy, value):
    """The same policy, value model and reference with a base each."""
    base = tiny_policy(vocab_size=VOCAB).to(torch.float64)
    names = {n.replace(".base_layer", ""): p for n, p in policy.get_base_model().named_parameters()}
    base.load_state_dict({n: names.get(n, x) for n, x in base.state_dict().items()})
    models = []
    for adapter in ("default", VALUE_ADAPTER):
        model = with_adapter(copy.deepcopy(base), lora())
        for p in model.parameters():
            p.data = p.data.to(torch.float64)
        copies = adapter_parameters(model, "default")
        for name, p in adapter_parameters(policy, adapter).items():
            copies[name.replace(f".{adapter}.", ".default.")].data.copy_(p.data)
        models.append(model)
    backbone = models[1].get_base_model()
    backbone.lm_head.requires_grad_(False)
    head = nn.Linear(backbone.config.hidden_size, 1, bias=False, dtype=torch.float64)
    head.weight.data.copy_(value.head.summary.weight.data)
    models[1].score = head
    return models[0], ScalarModel(models[1], backbone.model, head), FrozenModel(base)


def gradients(found, *, only_value=False):
    found.optimizer = Recorder([p for ps in found._trained().values() for p in ps])
    algo, batch = ppo(), experience(rollout())
    step = micro_batches(batch, torch.arange(6), algo, 3, one_rank)
    metrics = found.optimizer_step(step, algo.loss, only_value=only_value)
    return found.optimizer.seen[0], metrics


@pytest.mark.parametrize("checkpointing", [False, True])
def test_equal_to_four_models(checkpointing):
    policy, value = shared_base()
    own_policy, own_value, base = separate_models(policy, value)
    one = learner(
        policy=policy,
        value=value,
        reference=AdapterReference(policy),
        gradient_checkpointing=checkpointing,
    )
    four = learner(
        policy=own_policy, value=own_value, reference=base, gradient_checkpointing=checkpointing
    )
    r, exact = rollout(), {"rtol": 1e-5, "atol": 1e-7}  # log-probabilities are float32
    options = {"values": True, "reference": True, "full_kl": True}
    outputs, expected = one.compute_logprobs(r, **options), four.compute_logprobs(r, **options)
    for name in ("logprobs", "values", "last_values", "ref_logprobs", "full_kl"):
        torch.testing.assert_close(getattr(outputs, name), getattr(expected, name))
    assert not torch.allclose(outputs.logprobs, outputs.ref_logprobs, atol=1e-3)
    grads, metrics = gradients(one)
    expected_grads, expected_metrics = gradients(four)
    assert metrics["grad_norm/policy"] > 0
    assert metrics["grad_norm/value"] > 0
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    names = {n: len(ps) for n, ps in one._trained().items()}
    assert names == {n: len(ps) for n, ps in four._trained().items()}
    # The head comes first in the value adapter and last in a value model.
    k = names["policy"]
    grads = [*grads[:k], *grads[k + 1 :], grads[k]]
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, **exact)


def test_value_warmup_leaves_the_policy_alone():
    policy, value = shared_base()
    found = learner(policy=policy, value=value, reference=None, gradient_checkpointing=True)
    grads, _ = gradients(found, only_value=True)
    k = len(found._trained()["policy"])
    assert all(g is None for g in grads[:k])
    assert all(g is not None for g in grads[k:])


def test_reentrant_checkpointing_is_refused():
    policy, value = shared_base()
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        learner(
            policy=policy,
            value=value,
            gradient_checkpointing=True,
            checkpointing_options={"use_reentrant": True},
        )


def test_weights_for_the_sampler_are_the_policys():
    policy, value = shared_base(torch.float32)
    found = learner(policy=policy, value=value, reference=None)
    assert len(found.weights()) == len(found._trained()["policy"])
    assert not any(VALUE_ADAPTER in name for name in found.weights())
    engine = EmbeddedEngine(policy, pad_id=0, shares_weights=False)
    assert {*engine.model.peft_config} == {"default"}
    receipt = engine.load_weights(found.weights(), 1)
    assert receipt.fingerprint == found.fingerprint()
    base = policy.get_base_model().model.embed_tokens.weight
    assert engine.model.get_base_model().model.embed_tokens.weight is base


def test_vllm_gets_the_base_and_the_policys_adapter(tmp_path):
    policy, value = shared_base(torch.float32)
    reward_adapter(tmp_path, tiny_policy(vocab_size=VOCAB))
    AdapterRewardModel(policy, str(tmp_path))
    found = learner(policy=policy, value=value, reference=AdapterReference(policy))
    spec = PolicyTemplate.of(policy)
    assert {*spec.meta_model.peft_config} == {"default"}
    assert {*policy.peft_config} == {"default", VALUE_ADAPTER, REWARD_ADAPTER}
    names = [name for name, _ in spec.payload(found.weights()).named]
    assert len(names) == len(found._trained()["policy"])
    ids = spec.probe()
    with torch.no_grad():
        logits = policy(input_ids=ids).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(spec.logprobs(found.weights()), expected)
    spec.write(tmp_path / "vllm", found.weights())
    written = load_file(tmp_path / "vllm" / "model.safetensors")
    assert {n: x.shape for n, x in written.items()} == {
        n: x.shape for n, x in tiny_policy(vocab_size=VOCAB).state_dict().items()
    }


def reward_adapter(folder, base, **options):
    """A reward model as an adapter, and its folder."""
    model = tiny_reward_model(vocab_size=VOCAB)
    model.model.load_state_dict(base.model.state_dict())
    model = get_peft_model(model, lora("SEQ_CLS", **options))
    randomize([p for p in model.parameters() if p.requires_grad], 4)
    model.save_pretrained(folder)
    return model.eval()


def test_value_starts_from_the_reward_adapter_and_is_saved_as_one(tmp_path):
    base = tiny_policy(vocab_size=VOCAB)
    whole = reward_adapter(tmp_path / "reward", base)
    policy = with_adapter(copy.deepcopy(base), lora())
    value = value_adapter(policy, str(tmp_path / "reward"))
    assert isinstance(value, AdapterValue)
    shared = AdapterRewardModel(policy, str(tmp_path / "reward"))
    found = learner(policy=policy, value=value, reference=AdapterReference(policy))
    r = rollout()
    scores = RewardModel(whole).score(r).scores
    outputs = found.compute_logprobs(r, values=True, reference=True, full_kl=False)
    torch.testing.assert_close(outputs.last_values, scores)
    gradients_before = [p.clone() for p in adapter_parameters(policy, REWARD_ADAPTER).values()]
    algo, batch = ppo(), experience(rollout())
    for _ in range(2):
        found.optimizer_step(micro_batches(batch, torch.arange(6), algo, 3, one_rank), algo.loss)
    after = [*adapter_parameters(policy, REWARD_ADAPTER).values()]
    assert all(torch.equal(p, q) for p, q in zip(gradients_before, after, strict=True))
    torch.testing.assert_close(RewardModel(shared).score(r).scores, scores)
    values = found.compute_logprobs(r, values=True, reference=False, full_kl=False).last_values
    assert not torch.allclose(values, scores, atol=1e-3)

    found.save(tmp_path / "run", tmp_path / "run" / "value_model")
    assert {x.name for x in (tmp_path / "run").iterdir()} >= {"adapter_model.safetensors"}
    assert not (tmp_path / "run" / VALUE_ADAPTER).exists()
    assert not (tmp_path / "run" / REWARD_ADAPTER).exists()
    names = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert not any("kedge" in name for name in names)
    config = json.loads((tmp_path / "run" / "value_model" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    fresh = tiny_reward_model(vocab_size=VOCAB)
    fresh.model.load_state_dict(base.model.state_dict())
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "run" / "value_model").eval()
    torch.testing.assert_close(RewardModel(loaded).score(r).scores, values)


def test_refusals_name_the_way_out(tmp_path):
    plain = tiny_policy(vocab_size=VOCAB)
    policy = with_adapter(copy.deepcopy(plain), lora())
    policy.save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match="must have a score head"):
        AdapterRewardModel(policy, str(tmp_path / "policy"))
    policy = with_adapter(copy.deepcopy(plain), lora())
    with pytest.raises(ConfigError, match="cannot be loaded"):
        AdapterRewardModel(policy, str(tmp_path / "nothing"))
    reward_adapter(tmp_path / "reward", plain)
    reward_adapter(tmp_path / "pissa", plain, init_lora_weights="pissa")
    with pytest.raises(ConfigError, match="changes the base that it would share"):
        AdapterRewardModel(policy, str(tmp_path / "pissa"))
    other = with_adapter(tiny_policy(vocab_size=VOCAB, layers=3), lora())
    with pytest.raises(ConfigError, match="belongs to another base model"):
        AdapterRewardModel(other, str(tmp_path / "reward"))
