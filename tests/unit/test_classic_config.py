"""The options of the classic trainer, and what programs for TRL pass, read and assign."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from kedge.ext.trl.classic import (
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    unwrap_model_for_generation,
)
from kedge.ext.trl.classic.core import PPODecorators
from kedge.ext.trl.classic.reports import log_batch
from kedge.records.errors import ConfigError
from tests.classic_models import gpt2, letters, lora, samples, t5, trainer

pytestmark = pytest.mark.filterwarnings("ignore:the KL to the reference")

# As the documentation of TRL 0.11 gives them; null where the trainer fills it in.
DEFAULTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("classic_config_defaults.json").read_text()
)


def test_fields_and_defaults_are_those_of_the_seed_in_their_order() -> None:
    own = {f.name: getattr(PPOConfig(), f.name) for f in fields(PPOConfig)}
    assert own.pop("exp_name")
    assert own.pop("early_stopping_keeps_step") is False
    assert list(own.items()) == list(DEFAULTS.items())


def test_sizes() -> None:
    config = PPOConfig(batch_size=12, mini_batch_size=2, gradient_accumulation_steps=3, steps=100)
    assert config.backward_batch_size == 6
    assert config.total_ppo_epochs == 9  # ceil(100 / 12)
    assert PPOConfig(batch_size=1).mini_batch_size == 1  # unset: at most a batch
    assert PPOConfig(batch_size=256).mini_batch_size == 128
    with pytest.raises(ValueError, match=r"batch_size=8 must be a multiple of mini_batch_size=3 x"):
        PPOConfig(batch_size=8, mini_batch_size=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_penalty": "k3"}, "kl_penalty='k3' must be one of 'kl', 'abs', 'mse' or 'full'"),
        ({"log_with": "neptune"}, "log_with='neptune' must be one of all, aim, tensorboard, wandb"),
        ({"score_clip": -1.0}, "score_clip=-1.0 must be above 0 or None"),
        ({"push_to_hub_if_best_kwargs": {"private": True}}, "needs a repo_id"),
        ({"tracker_kwargs": "[1]"}, "a JSON object or None"),
        ({"tracker_kwargs": "{"}, "JSON object or None, but is not valid JSON: Exp"),
    ],
    ids=str,
)
def test_values_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**change)


def test_every_tracker_of_accelerate_is_known() -> None:
    from accelerate.utils import LoggerType

    for name in map(str, LoggerType):
        if find_spec(name) is None and name != "all":
            with pytest.raises(ImportError, match=f"pip install {name}"):
                PPOConfig(log_with=name)
        else:
            PPOConfig(log_with=name)


def test_deprecated_names_do_what_they_did() -> None:
    with pytest.warns(UserWarning, match="forward_batch_size is deprecated") as caught:
        assert PPOConfig(forward_batch_size=4, batch_size=8).mini_batch_size == 4
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="optimize_cuda_cache is deprecated"):
        assert PPOConfig(optimize_cuda_cache=True).optimize_device_cache


def test_on_a_command_line() -> None:
    from transformers import HfArgumentParser

    (config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        [
            *("--batch_size", "8", "--mini_batch_size", "4", "--kl_penalty", "abs"),
            *("--tracker_kwargs", '{"wandb": {"name": "mine"}}', "--early_stopping"),
        ]
    )
    assert (config.batch_size, config.kl_penalty, config.early_stopping) == (8, "abs", True)
    assert config.options("tracker_kwargs") == {"wandb": {"name": "mine"}}
    assert config.to_dict()["tracker_kwargs/wandb/name"] == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": 3}, "config must be a kedge.classic.PPOConfig, got int"),
        ({"tokenizer": None}, "tokenizer must be a transformers tokenizer, got NoneType"),
        ({"model": gpt2()}, "model must be an AutoModelForCausalLMWithValueHead"),
        ({"ref_model": 3}, "ref_model must be a language model"),
        ({"dataset": [1]}, "dataset must be a datasets.Dataset"),
        ({"lr_scheduler": 3}, "lr_scheduler must be a torch"),
    ],
    ids=str,
)
def test_what_the_trainer_refuses(change: dict[str, Any], message: str) -> None:
    from kedge.ext.trl.classic import AutoModelForCausalLMWithValueHead, PPOConfig

    arguments = {
        "config": PPOConfig(batch_size=8, mini_batch_size=8),
        "model": AutoModelForCausalLMWithValueHead(gpt2()),
        "tokenizer": letters(),
    }
    with pytest.raises(ValueError, match=message):
        PPOTrainer(**arguments | change)


def test_both_reference_and_shared_layers() -> None:
    from kedge.ext.trl.classic import create_reference_model

    with pytest.warns(UserWarning, match="num_shared_layers is ignored"):
        trainer(gpt2(), num_shared_layers=1, reference=create_reference_model)


def test_kind_of_model_in_the_config() -> None:
    with pytest.raises(ValueError, match="is_encoder_decoder=True must be False"):
        trainer(gpt2(), is_encoder_decoder=True)
    assert trainer(t5()).config.is_encoder_decoder is True


def test_mixed_precision() -> None:
    from accelerate.state import AcceleratorState

    options = {"sgd": 0.1, "ppo_epochs": 1}
    a = trainer(gpt2(), **options).step(*samples())
    AcceleratorState._reset_state()
    try:
        rough = trainer(gpt2(), **options, accelerator_kwargs={"mixed_precision": "bf16"})
        b = rough.step(*samples())
    finally:
        AcceleratorState._reset_state()
    assert all(p.dtype == torch.float32 for p in rough.model.parameters())
    assert a["objective/entropy"] != b["objective/entropy"]
    assert a["objective/entropy"] == pytest.approx(b["objective/entropy"], rel=2e-2)


def test_the_precision_of_an_earlier_trainer_is_said_to_stay() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    try:
        Accelerator(cpu=True, mixed_precision="bf16")
        with pytest.warns(UserWarning, match="an earlier trainer .* mixed_precision='bf16'"):
            trainer(gpt2())
    finally:
        AcceleratorState._reset_state()


def test_a_model_on_several_devices_is_refused() -> None:
    model = gpt2()
    model.hf_device_map = {"transformer.h.0": 0, "transformer.h.1": 1}
    with pytest.raises(ValueError, match="device_map places the model on several devices"):
        trainer(model)
    model.hf_device_map = {"transformer.h.0": 0, "transformer.h.1": "cpu"}
    with pytest.raises(ValueError, match="device_map places parts of the model on cpu"):
        trainer(model)


def test_sharding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.classic.assembly.sharding_strategy", lambda accelerator: "weights")
    with pytest.raises(ValueError, match=r"requests FSDP or DeepSpeed, but kedge.classic keeps"):
        trainer(gpt2())


@pytest.fixture(scope="module")
def made() -> PPOTrainer:
    return trainer(gpt2())


def test_the_device(made: PPOTrainer) -> None:
    made.current_device = torch.device("cpu")
    made.current_device = "cpu:0"
    assert made.current_device == torch.device("cpu:0")
    queries, responses, _ = samples()
    assert made.prepare_model_inputs(queries, responses)["input_ids"].device.type == "cpu"
    with pytest.raises(ConfigError, match="current_device='meta', but the models are on 'cpu'"):
        made.current_device = "meta"


def test_facts_may_be_assigned_but_not_changed(made: PPOTrainer) -> None:
    for name in ("is_encoder_decoder", "is_peft_model", "is_distributed"):
        setattr(made, name, False)
        with pytest.raises(ConfigError, match=f"{name} is False for this trainer"):
            setattr(made, name, True)


def test_the_step() -> None:
    found = trainer(gpt2())
    found.current_step = 7
    found.step(*samples())
    assert found.current_step == 8
    with pytest.raises(ConfigError, match="current_step must be a whole number"):
        found.current_step = -1


def test_an_optimizer_and_a_schedule_that_are_assigned_train() -> None:
    found = trainer(gpt2())
    before = [p.detach().clone() for p in found.model_params]
    found.optimizer = torch.optim.SGD(found.model.parameters(), lr=0.0)
    assert found.step(*samples())["ppo/learning_rate"] == 0.0
    assert all(map(torch.equal, before, found.model_params))
    found.optimizer = torch.optim.SGD(found.model.parameters(), lr=0.5)
    found.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(found.optimizer, 0.5)
    assert [found.step(*samples())["ppo/learning_rate"] for _ in range(2)] == [0.5, 0.25]
    assert not all(map(torch.equal, before, found.model_params))
    for name, value, message in (
        ("optimizer", 3, "optimizer must be a torch.optim.Optimizer, got int"),
        (
            "lr_scheduler",
            3,
            "lr_scheduler must be a torch.optim.lr_scheduler.LRScheduler or None, got int",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            setattr(found, name, value)
    with pytest.raises(ConfigError, match="holds no weight of the policy model"):
        found.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def test_a_reference_that_is_assigned_is_the_reference() -> None:
    """Moving the reference to the policy, as loops do now and then, makes the KL 0."""
    found = trainer(gpt2(), sgd=0.5)
    found.step(*samples())
    assert abs(found.step(*samples(seed=1))["objective/kl"]) > 1e-3
    found.ref_model = create_reference_model(found.model)
    assert found.step(*samples(seed=2))["objective/kl"] == pytest.approx(0, abs=1e-4)
    for model, message in (
        (found.model, "ref_model must not be the policy itself"),
        (None, "ref_model=None needs a PEFT policy"),
        (3, "ref_model must be a language model"),
    ):
        with pytest.raises(ConfigError, match=message):
            found.ref_model = model


def test_options_that_are_changed_between_steps_act() -> None:
    new = {"ppo_epochs": 1, "gamma": 0.5, "batch_size": 4, "max_grad_norm": 1e-3, "cliprange": 0.1}
    changed, fresh = (trainer(gpt2(), sgd=1.0, **o, mini_batch_size=2) for o in ({}, new))
    for name, value in new.items():
        setattr(changed.config, name, value)
    for found in (changed, fresh):
        found.step(*samples(size=4))
    assert all(map(torch.equal, changed.model_params, fresh.model_params))
    changed.config.gamma = 5
    with pytest.raises(ConfigError, match="gamma=5 must be"):
        changed.step(*samples(size=4))


def test_names_of_trl(made: PPOTrainer) -> None:
    assert made.processing_class is made.tokenizer
    assert made.model.lm_head_namings == ("lm_head", "embed_out")
    assert len(made.model_params) == len(list(made.model.parameters()))
    made.processing_class = None  # nothing of the trainer hangs on it
    with unwrap_model_for_generation(made.model, made.accelerator) as inner:
        assert inner is made.model
    assert PPODecorators.optimize_device_cache is False


def test_sampling_from_the_reference_of_an_adapter() -> None:
    pytest.importorskip("peft")
    found = trainer(gpt2(), peft_config=lora(), learning_rate=0.1)
    found.step(*samples())
    ids = torch.tensor([[3, 4, 5]])
    with unwrap_model_for_generation(found.model, found.accelerator, is_peft_model=True) as inner:
        off = inner(ids)[0]
    with found.optional_peft_ctx():
        assert torch.equal(found.model(ids)[0], off)
    assert not torch.equal(found.model(ids)[0], off)


def test_without_a_dataset_there_is_a_warning() -> None:
    from kedge.ext.trl.classic import AutoModelForCausalLMWithValueHead, PPOConfig

    config = PPOConfig(batch_size=8, mini_batch_size=8)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(gpt2())
    with pytest.warns(UserWarning, match="no dataset was given: pass batch_size=8") as seen:
        PPOTrainer(config, model, tokenizer=letters(28))
    assert seen[0].filename == __file__


class Pairs(torch.utils.data.Dataset[Any]):
    """Rows that are tuples of tensors, as in TRL's own tests."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i, 3, 4]), torch.tensor([5, 6])


