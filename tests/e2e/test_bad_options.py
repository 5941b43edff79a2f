"""Options that cannot work give one clear error."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import pandas
import pytest
import torch

from kedge import PPOConfig, PPOv2Trainer
from kedge.algorithms import Algorithm, ppo
from kedge.errors import CheckpointError, ConfigError, DataError, KedgeError
from kedge.testing import ScriptedRollouts, tiny_policy
from tests.unit.text_toys import neox_reward

from .small import PROMPTS, VOCAB, small
from .test_bad_inputs import CASES as INPUTS


def run(**changes: Any) -> Any:
    return small(**changes).train()


def raises(function: Any) -> Callable[..., list[float]]:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return function(completions)

    return reward


def not_a_number(model: Any) -> Any:
    """The model with one weight that is NaN."""
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[0] = math.nan
    return model


def policy_alone() -> None:
    model = tiny_policy("gpt_neox", vocab_size=VOCAB)
    small(model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))


def saved_run() -> str:
    folder = tempfile.mkdtemp()
    run(output_dir=folder, save_strategy="steps", save_steps=1)
    return folder


def resumed_from_the_folder() -> None:
    folder = saved_run()
    small(output_dir=folder).train(resume_from_checkpoint=folder)


def resumed_with_another_optimizer() -> None:
    folder = saved_run()
    with pytest.warns(UserWarning, match='optim: "AdamW" in the checkpoint, "SGD" now'):
        small(output_dir=folder, optim="sgd").train(resume_from_checkpoint=f"{folder}/checkpoint-1")


# name: (what is done, the error, words that its message must hold)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "mini-batches that do not divide": (
        lambda: small(num_mini_batches=3),
        ConfigError,
        ["num_mini_batches=3", "4", "2"],
    ),
    "generations that do not divide": (
        lambda: small(num_generations=3),
        ConfigError,
        ["num_generations=3", "2"],
    ),
    "a derived size that is another": (lambda: small(batch_size=5), ConfigError, ["batch_size=5"]),
    "no batch": (lambda: small(per_device_train_batch_size=0), ValueError, ["0"]),
    "no response": (lambda: small(response_length=0), ConfigError, ["response_length", "0"]),
    "temperature 0": (lambda: small(temperature=0.0), ConfigError, ["temperature", "0"]),
    "temperature below 0": (lambda: small(temperature=-1.0), ConfigError, ["temperature"]),
    "lambda above 1": (lambda: small(lam=1.5), ConfigError, ["lam", "1.5"]),
    "clip range 0": (lambda: small(cliprange=0.0), ConfigError, ["cliprange"]),
    "KL below 0": (lambda: small(kl_coef=-0.1), ConfigError, ["kl_coef", "-0.1"]),
    "unknown estimator": (lambda: small(kl_estimator="k9"), ConfigError, ["kl_estimator", "k9"]),
    "a penalty for responses without end, which none can have": (
        lambda: small(stop_token=None, missing_eos_penalty=1.0),
        ConfigError,
        ["missing_eos_penalty=1.0", "stop_token=None", 'stop_token="eos"'],
    ),
    "unknown stop token": (lambda: small(stop_token="bos"), ConfigError, ["bos"]),
    "stop id beyond the vocabulary": (
        lambda: run(stop_token=None, stop_token_id=999),
        KedgeError,
        ["999"],
    ),
    "top-p out of range": (lambda: small(top_p=1.5), ConfigError, ["top_p"]),
    "two penalties": (
        lambda: small(missing_eos_penalty=1.0, non_eos_penalty=True),
        ConfigError,
        ["missing_eos_penalty", "non_eos_penalty"],
    ),
    "a field that is refused": (
        lambda: small(label_smoothing_factor=0.1),
        ConfigError,
        ["label_smoothing_factor"],
    ),
    "record and replay at once": (
        lambda: small(save_rollouts="a", replay_rollouts="b"),
        ConfigError,
        ["save_rollouts", "replay_rollouts"],
    ),
    "replay of nothing": (
        lambda: small(replay_rollouts="/no/such/recording"),
        KedgeError,
        ["/no/such/recording"],
    ),
    "longer than the model's positions": (lambda: run(response_length=200), KedgeError, ["128"]),
    "resume without a checkpoint": (
        lambda: small().train(resume_from_checkpoint=True),
        CheckpointError,
        ["no checkpoint"],
    ),
    "resume from a folder that is not there": (
        lambda: small().train(resume_from_checkpoint="/no/such/folder"),
        CheckpointError,
        ["/no/such/folder"],
    ),
    "evaluation without prompts": (
        lambda: small(eval_strategy="steps", eval_steps=1),
        ConfigError,
        ["eval_strategy='steps'", "eval_dataset"],
    ),
    "arguments of a template that are a list": (
        lambda: small(chat_template_kwargs="[1]"),
        ConfigError,
        ["chat_template_kwargs", "JSON object"],
    ),
    "an optimizer of the policy alone": (
        policy_alone,
        ConfigError,
        ["SGD", "no weight of the value model", "pass value_model"],
    ),
    "a schedule without what it needs": (
        lambda: small(lr_scheduler_type="warmup_stable_decay"),
        ConfigError,
        ["warmup_stable_decay", "lr_scheduler_kwargs=None", "num_decay_steps"],
    ),
    "a pandas frame": (
        lambda: small(train_dataset=pandas.DataFrame(PROMPTS)),
        DataError,
        ["DataFrame", "Dataset.from_pandas"],
    ),
    "weights that are NaN": (
        lambda: small(model=not_a_number(tiny_policy("gpt_neox", vocab_size=VOCAB))),
        ConfigError,
        ["not finite", "NaN"],
    ),
    "a value model that is NaN": (
        lambda: run(value_model=not_a_number(neox_reward(vocab=VOCAB))),
        KedgeError,
        ["the value model returns nan for token 0 of row 0"],
    ),
    "a score that overflows": (
        lambda: run(
            reward_model=None,
            reward_funcs=raises(lambda c: [1e30] * len(c)),
            reward_weights=[1e20],
            preflight=False,
        ),
        KedgeError,
        ["rewards must be finite, got inf for row 0"],
    ),
    "resume from a run's folder": (
        resumed_from_the_folder,
        CheckpointError,
        ["is an output_dir, not a checkpoint", "checkpoint-2", "resume_from_checkpoint=True"],
    ),
    "resume with another optimizer": (
        resumed_with_another_optimizer,
        CheckpointError,
        ["betas", "SGD", "momentum", "Resume with the same optim"],
    ),
    "evaluate without prompts": (lambda: small().evaluate(), ConfigError, ["eval_dataset"]),
    "old and new name at once": (
        lambda: PPOv2Trainer(config=PPOConfig(), args=PPOConfig()),
        ConfigError,
        ["config", "args"],
    ),
    "report to something unknown": (
        lambda: small(report_to="no_such_tracker"),
        ConfigError,
        ["no_such_tracker"],
    ),
    "adapter name without adapter": (
        lambda: small(model_adapter_name="mine"),
        KedgeError,
        ["mine"],
    ),
    "reference adapter that is not there": (
        lambda: small(ref_adapter_name="theirs"),
        ConfigError,
        ["theirs"],
    ),
    "script too short": (
        lambda: run(rollout_engine=ScriptedRollouts([[[3, 4]] * 4])),
        KedgeError,
        ["1 step"],
    ),
    "an algorithm that needs groups": (
        lambda: small(
            algorithm=Algorithm(
                name="grouped",
                compute_advantages=ppo().compute_advantages,
                loss=ppo().loss,
                min_group=2,
            )
        ),
        ConfigError,
        ["num_generations", "2"],
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


def test_there_are_fifty() -> None:
    assert len(INPUTS) + len(CASES) >= 50
