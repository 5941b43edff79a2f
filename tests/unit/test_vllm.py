"""What can be said of the vLLM engine without vLLM: requests, blueprints, receipts, options."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from kedge import PPOConfig
from kedge.backends.hf.fingerprint import fingerprint
from kedge.backends.vllm.engine import VLLMEngine
from kedge.backends.vllm.policy_spec import PolicySpec
from kedge.backends.vllm.requests import (
    build_requests,
    build_rollout,
    build_sampling_params,
    row_seed,
)
from kedge.backends.vllm.server import flags
from kedge.backends.vllm.service import GenerationResult
from kedge.backends.vllm.weight_payload import max_lora_rank
from kedge.config import rollout
from kedge.config.rollout_engines import find_engine
from kedge.errors import ConfigError, RolloutError, SyncError
from kedge.testing import tiny_policy
from kedge.trainers.spec import shared_kwargs
from kedge.types import Sampling
from tests.contract.engines import policy, trained
from tests.contract.test_rollout_engine import prompts


class Ours:
    """A service that computes with the learner's own code; ``broken`` says how it goes wrong."""

    def __init__(self, blueprint, weights, broken=""):
        self.blueprint, self.broken = blueprint, broken
        self.weights, self.said = weights, 0

    def score(self, rows):
        assert rows == self.blueprint.probe().tolist()
        return self.blueprint.logprobs(self.weights).tolist()

    def load(self, parcel, version):
        sent = {name: x for name, x in parcel.named if name in self.weights}
        self.said = version - (self.broken == "version")
        if self.broken == "one weight" and self.said > 1:
            sent["model.norm.weight"] = self.weights["model.norm.weight"]
        if self.broken != "skips" or self.said < 2:
            self.weights = sent

    def version(self):
        return self.said


def moved(weights, by):
    generator = torch.Generator().manual_seed(1)
    noise = {n: torch.randn(p.shape, generator=generator) for n, p in weights.items()}
    return {n: p + by * noise[n] for n, p in weights.items()}


def receipts(broken, by=1e-2):
    model = policy()
    blueprint = PolicySpec.of(model)
    first = trained(model)
    engine = VLLMEngine(Ours(blueprint, first, broken), blueprint, pad_id=0)
    second = moved(first, by)
    assert engine.load_weights(first, 1).fingerprint == fingerprint(first)
    return engine.load_weights(second, 2), fingerprint(second)


def test_a_receipt_is_for_what_the_engine_computes():
    receipt, want = receipts("")
    assert (receipt.version, receipt.fingerprint) == (2, want)


def test_another_version_is_an_error():
    model = policy()
    blueprint = PolicySpec.of(model)
    engine = VLLMEngine(Ours(blueprint, trained(model), "version"), blueprint, pad_id=0)
    with pytest.raises(SyncError, match="reports version 0 after being sent 1"):
        engine.load_weights(trained(model), 1)


@pytest.mark.parametrize("by", [1e-2, 1e-5])
def test_a_sync_that_changed_nothing_is_an_error_however_small_the_update(by):
    with pytest.raises(SyncError, match="had no effect"):
        receipts("skips", by)


def test_one_weight_left_behind_is_an_error():
    with pytest.raises(SyncError, match="differ by"):
        receipts("one weight", 0.1)


def test_the_probe_says_what_the_model_says():
    for model in (policy(), tiny_policy("gpt2"), policy("qwen2", tie_word_embeddings=True)):
        blueprint = PolicySpec.of(model)
        probe = blueprint.probe()
        logits = model.eval()(probe).logits[:, :-1].log_softmax(-1)
        want = logits.gather(-1, probe[:, 1:, None])[..., 0]
        torch.testing.assert_close(blueprint.logprobs(trained(model)), want.detach())


def test_a_skeleton_holds_no_weights_and_takes_none():
    model = policy("qwen2", tie_word_embeddings=True)
    blueprint = PolicySpec.of(model)
    assert all(p.is_meta for p in blueprint.skeleton.parameters())
    assert not any(p.is_meta for p in model.parameters())