def test_rows_that_are_tuples_of_tensors() -> None:
    found = trainer(gpt2(), dataset=Pairs())
    (queries, responses), *others = found.dataloader
    assert queries.shape == (8, 3)
    assert responses.shape == (8, 2)
    assert not others
    found.step(list(queries), list(responses), list(torch.ones(8)))


def test_save_pretrained_waits_for_nobody(
    made: PPOTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the steps that are local in TRL."""

    def collective(*args: Any) -> Any:
        raise AssertionError("one process alone would wait here for ever")

    monkeypatch.setattr(made.accelerator, "wait_for_everyone", collective)
    monkeypatch.setattr(made.learner, "all_reduce", collective)
    made.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "value_head.safetensors").is_file()
    zero, mask = torch.zeros(2, 3), torch.ones(2, 3)
    values, advantages, returns = made.compute_advantages(zero, mask, mask)
    _, _, stats = made.loss(zero, values, None, zero, zero, mask, advantages, returns)
    rows = dict.fromkeys(("logprobs", "ref_logprobs", "non_score_reward", "kls"), zero)
    texts = [torch.tensor([3])] * 2
    made.record_step_stats(
        0.1,
        scores=torch.ones(2),
        masks=mask,
        queries=texts,
        responses=texts,
        train_stats=stats,
        **rows,
    )


class Both(PPOTrainer, Trainer):  # type: ignore[misc]
    """A trainer that also is transformers' own, as in LLaMA-Factory."""


def test_save_state_of_a_trainer_of_transformers(tmp_path: Path) -> None:
    found = trainer(gpt2(), kind=Both)
    calls: list[str] = []
    found.args = SimpleNamespace(should_save=True, output_dir=str(tmp_path), process_index=0)
    found.state = SimpleNamespace(save_to_json=calls.append)
    found.save_state()
    assert calls == [str(tmp_path / "trainer_state.json")]
    assert found.save_state(tmp_path / "own").name == "checkpoint-0"
    found._save(str(tmp_path / "saved"), state_dict=found.model.v_head.state_dict())
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match="save_state needs a folder"):
        trainer(gpt2()).save_state()


