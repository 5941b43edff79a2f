"""Options that cannot work are refused before torch is imported, as the configs refuse them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from kedge.cli.arguments import parse
from kedge.cli.options import algorithm_kwargs, model_names
from kedge.records.errors import ConfigError
from kedge.trainers import load_trainer

RUN = {"model_name_or_path": "m", "reward_funcs": ["math:fsum"], "output_dir": "o"}
AHEAD = {"rollout_schedule": "as_completed", "max_lag": 1}
SUM = {"multi_objective_aggregation": "normalize_then_sum"}
REFUSED = [
    # Ranges of Kedge's options and of those of transformers; what is not supported.
    *[("ppo", x) for x in ({"gamma": 2}, {"top_p": 0}, {"num_mini_batches": 0})],
    *[("ppo", x) for x in ({"reward_timeout": -1}, {"stop_token_ids": [-3]}, {"temperature": 0})],
    *[("ppo", x) for x in ({"adam_beta1": 1}, {"max_grad_norm": -1}, {"learning_rate": "nan"})],
    *[("ppo", x) for x in ({"seed": -1}, {"stop_strings": [""]}, {"environment_kwargs": "[1]"})],
    *[("ppo", x) for x in ({"label_smoothing_factor": 0.1}, {"auto_find_batch_size": True})],
    *[("ppo", x) for x in ({"do_predict": True}, {"enable_jit_checkpoint": True})],
    ("grpo", {"delta": 1}),
    ("rloo", {"cliprange": 0}),
    # Combinations that any config refuses.
    *[
        ("ppo", {"stop_token": None, **x})
        for x in ({"missing_eos_penalty": 1.0}, {"non_eos_penalty": True}, {"overlong_buffer": 3})
    ],
    ("grpo", {"min_new_tokens": 9, "response_length": 8}),
    ("rloo", {"non_eos_penalty": True, "missing_eos_penalty": 1.0}),
    ("ppo", {"on_reward_error": "score"}),
    ("ppo", {"adaptive_kl": True, "kl_coef": 0}),
    ("ppo", {"ref_adapter_name": "a", "model_adapter_name": "a"}),
    ("ppo", {"in_flight_weight_updates": True}),
    ("ppo", {"sampler_correction": "mask_old"}),
    ("ppo", {"rollout_schedule": "as_completed"}),
    ("ppo", {"replay_rollouts": "nowhere", "max_lag": 1}),
    ("ppo", {"replay_rollouts": "nowhere"}),
    ("ppo", {"optim": "galore_adamw"}),
    ("grpo", {"lr_scheduler_type": "reduce_lr_on_plateau"}),
    ("ppo", {"optim_args": "momentum"}),
    # Rollout engines.
    ("ppo", {"rollout_engine": "other"}),
    ("ppo", {"vllm_sleep": True}),
    ("ppo", {"rollout_engine": "http://x", "vllm_num_engines": 2}),
    ("ppo", {"rollout_engine": "http://x", "weight_sync_folder": "nowhere"}),
    ("ppo", {"rollout_engine": "vllm_server", "vllm_python": "nowhere"}),
    ("ppo", {"vllm_engine_args": '{"seed": 1}'}),
    ("ppo", {"rollout_engine": "ray", "ray_engine": "embedded", "vllm_sleep": True}),
    # Algorithms.
    ("ppo", {"policy_loss": "mask", "dual_clip": 3}),
    ("ppo", {"dual_clip": 1.1}),
    ("ppo", {"recipe": "sao", "max_lag": 0}),
    ("rloo", {"recipe": "sao"}),
    ("grpo", {"kl_estimator": "full"}),
    ("grpo", {"overlong_buffer": 9, "response_length": 8}),
    *[("grpo", SUM | x) for x in ({"kl_coef": 0.1}, {"credit": "turn"}, {"overlong_buffer": 2})],
    ("grpo", {"loss_type": "cispo", "delta": 2}),
    ("grpo", {"delta": 1.1}),
    ("rloo", {"token_level_kl": True, "ratio_level": "sequence"}),
    *[("rloo", {"reward_clip_range": x}) for x in ([1, -1], [1, 2, 3])],
    # The model, its adapter and the rewards.
    ("ppo", {"model_name_or_path": None}),
    ("ppo", {"reward_funcs": None}),
    ("ppo", {"load_in_8bit": True, "load_in_4bit": True}),
    ("ppo", {"torch_dtype": "float16", "dtype": "bfloat16"}),
    ("ppo", {"load_in_4bit": True}),
    ("ppo", {"lora_dropout": 0.1}),
    ("ppo", {"lora_r": 8}),
    ("ppo", {"verification_reward": 2.0}),
    ("ppo", {"reward_model_multiplier": 2.0}),
    ("ppo", {"apply_verifiable_reward": True, "reward_weights": [1.0, 2.0]}),
    ("grpo", {"algorithm": "ppo"}),
    ("grpo", {"value_model_path": "v"}),
    ("ppo", {"algorithm_kwargs": '{"beta": 1}'}),
    ("ppo", {"algorithm_kwargs": "beta"}),
]
PROGRAM = """
import contextlib, io, json, sys
sys.modules |= {"torch": None, "transformers": None}  # importing them raises
from kedge.cli.main import main
said = []
for argv in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        said.append([main(argv), err.getvalue()])
print(json.dumps(said))
"""


def flags(options):
    words = []
    for name, value in options.items():
        given = value if isinstance(value, list) else ["none" if value is None else value]
        words += [f"--{name}", *map(str, given)]
    return words


def complete(options):
    """The options of a run; None for one of ``RUN`` leaves it out."""
    every = {**RUN, **options}
    return {name: x for name, x in every.items() if x is not None or name not in RUN}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a process without torch says to each case: to its flags, and to a file."""
    folder, calls = tmp_path_factory.mktemp("quick"), []
    for number, (command, options) in enumerate(REFUSED):
        file = folder / f"{number}.yaml"
        file.write_text(yaml.safe_dump(complete(options)))
        calls += [[command, *flags(complete(options))], [command, "--config", str(file)]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return list(zip(answers[::2], answers[1::2], strict=True))


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_an_option_is_refused_without_torch_as_by_its_class(number, answers):
    command, options = REFUSED[number]
    with pytest.raises(ConfigError) as refusal:
        slow(command, flags(complete(options)))
    text = " ".join(str(refusal.value).split())
    assert answers[number] == ([2, f"kedge {command}: error: {text}\n"],) * 2


def slow(command, argv):
    made = parse(argv, prog=f"kedge {command}", config=load_trainer(command).SPEC.config)
    model_names(made)
    algorithm_kwargs(made.script.algorithm, made.script.algorithm_kwargs)
