"""Bad arguments, data, models, rewards and options give one clear error that names the thing.

``tests/unit/test_build.py`` has those that each stage of a run refuses, and
``tests/unit/test_config.py`` the options that a config refuses.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import pandas
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from kedge import PPOConfig, PPOTrainer, PPOv2Trainer
from kedge.records.errors import CheckpointError, ConfigError, DataError, KedgeError
from kedge.testing import ScriptedRollouts, tiny_policy
from kedge.verifiers import by_column
from tests.unit.text_toys import neox_reward, word_tokenizer

from .small import PROMPTS, VOCAB, small


def policy() -> Any:
    return tiny_policy("gpt_neox", vocab_size=VOCAB)


def scores(function: Callable[[list[str]], list[Any]]) -> dict[str, Any]:
    """A reward function alone."""

    def reward(completions: list[str], **_: Any) -> list[Any]:
        return function(completions)

    return {"reward_model": None, "reward_funcs": reward}


def not_a_number(model: Any) -> Any:
    """The model with one weight that is NaN."""
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0] = math.nan
    return model


def verified(verifier: Any, **data: Any) -> dict[str, Any]:
    return {"reward_model": None, "reward_funcs": verifier, **data}


UNKNOWN = {"prompt": "w3", "dataset": "gsm8kk", "ground_truth": "1"}
# Arguments and options, the error, and words that its message must hold.
REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    # arguments
    ({"args": {"a": 1}}, ConfigError, ["dict", "PPOConfig"]),
    ({"model": None}, ConfigError, ["model=None"]),
    ({"model": 5}, ConfigError, ["model=5", "policy"]),
    ({"optimizers": torch.optim.SGD([torch.ones(1)], lr=1.0)}, ConfigError, ["SGD", "pair"]),
    ({"optimizers": (torch.optim.SGD, None)}, ConfigError, ["optimizers[0]", "not its class"]),
    ({"optimizers": (None, "linear")}, ConfigError, ["optimizers[1]='linear'", "scheduler"]),
    ({"peft_config": {"r": 4}}, ConfigError, ["peft_config={'r': 4}", "LoraConfig"]),
    ({"peft_config": LoraConfig(task_type="SEQ_CLS")}, ConfigError, ["'CAUSAL_LM'", "SEQ_CLS"]),
    ({"peft_config": LoraConfig(target_modules=["nope"])}, ConfigError, ["peft_config", "nope"]),
    ({"rollout_engine": 5}, ConfigError, ["rollout_engine=5", "rollout_engine='vllm'"]),
    ({"algorithm": "remax"}, ConfigError, ["algorithm='remax'", "kedge.algorithms"]),
    ({"processing_class": None}, ConfigError, ["processing_class"]),
    ({"processing_class": 7}, ConfigError, ["7"]),
    # models
    (
        {"model": "/no/such/model", "processing_class": None},
        *(ConfigError, ["'/no/such/model'", "no such folder"]),
    ),
    ({"value_model": "./no/such"}, ConfigError, ["value model './no/such'", "no such folder"]),
    ({"model": neox_reward(vocab=VOCAB)}, ConfigError, ["ForSequenceClassification"]),
    ({"model": not_a_number(policy())}, ConfigError, ["not finite", "NaN"]),
    ({"value_model": policy().gpt_neox}, ConfigError, ["GPTNeoXModel", "score"]),
    ({"model_adapter_name": "mine"}, KedgeError, ["mine"]),
    (
        {
            "model": policy().requires_grad_(False),
            "value_model": neox_reward(vocab=VOCAB).requires_grad_(False),
        },
        *(ConfigError, ["requires_grad"]),
    ),
    # data
    ({"train_dataset": pandas.DataFrame(PROMPTS)}, DataError, ["DataFrame", "from_pandas"]),
    ({"eval_dataset": {"new": []}}, DataError, ["eval_dataset['new']", "empty"]),
    # rewards
    (
        verified(
            lambda completions, solution: [0.0] * len(completions),
            train_dataset=[{"prompt": "w3", "answer": "1"}],
        ),
        *(ConfigError, ["lambda needs solution", "its columns: answer, prompt"]),
    ),
    (
        verified([by_column()], train_dataset=[UNKNOWN | {"dataset": "gsm8k"}, UNKNOWN]),
        *(KedgeError, ["row 1", "'gsm8kk'", "the nearest is gsm8k"]),
    ),
    (
        verified(by_column(), eval_dataset={"new": Dataset.from_list([UNKNOWN])}),
        *(KedgeError, ["row 0", "'gsm8kk'"]),
    ),
    # options
    ({"optim_args": "beta=1"}, ConfigError, ["optim_args='beta=1'", "'beta' has no effect"]),
    ({"chat_template_kwargs": "[1]"}, ConfigError, ["chat_template_kwargs", "JSON object"]),
    (
        {"lr_scheduler_type": "warmup_stable_decay"},
        *(ConfigError, ["warmup_stable_decay", "lr_scheduler_kwargs=None", "num_decay_steps"]),
    ),
]
# The same of ``train``.
FAILS: list[tuple[dict[str, Any], list[str]]] = [
    ({"reward_model": neox_reward(vocab=8)}, ["8", str(VOCAB)]),
    (
        {
            "reward_model": neox_reward(vocab=VOCAB, labels=2),
            "value_model": neox_reward(vocab=VOCAB),
        },
        ["2"],
    ),
    ({"value_model": not_a_number(neox_reward(vocab=VOCAB))}, ["the value model returns nan for"]),
    (
        scores(lambda c: [1e30] * len(c)) | {"reward_weights": [1e20], "preflight": False},
        ["rewards must be finite, got inf for row 0"],
    ),
    ({"stop_token": None, "stop_token_ids": [999]}, ["999"]),
    ({"rollout_engine": ScriptedRollouts([[[3, 4]] * 4])}, ["1 step"]),
]


def policy_alone() -> None:
    model = policy()
    small(model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))


def saved_run() -> str:
    folder = tempfile.mkdtemp()
    small(output_dir=folder, save_strategy="steps", save_steps=1).train()
    return folder


def resumed_from_the_folder() -> None:
    folder = saved_run()
    small(output_dir=folder).train(resume_from_checkpoint=folder)


def resumed_with_another_optimizer() -> None:
    folder = saved_run()
    small(output_dir=folder, optim="sgd").train(resume_from_checkpoint=f"{folder}/checkpoint-1")


CALLS: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    (lambda: PPOTrainer(policy(), word_tokenizer()), ConfigError, ["GPTNeoX", "PPOConfig"]),  # type: ignore[arg-type]
    (lambda: PPOv2Trainer(config=PPOConfig(), args=PPOConfig()), ConfigError, ["config", "args"]),
    (policy_alone, ConfigError, ["SGD", "no weight of the value model", "pass value_model"]),
    (lambda: small().evaluate(), ConfigError, ["eval_dataset"]),
    (lambda: small().train(5), ConfigError, ["resume_from_checkpoint=5", "True"]),
    (lambda: small().train(True), CheckpointError, ["no checkpoint"]),
    (lambda: small().train("/no/such/folder"), CheckpointError, ["/no/such/folder"]),
    (
        resumed_from_the_folder,
        CheckpointError,
        ["is an output_dir, not a checkpoint", "checkpoint-2", "resume_from_checkpoint=True"],
    ),
    (
        resumed_with_another_optimizer,
        CheckpointError,
        ["betas", "SGD", "momentum", "Resume with the same optim"],
    ),
]
CASES: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    *((lambda changes=changes: small(**changes), kind, words) for changes, kind, words in REFUSED),
    *(
        (lambda changes=changes: small(**changes).train(), KedgeError, words)
        for changes, words in FAILS
    ),
    *CALLS,
]


@pytest.mark.parametrize(("call", "kind", "words"), CASES, ids=[", ".join(c[2]) for c in CASES])
def test_one_clear_error(call: Callable[[], Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 700
