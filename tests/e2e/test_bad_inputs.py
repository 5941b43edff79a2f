"""Bad arguments, data, models and rewards give one clear error that names the thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback

from kedge import PPOTrainer
from kedge.algorithms import ppo
from kedge.errors import ConfigError, DataError, KedgeError
from kedge.testing import tiny_policy
from kedge.verifiers import by_column
from tests.unit.text_toys import neox_reward, word_tokenizer

from .small import VOCAB, length_reward, small


def run(**changes: Any) -> Any:
    return small(**changes).train()


def raises(function: Any) -> Callable[..., list[float]]:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return function(completions)

    return reward


def boom(completions: list[str], **_: Any) -> list[float]:
    raise ZeroDivisionError("division by zero")


shared_model = tiny_policy("gpt_neox", vocab_size=VOCAB)


# name: (what is done, the error, words that its message must hold)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "args of another kind": (lambda: small(args={"a": 1}), ConfigError, ["dict", "PPOConfig"]),
    "model instead of args": (
        lambda: PPOTrainer(shared_model, word_tokenizer()),  # type: ignore[arg-type]
        ConfigError,
        ["GPTNeoX", "PPOConfig"],
    ),
    "no model": (lambda: small(model=None), ConfigError, ["model=None"]),
    "a number for a model": (lambda: small(model=5), ConfigError, ["model=5", "policy"]),
    "a model and its tokenizer nowhere": (
        lambda: small(model="/no/such/model", processing_class=None),
        ConfigError,
        ["'/no/such/model'", "no such folder"],
    ),
    "a reward model nowhere": (
        lambda: small(reward_model="/no/such/model"),
        ConfigError,
        ["reward model '/no/such/model'", "no such folder"],
    ),
    "a value model nowhere": (
        lambda: small(value_model="./no/such/model"),
        ConfigError,
        ["value model './no/such/model'", "no such folder"],
    ),
    "an optimizer alone": (
        lambda: small(optimizers=torch.optim.SGD([torch.ones(1)], lr=1.0)),
        ConfigError,
        ["optimizers", "SGD", "pair"],
    ),
    "the class of an optimizer": (
        lambda: small(optimizers=(torch.optim.SGD, None)),
        ConfigError,
        ["optimizers[0]", "SGD", "not its class"],
    ),
    "a schedule by name": (
        lambda: small(optimizers=(None, "linear")),
        ConfigError,
        ["optimizers[1]='linear'", "scheduler"],
    ),
    "a callback alone": (
        lambda: small(callbacks=PrinterCallback()),
        ConfigError,
        ["callbacks", "list"],
    ),
    "an adapter as a dict": (
        lambda: small(peft_config={"r": 4}),
        ConfigError,
        ["peft_config={'r': 4}", "LoraConfig"],
    ),
    "an adapter of another task": (
        lambda: small(peft_config=LoraConfig(task_type="SEQ_CLS")),
        ConfigError,
        ["must have task_type='CAUSAL_LM'", "SEQ_CLS"],
    ),
    "an adapter on layers that are not there": (
        lambda: small(peft_config=LoraConfig(target_modules=["nope"])),
        ConfigError,
        ["peft_config", "nope"],
    ),
    "a collator by name": (
        lambda: small(data_collator="mine"),
        ConfigError,
        ["data_collator='mine'", "function"],
    ),
    "an engine that is none": (
        lambda: small(rollout_engine=5),
        ConfigError,
        ["rollout_engine=5", "rollout_engine='vllm'"],
    ),
    "an algorithm by name": (
        lambda: small(algorithm="remax"),
        ConfigError,
        ["algorithm='remax'", "kedge.algorithms"],
    ),
    "an algorithm that was not called": (
        lambda: small(algorithm=ppo),
        ConfigError,
        ["must be a kedge.Algorithm; call the function"],
    ),
    "arguments that the optimizer does not read": (
        lambda: small(optim_args="beta=1"),
        ConfigError,
        ["optim_args='beta=1'", "'beta' has no effect"],
    ),
    "pass at least one prompt": (
        lambda: small(eval_dataset={"new": []}),
        DataError,
        ["eval_dataset['new']", "empty"],
    ),
    "a number for a folder": (lambda: small(output_dir=5), ConfigError, ["output_dir=5"]),
    "resume from a number": (
        lambda: small().train(resume_from_checkpoint=5),
        ConfigError,
        ["resume_from_checkpoint=5", "True"],
    ),
    "no dataset": (lambda: small(train_dataset=None), DataError, ["train_dataset=None", "prompt"]),
    "empty dataset": (lambda: small(train_dataset=[]), DataError, ["empty"]),
    "no prompt column": (
        lambda: small(train_dataset=[{"text": "w3"}]),
        DataError,
        ["text", "prompt"],
    ),
    "prompt of numbers": (lambda: small(train_dataset=[{"prompt": 5}]), DataError, ["int"]),
    "prompt None": (lambda: small(train_dataset=[{"prompt": None}]), DataError, ["None"]),
    "empty prompt": (lambda: small(train_dataset=[{"prompt": ""}]), DataError, ["prompt"]),
    "dataset of another kind": (lambda: small(train_dataset=7), DataError, ["int"]),
    "every prompt too long": (
        lambda: small(max_prompt_length=1),
        DataError,
        ["max_prompt_length", "1"],
    ),
    "no tokenizer": (lambda: small(processing_class=None), ConfigError, ["processing_class"]),
    "tokenizer of another kind": (lambda: small(processing_class=7), ConfigError, ["7"]),
    "chat prompts without a template": (
        lambda: small(train_dataset=[{"prompt": [{"role": "user", "content": "w3"}]}]),
        DataError,
        ["chat_template"],
    ),
    "no reward": (lambda: small(reward_model=None), ConfigError, ["reward_model", "reward_funcs"]),
    "reward of another kind": (lambda: small(reward_model=3.5), ConfigError, ["float"]),
    "reward model of few words": (
        lambda: run(reward_model=neox_reward(vocab=8)),
        KedgeError,
        ["8", str(VOCAB)],
    ),
    "reward model with two labels": (
        lambda: run(
            reward_model=neox_reward(vocab=VOCAB, labels=2), value_model=neox_reward(vocab=VOCAB)
        ),
        KedgeError,
        ["2"],
    ),
    "reward raises": (
        lambda: run(reward_model=None, reward_funcs=boom),
        KedgeError,
        ["boom", "division by zero", "w"],
    ),
    "reward too short": (
        lambda: run(reward_model=None, reward_funcs=raises(lambda c: [1.0])),
        KedgeError,
        ["reward", "1", "4"],
    ),
    "reward is a word": (
        lambda: run(reward_model=None, reward_funcs=raises(lambda c: ["good"] * len(c))),
        KedgeError,
        ["good"],
    ),
    "reward is NaN": (
        lambda: run(reward_model=None, reward_funcs=raises(lambda c: [math.nan] * len(c))),
        KedgeError,
        ["nan"],
    ),
    "reward is infinite": (
        lambda: run(reward_model=None, reward_funcs=raises(lambda c: [math.inf] * len(c))),
        KedgeError,
        ["inf"],
    ),
    "reward function by a name that is not there": (
        lambda: small(reward_model=None, reward_funcs="math:no_such_thing"),
        ConfigError,
        ["no_such_thing"],
    ),
    "a column that a reward needs and the dataset calls otherwise": (
        lambda: small(
            reward_model=None,
            reward_funcs=lambda completions, solution: [0.0] * len(completions),
            train_dataset=[{"prompt": "w3", "answer": "1"}],
        ),
        ConfigError,
        ["lambda needs solution", "its columns: answer, prompt"],
    ),
    "a row that names no known verifier": (
        lambda: small(
            reward_model=None,
            reward_funcs=[by_column()],
            train_dataset=[
                {"prompt": "w3", "dataset": "gsm8k", "ground_truth": "1"},
                {"prompt": "w3", "dataset": "gsm8kk", "ground_truth": "1"},
            ],
        ),
        KedgeError,
        ["row 1", "'gsm8kk'", "the nearest is gsm8k"],
    ),
    "an evaluation row that names no known verifier": (
        lambda: small(
            reward_model=None,
            reward_funcs=by_column(),
            eval_dataset={"new": Dataset.from_list([{"prompt": "w3", "dataset": "maths"}])},
        ),
        KedgeError,
        ["row 0", "'maths'"],
    ),
    "reward weights of another number": (
        lambda: small(reward_weights=[1.0, 2.0]),
        ConfigError,
        ["reward_weights", "2", "1"],
    ),
    "reference is the policy": (
        lambda: small(model=shared_model, ref_model=shared_model),
        ConfigError,
        ["same object"],
    ),
    "policy that is no language model": (
        lambda: small(model=neox_reward(vocab=VOCAB)),
        ConfigError,
        ["ForSequenceClassification"],
    ),
    "value model without a head": (
        lambda: small(value_model=tiny_policy("gpt_neox", vocab_size=VOCAB).gpt_neox),
        ConfigError,
        ["GPTNeoXModel", "score"],
    ),
    "value from a reward that is not there": (
        lambda: small(reward_model=None, reward_funcs=length_reward, value_source="reward"),
        ConfigError,
        ["value_source", "value_model"],
    ),
    "nothing trains": (
        lambda: small(
            model=tiny_policy("gpt_neox", vocab_size=VOCAB).requires_grad_(False),
            value_model=neox_reward(vocab=VOCAB).requires_grad_(False),
        ),
        ConfigError,
        ["requires_grad"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_error(name: str) -> None:
    do, kind, words = CASES[name]
    with pytest.raises(kind) as caught:
        do()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 700