class Tracker:
    def __init__(self, name: str) -> None:
        self.name, self.rows = name, []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((values, step))


def test_trackers_without_tables_get_the_numbers() -> None:
    """mlflow, swanlab, comet_ml and whatever else accelerate knows, alone or as "all"."""
    trackers = [Tracker("mlflow"), Tracker("swanlab")]
    accelerator: Any = SimpleNamespace(
        trackers=trackers, log_with=["mlflow"], num_processes=1, is_main_process=True
    )
    stats = {"objective/kl": 0.5, "ppo/policy/ratio": np.ones(3)}
    batch = {"query": ["a", "b"], "response": ["c", "d"]}
    scores = [torch.tensor(1.0), torch.tensor(3.0)]
    log_batch(accelerator, stats, batch, scores, ["query", "response"], step=4)
    for tracker in trackers:
        ((values, step),) = tracker.rows
        assert step == 4
        assert values["objective/kl"] == 0.5
        assert values["env/reward_mean"] == 2.0
        assert all(isinstance(x, float) for x in values.values())


def test_arguments_of_accelerate_that_there_are_not() -> None:
    with pytest.raises(
        ConfigError, match=r"accelerator_kwargs=\{'nonsense': 1\} or project_kwargs"
    ):
        trainer(gpt2(), accelerator_kwargs={"nonsense": 1})