def test_a_tied_head_is_sent_as_a_weight_of_its_own():
    model = policy("qwen2", tie_word_embeddings=True)
    blueprint = PolicySpec.of(model)
    named = dict(blueprint.parcel(trained(model)).named)
    assert torch.equal(named["lm_head.weight"], named["model.embed_tokens.weight"])
    assert set(named) == set(model.state_dict())
    assert blueprint.config.tie_word_embeddings is False
    assert model.config.tie_word_embeddings is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {}, "received no weights"),
        (
            lambda w: w | {"more": torch.zeros(1)},
            "'more', which the rollout engine's model does not",
        ),
        (lambda w: w | {"lm_head.weight": torch.zeros(3, 3)}, r"lm_head.weight is \(3, 3\)"),
        (
            lambda w: {k: v for k, v in w.items() if "norm" not in k},
            "trained weight 'model.layers.0.inp",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    model = policy()
    with pytest.raises(SyncError, match=message):
        PolicySpec.of(model).parcel(change(trained(model)))


def test_a_folder_is_a_checkpoint_without_end_of_text(tmp_path):
    from transformers import AutoModelForCausalLM

    model = policy("qwen2", tie_word_embeddings=True)
    PolicySpec.of(model).write(tmp_path, trained(model))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert again.config.eos_token_id is None
    assert again.config.architectures == ["Qwen2ForCausalLM"]


def test_every_row_has_a_seed_of_its_own():
    seeds = {row_seed(seed, row) for seed in range(-20, 20) for row in range(100)}
    assert len(seeds) == 4000
    assert all(0 <= s < 2**56 for s in seeds)
    asks = build_requests(prompts(), Sampling(max_new_tokens=3), 5)
    assert [a.params["seed"] for a in asks] == [row_seed(5, row) for row in range(6)]
    assert asks[1].prompt == prompts().ids[1, 4:].tolist()


def test_requests_ask_for_the_distribution_that_trains():
    sampling = Sampling(max_new_tokens=9, min_new_tokens=2, temperature=0.7, stop_ids=(5, 6))
    params = build_sampling_params(sampling)
    assert params["temperature"] == 0.7
    assert params["stop_token_ids"] == [5, 6]
    assert (params["max_tokens"], params["min_tokens"]) == (9, 2)
    assert params["ignore_eos"] is True


def test_temperatures_that_vllm_would_change_are_refused():
    with pytest.raises(
        ConfigError, match=r"temperature=0.001 must be 0 .* or at least 0.01 with vLLM"
    ):
        build_sampling_params(Sampling(max_new_tokens=1, temperature=0.001))


def record(answers, sampling, **options):
    made = {"pad_id": 9, "tokenizer": None, "extra_slot": False} | options
    batch = prompts(rows=len(answers))
    return build_rollout(answers, batch, sampling, **made)


def answer(tokens, stopped=False, version=3):
    return GenerationResult(
        tokens=tokens, logprobs=[-0.5] * len(tokens), stopped=stopped, version=version
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
        record(short, Sampling(max_new_tokens=n), extra_slot=True).ids.shape[1] for n in (1, 2, 9)
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
    bad = GenerationResult(tokens=[1], logprobs=[float("nan")], stopped=False, version=4)
    with pytest.raises(RolloutError, match="NaN for row 1, sampled by version 4"):
        record([answer([1]), bad], Sampling(max_new_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_engine": "sglang"}, "rollout_engine='sglang' must be one of 'embedded', 'vllm'"),
        ({"vllm_sleep": True}, "vllm_sleep=True has no effect with rollout_engine='embedded'"),
        (
            {"rollout_engine": "vllm", "vllm_engine_args": {"seed": 1}},
            "vllm_engine_args must not set seed",
        ),
        (
            {"rollout_engine": "vllm", "vllm_engine_args": "no json"},
            "vllm_engine_args='no json' must be a mapping of names to values",
        ),
        (
            {"rollout_engine": "vllm", "vllm_tolerance": 0.0},
            "vllm_tolerance=0.0 must be a finite number above 0",
        ),
    ],
)
def test_options_that_cannot_work(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(rollout, "installed", lambda name: True)
    with pytest.raises(ConfigError, match=message):
        PPOConfig(output_dir=str(tmp_path), **options)


def test_vllm_that_is_not_installed_is_an_error_before_anything_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "installed", lambda name: False)
    with pytest.raises(ConfigError, match="needs vLLM in this environment: pip install"):
        PPOConfig(output_dir=str(tmp_path), rollout_engine="vllm")


def trainer_of(tmp_path, monkeypatch, model, **options):
    from kedge import PPOTrainer
    from tests.unit.text_toys import word_tokenizer

    monkeypatch.setattr(rollout, "installed", lambda name: True)
    return PPOTrainer(
        args=PPOConfig(output_dir=str(tmp_path), total_episodes=8, **options),
        processing_class=word_tokenizer(),
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=[{"prompt": "a b"}] * 8,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "attention heads of size 8, but vLLM on CPUs supports only 32, 64"),
        ({"vllm_sleep": True, "heads": 1}, "vllm_sleep=True needs a GPU"),
        (
            {"top_k": 5, "keep_sampling_mask": True, "heads": 1},
            "top_k=5, top_p=1.0, min_p=0.0 exclude tokens, and vLLM does not report",
        ),
        (
            {"rollout_engine": "http://127.0.0.1:9", "min_new_tokens": 2},
            "min_new_tokens=2 is not supported with the server at http://127.0.0.1:9",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about CPUs")
def test_what_vllm_cannot_do_is_refused_before_it_starts(tmp_path, monkeypatch, options, message):
    options = {"rollout_engine": "vllm"} | options
    model = tiny_policy("llama", heads=options.pop("heads", 4))
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, monkeypatch, model, **options)


def test_a_blueprint_can_be_sent_to_another_process():
    model = policy("qwen2", tie_word_embeddings=True)
    sent = pickle.loads(pickle.dumps(PolicySpec.of(model)))
    weights = trained(model)
    want = PolicySpec.of(model).logprobs(weights)
    assert torch.equal(sent.logprobs(weights), want)
    assert [n for n, _ in sent.parcel(weights).named].count("lm_head.weight") == 1


def test_an_adapter_is_a_parcel_of_its_own(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    about = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = get_peft_model(policy(), LoraConfig(**about)).eval()
    blueprint = PolicySpec.of(model)
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    blueprint.write(tmp_path / "base", weights)
    blueprint.parcel(weights).write(tmp_path / "adapter")
    assert max_lora_rank(blueprint.adapter) == 8
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = blueprint.probe()
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    want = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(blueprint.logprobs(weights), want.detach())


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ({"max_model_len": 256}, ["--max-model-len=256"]),
        ({"enforce_eager": True, "enable_lora": False}, ["--enforce-eager", "--no-enable-lora"]),
        ({"hf_overrides": {"a": [1]}, "revision": None}, ['--hf-overrides={"a": [1]}']),
    ],
)
def test_engine_arguments_as_flags(arguments, want):
    assert flags(arguments) == want


@pytest.mark.parametrize("file", [True, False])
def test_the_command_line_takes_the_options(tmp_path, monkeypatch, file):
    from kedge.cli.arguments import parse

    monkeypatch.setattr(rollout, "installed", lambda name: True)
    argv = ["--output_dir", str(tmp_path), "--dataset_name", "prompts.jsonl"]
    if file:
        (tmp_path / "run.yaml").write_text(
            "rollout_engine: vllm_server\nvllm_engine_args: {max_model_len: 9}\nworker_timeout: 7\n"
        )
        argv += ["--config", str(tmp_path / "run.yaml")]
    else:
        argv += ["--rollout_engine", "vllm_server", "--worker_timeout", "7"]
        argv += ["--vllm_engine_args", '{"max_model_len": 9}']
    found = parse(argv, prog="kedge ppo").config
    assert (found.rollout_engine, found.worker_timeout) == ("vllm_server", 7.0)
    assert rollout.engine_args(found.vllm_engine_args) == {"max_model_len": 9}


def test_no_weights_stay_in_shared_memory_of_a_process_that_closed_nothing(tmp_path):
    code = "import sys; from kedge.backends.vllm import Remote; "
    code += "r = Remote('http://x', folder=sys.argv[1])"
    code += "; (r._folder / 'w').mkdir(); print(r._folder)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "visible", "learners", "count", "each", "want"),
    [
        (0, None, "1", 2, 1, [None, None]),
        (1, None, "1", 1, 1, [None]),
        (4, None, "1", 2, 1, ["1", "2"]),
        (4, None, "2", 1, 2, ["2,3"]),
        (4, "3,5,6,7", "1", 3, 1, ["5", "6", "7"]),
    ],
)
def test_servers_get_the_gpus_that_no_learner_has(
    gpus, visible, learners, count, each, want, monkeypatch
):
    from kedge.backends.vllm.build import gpus_of_servers

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", learners)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_of_servers(count, each) == want


