"""The model of the embedded engine: modes, weights, adapters, memory, and what is rejected."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from kedge.models.fingerprint import fingerprint, policy_weights
from kedge.records.errors import ConfigError, RolloutError, SyncError
from kedge.records.types import Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from tests.storages import Largest

from .embedded import PAD, VOCAB, full_logits, logprobs_of, policy, prompts, sample


@pytest.fixture(scope="module")
def llama():
    return policy("llama", initializer_range=0.3)


class TestTheModelIsLeftAsItWas:
    def test_dropout_is_off_while_sampling_and_modes_are_restored(self):
        model = policy("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
        engine = EmbeddedEngine(model, pad_id=PAD)
        model.train()
        model.transformer.h[0].eval()  # a mix of modes comes back as it was
        modes = [m.training for m in model.modules()]
        first = engine.generate(prompts(), sampling=Sampling(max_new_tokens=8), seed=0)
        second = engine.generate(prompts(), sampling=Sampling(max_new_tokens=8), seed=0)
        assert [m.training for m in model.modules()] == modes
        assert torch.equal(first.behavior_logprobs, second.behavior_logprobs)
        want = logprobs_of(full_logits(model, first), first)
        assert (first.behavior_logprobs - want).abs().max() < 1e-5

    def test_modes_are_restored_after_an_error(self, llama):
        model = copy.deepcopy(llama).train()
        with torch.no_grad():
            model.lm_head.weight.fill_(math.nan)
        with pytest.raises(RolloutError, match="NaN"):
            sample(model, max_new_tokens=3)
        assert all(m.training for m in model.modules())


class TestWeights:
    def test_a_live_engine_follows_the_model(self, llama):
        model = copy.deepcopy(llama)
        engine = EmbeddedEngine(model, pad_id=PAD)
        assert engine.shares_weights
        before = engine.load_weights({}, 1)
        assert before.fingerprint == fingerprint(policy_weights(model))
        with torch.no_grad():
            model.lm_head.weight[3, 3] += 1e-3
        assert engine.load_weights({}, 2).fingerprint != before.fingerprint

    def test_a_copy_changes_only_when_weights_are_loaded(self, llama):
        model, sampling = copy.deepcopy(llama), Sampling(max_new_tokens=6)
        engine = EmbeddedEngine(model, pad_id=PAD, shares_weights=False)
        assert not engine.shares_weights
        want = engine.generate(prompts(), sampling=sampling, seed=0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        assert torch.equal(engine.generate(prompts(), sampling=sampling, seed=0).ids, want.ids)
        receipt = engine.load_weights(policy_weights(model), 3)
        assert receipt.fingerprint == fingerprint(policy_weights(model))
        got = engine.generate(prompts(), sampling=sampling, seed=0)
        live = EmbeddedEngine(model, pad_id=PAD).generate(prompts(), sampling=sampling, seed=0)
        assert torch.equal(got.ids, live.ids)
        assert not torch.equal(got.ids, want.ids)
        assert got.policy_version.tolist() == [3] * 6

    def test_the_receipt_tells_what_is_held_not_what_was_sent(self, llama):
        model = copy.deepcopy(llama).bfloat16()
        engine = EmbeddedEngine(model, pad_id=PAD, shares_weights=False)
        sent = policy_weights(llama)
        assert engine.load_weights(sent, 1).fingerprint != fingerprint(sent)

    @pytest.mark.parametrize(
        ("weights", "words"),
        [
            ({}, "no weights"),
            ({"nope": torch.zeros(1)}, "'nope'"),
            ({"lm_head.weight": torch.zeros(2, 2)}, r"\(2, 2\)"),
        ],
    )
    def test_weights_that_do_not_fit(self, llama, weights, words):
        engine = EmbeddedEngine(llama, pad_id=PAD, shares_weights=False)
        with pytest.raises(SyncError, match=words):
            engine.load_weights(weights, 1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
class TestPeft:
    @pytest.fixture
    def adapted(self, llama):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
        model = peft.get_peft_model(copy.deepcopy(llama), config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(generator=torch.Generator().manual_seed(0))
        return model.train()

    def test_samples_from_base_and_adapter(self, adapted, llama):
        sampling = Sampling(max_new_tokens=8)
        rollout = EmbeddedEngine(adapted, pad_id=PAD).generate(prompts(), sampling=sampling, seed=0)
        want = logprobs_of(full_logits(adapted, rollout), rollout)
        assert (rollout.behavior_logprobs - want).abs().max() < 1e-5
        base = EmbeddedEngine(llama, pad_id=PAD).generate(prompts(), sampling=sampling, seed=0)
        assert not torch.equal(rollout.ids, base.ids)
        merged = EmbeddedEngine(copy.deepcopy(adapted).merge_and_unload(), pad_id=PAD)
        assert torch.equal(merged.generate(prompts(), sampling=sampling, seed=0).ids, rollout.ids)

    def test_a_copy_takes_the_adapter_alone(self, adapted):
        engine = EmbeddedEngine(adapted, pad_id=PAD, shares_weights=False)
        weights = policy_weights(adapted)
        assert weights
        assert all("lora" in name for name in weights)
        with torch.no_grad():
            for w in weights.values():
                w.mul_(2.0)
        assert engine.load_weights(weights, 1).fingerprint == fingerprint(weights)
        sampling = Sampling(max_new_tokens=8)
        live = EmbeddedEngine(adapted, pad_id=PAD).generate(prompts(), sampling=sampling, seed=0)
        assert torch.equal(engine.generate(prompts(), sampling=sampling, seed=0).ids, live.ids)

    def test_prompt_learning_is_refused(self, llama):
        peft = pytest.importorskip("peft")
        config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        engine = EmbeddedEngine(peft.get_peft_model(copy.deepcopy(llama), config), pad_id=PAD)
        with pytest.raises(ConfigError, match="virtual tokens"):
            engine.generate(prompts(), sampling=Sampling(max_new_tokens=2), seed=0)


class TestMemory:
    rows, steps, vocab = 12, 20, 5000

    def generate(self, **sampling):
        model = policy("llama", vocab_size=self.vocab, hidden_size=8)
        engine = EmbeddedEngine(model, pad_id=PAD, chunk_rows=4)
        batch = prompts(lengths=(7,) * self.rows)
        with Largest() as seen:
            engine.generate(batch, sampling=Sampling(max_new_tokens=self.steps, **sampling), seed=0)
        return seen.elements

    @pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.01}])
    def test_nothing_holds_more_than_one_vocabulary_per_row_in_flight(self, options):
        assert self.generate(**options) <= 4 * self.vocab


class TestRefusals:
    def refused(self, model, batch, error, words, **sampling):
        with pytest.raises(error, match=words):
            EmbeddedEngine(model, pad_id=PAD).generate(
                batch, sampling=Sampling(**{"max_new_tokens": 3, **sampling}), seed=0
            )

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda p: {"mask": p.mask.flip(1)}, RolloutError, "left-padded"),
            (
                lambda p: {"group": torch.tensor([0, 1, 2, 3, 0, 5])},
                RolloutError,
                "rows 0 and 4 are of group 0",
            ),
        ],
    )
    def test_prompts_that_break_the_contract(self, llama, change, error, words):
        batch = prompts()
        self.refused(llama, replace(batch, **change(batch)), error, words)

    @pytest.mark.parametrize(
        ("sampling", "error", "words"),
        [
            ({"max_new_tokens": 122}, RolloutError, "need 129 positions"),
            ({"stop_ids": (64,)}, ConfigError, r"stop_ids=\(64,\)"),
            ({"stop_strings": ("x",)}, ConfigError, "tokenizer"),
        ],
    )
    def test_sampling_that_cannot_work(self, llama, sampling, error, words):
        self.refused(llama, prompts(), error, words, **sampling)

    def test_a_model_without_a_key_value_cache(self):
        from transformers import MambaConfig, MambaForCausalLM

        model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1))
        self.refused(model, prompts(), ConfigError, "key-value cache")

    def test_a_model_with_a_special_cache_class(self):
        from transformers import MiniMaxConfig, MiniMaxForCausalLM

        shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
        model = MiniMaxForCausalLM(MiniMaxConfig(vocab_size=VOCAB, **shape))
        self.refused(model, prompts(), ConfigError, "MiniMaxForCausalLM a special cache class")

    def test_an_encoder_decoder(self):
        from transformers import T5Config, T5ForConditionalGeneration

        shape = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
        model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **shape))
        self.refused(model, prompts(), ConfigError, "is an encoder-decoder")
