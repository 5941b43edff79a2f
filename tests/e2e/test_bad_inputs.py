"""Bad input gives one clear error that names the thing, or a documented behavior."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback

from kedge import PPOConfig, PPOTrainer, PPOv2Trainer
from kedge.algorithms import Algorithm, ppo
from kedge.errors import CheckpointError, ConfigError, DataError, KedgeError
from kedge.testing import ScriptedRollouts, tiny_policy
from kedge.types import PromptBatch, Rollout, Sampling
from kedge.verifiers import by_column
from tests.unit.text_toys import neox_reward, word_tokenizer

from .small import PROMPTS, VOCAB, length_reward, rows, small


def run(**changes: Any) -> Any:
    return small(**changes).train()


def raises(function: Any) -> Callable[..., list[float]]:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return function(completions)

    return reward


def boom(completions: list[str], **_: Any) -> list[float]:
    raise ZeroDivisionError("division by zero")


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
            reward_model=neox_reward(vocab=VOCAB, labels=2),
            value_model=neox_reward(vocab=VOCAB),
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
        ["row 1", "'gsm8kk'", "did you mean 'gsm8k'"],
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
    "bf16 weights that train": (
        lambda: small(model=tiny_policy("gpt_neox", vocab_size=VOCAB).to(torch.bfloat16)),
        ConfigError,
        ["bfloat16", "1/256", "allow_low_precision_weights"],
    ),
    "nothing trains": (
        lambda: small(
            model=tiny_policy("gpt_neox", vocab_size=VOCAB).requires_grad_(False),
            value_model=neox_reward(vocab=VOCAB).requires_grad_(False),
        ),
        ConfigError,
        ["requires_grad"],
    ),
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
    "top-k without the same mask in training": (
        lambda: small(top_k=5),
        ConfigError,
        ["top_k", "keep_sampling_mask"],
    ),
    "top-p out of range": (
        lambda: small(top_p=1.5, keep_sampling_mask=True),
        ConfigError,
        ["top_p"],
    ),
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
    "longer than the model's positions": (
        lambda: run(response_length=200),
        KedgeError,
        ["128"],
    ),
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
    assert len(CASES) >= 50


class Liar:
    """An engine whose log-probabilities are of another distribution."""

    shares_weights, logprobs = True, "sampled"

    def __init__(self, honest: Any) -> None:
        self.honest = honest

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        from dataclasses import replace

        colder = replace(sampling, temperature=sampling.temperature * 2)
        return self.honest.generate(prompts, sampling=colder, seed=seed)

    def load_weights(self, weights: Any, version: int) -> Any:
        return self.honest.load_weights(weights, version)


def test_an_engine_that_samples_another_distribution_fails_the_preflight() -> None:
    trainer = small()
    trainer.engine.rollout_engine = Liar(trainer.engine.rollout_engine)
    trainer.engine.learner.settings = replace_settings(trainer)
    with pytest.raises(
        KedgeError, match="log-probabilities of rollout engine and learner differ by"
    ):
        trainer.train()


def replace_settings(trainer: PPOTrainer) -> Any:
    from dataclasses import replace

    return replace(trainer.engine.learner.settings, reuse_behavior_logprobs=False)


def test_active_dropout_cannot_happen() -> None:
    model = tiny_policy("gpt_neox", vocab_size=VOCAB, hidden_dropout=0.5, attention_dropout=0.5)
    trainer = small(model=model)
    trainer.train()  # the preflight compares two passes
    assert rows(trainer)[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "scored"),
    [
        ({"on_reward_error": "score", "reward_error_score": -3.0}, 4),
        ({"on_reward_error": "drop"}, 3),
    ],
    ids=["score", "drop"],
)
def test_a_failing_row_is_scored_or_dropped_and_counted(
    options: dict[str, Any], scored: int
) -> None:
    def fragile(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        if any(p == PROMPTS[0]["prompt"] for p in prompts):
            raise ValueError("cannot read this one")
        return length_reward(completions)

    trainer = small(
        reward_model=None,
        reward_funcs=fragile,
        train_dataset=PROMPTS[:4],
        total_episodes=4,
        shuffle_dataset=False,
        **options,
    )
    trainer.train()
    row = rows(trainer)[0]
    assert row["rollout/dropped_rows"] == 4 - scored
    assert all(math.isfinite(v) for v in row.values())


def test_a_dataset_smaller_than_a_batch_repeats() -> None:
    trainer = small(train_dataset=PROMPTS[:1], per_device_train_batch_size=4)
    assert trainer.train().global_step == 2


def test_a_tokenizer_without_pad_works() -> None:
    trainer = small(processing_class=word_tokenizer(pad=False))
    assert trainer.train().global_step == 2


def test_unwritable_output(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises((KedgeError, OSError), match="file"):
        run(output_dir=str(blocked / "below"), save_strategy="steps")


def test_bad_input_leaves_the_models_as_they_were() -> None:
    model = tiny_policy("gpt_neox", vocab_size=VOCAB)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KedgeError):
        run(model=model, reward_model=None, reward_funcs=boom)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_warmup_of_the_value_that_never_ends_is_said(caplog: pytest.LogCaptureFixture) -> None:
    small(value_warmup_steps=2)
    assert "value_warmup_steps=2 covers all 2 iterations" in caplog.text
    caplog.clear()
    small(value_warmup_steps=1)
    assert "value_warmup_steps" not in caplog.text