def test_servers_of_one_learner_are_its_own(monkeypatch):
    from kedge.backends.vllm.build import gpus_of_servers

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert gpus_of_servers(2, 1, share=True) == ["2", "3"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert gpus_of_servers(1, 2, share=True) == ["4,5"]
    with pytest.raises(ConfigError, match="need 8 GPUs, got 6"):
        gpus_of_servers(3, 1, share=True)


def test_nccl_without_gpus_is_refused(monkeypatch):
    from kedge.backends.vllm.build import check_local

    for module in ("rollout", "ray"):
        monkeypatch.setattr(f"kedge.config.{module}.installed", lambda name: True)
    asked = {"output_dir": "unused", "rollout_engine": "ray", "vllm_transfer": "nccl"}
    args, sampling = PPOConfig(**asked), Sampling(max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"vllm_transfer='nccl' needs a GPU"):
        check_local(policy(), sampling, **shared_kwargs(args, check_local))
    with pytest.raises(ConfigError, match="vllm_transfer='nccl' has no effect with"):
        PPOConfig(**asked | {"rollout_engine": "vllm_server"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollout_engine": "http://host:1"}, "host:1. is a single engine; use"),
        ({"rollout_engine": "vllm"}, "'vllm' is a single engine; use"),
        ({"rollout_engine": "ray", "ray_engine": "embedded", "vllm_num_engines": 5}, "set it to 4"),
        ({"rollout_engine": "ray", "ray_engine": "embedded"}, "set it to 2"),
    ],
)
def test_learners_that_cannot_have_engines_of_their_own(options, said, monkeypatch):
    from kedge.trainers.build.rollout import engines_per_rank

    for module in ("rollout", "ray"):
        monkeypatch.setattr(f"kedge.config.{module}.installed", lambda name: True)
    asked = PPOConfig(output_dir="unused", **options)
    with pytest.raises(ConfigError, match=said):
        engines_per_rank(asked, find_engine(asked), ranks=2)


def test_more_servers_than_gpus_are_refused(monkeypatch):
    from kedge.backends.vllm.build import gpus_of_servers

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="need 3 GPUs, got 2"):
        gpus_of_servers(2, 1)
