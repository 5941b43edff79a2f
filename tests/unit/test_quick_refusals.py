"""Options that cannot work are refused before torch is imported, as the configs refuse them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from kedge.cli import quick
from kedge.cli.arguments import parse
from kedge.cli.options import algorithm_kwargs, model_names
from kedge.records.errors import ConfigError
from kedge.trainers import load_trainer

RUN = {"model_name_or_path": "m", "reward_funcs": ["math:fsum"], "output_dir": "o"}
# Command: its cases, separated by |, as YAML values of options.
_REFUSED = {
    "ppo": """gamma=2 | top_p=0 | num_mini_batches=0 | reward_timeout=-1 | stop_token_ids=[-3]
        | temperature=0 | adam_beta1=1 | max_grad_norm=-1 | learning_rate=nan | seed=-1
        | stop_strings=[""] | environment_kwargs="[1]" | label_smoothing_factor=0.1
        | auto_find_batch_size=true | do_predict=true | enable_jit_checkpoint=true
        | stop_token=null missing_eos_penalty=1.0 | stop_token=null non_eos_penalty=true
        | stop_token=null overlong_buffer=3 | on_reward_error=score | adaptive_kl=true kl_coef=0
        | ref_adapter_name=a model_adapter_name=a | in_flight_weight_updates=true
        | sampler_correction=mask_old | rollout_schedule=as_completed | replay_rollouts=nowhere
        | replay_rollouts=nowhere max_lag=1 | optim=galore_adamw | optim_args=momentum
        | rollout_engine=other | rollout_engine=http://x vllm_num_engines=2 | vllm_sleep=true
        | rollout_engine=http://x weight_sync_folder=nowhere | vllm_engine_args='{"seed":1}'
        | rollout_engine=vllm_server vllm_python=nowhere
        | rollout_engine=ray ray_engine=embedded vllm_sleep=true | policy_loss=mask dual_clip=3
        | dual_clip=1.1 | recipe=sao max_lag=0 | model_name_or_path=null | reward_funcs=null
        | load_in_8bit=true load_in_4bit=true | torch_dtype=float16 dtype=bfloat16
        | load_in_4bit=true | lora_dropout=0.1 | lora_r=8 | verification_reward=2.0
        | reward_model_multiplier=2.0 | apply_verifiable_reward=true reward_weights=[1.0,2.0]
        | algorithm_kwargs='{"beta":1}' | algorithm_kwargs=beta""",
    "grpo": """delta=1 | min_new_tokens=9 response_length=8 | lr_scheduler_type=reduce_lr_on_plateau
        | kl_estimator=full | overlong_buffer=9 response_length=8 | loss_type=cispo delta=2
        | multi_objective_aggregation=normalize_then_sum kl_coef=0.1 | delta=1.1
        | multi_objective_aggregation=normalize_then_sum credit=turn
        | multi_objective_aggregation=normalize_then_sum overlong_buffer=2
        | algorithm=ppo | value_model_path=v""",
    "rloo": """cliprange=0 | non_eos_penalty=true missing_eos_penalty=1.0 | recipe=sao
        | token_level_kl=true ratio_level=sequence | reward_clip_range=[1,-1]
        | reward_clip_range=[1,2,3]""",
}
REFUSED = []
for _command, _cases in _REFUSED.items():
    for _case in _cases.split("|"):
        _options = RUN | {k: yaml.safe_load(x) for k, x in (p.split("=", 1) for p in _case.split())}
        _kept = {k: x for k, x in _options.items() if x is not None or k not in RUN}
        REFUSED.append((_command, _kept))
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


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a process without torch says to each case: to its flags, and to a file."""
    calls = []
    for command, options in REFUSED:
        file = tmp_path_factory.mktemp("quick") / "run.yaml"
        file.write_text(yaml.safe_dump(options))
        calls += [[command, *flags(options)], [command, "--config", str(file)]]
    words, given = [sys.executable, "-c", PROGRAM], json.dumps(calls).encode()
    answers = json.loads(subprocess.run(words, input=given, stdout=-1, check=True).stdout)
    return list(zip(answers[::2], answers[1::2], strict=True))


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_an_option_is_refused_without_torch_as_by_its_class(number, answers):
    command, options = REFUSED[number]
    with pytest.raises(ConfigError) as refusal:  # noqa: PT012
        made = parse(flags(options), prog=command, config=load_trainer(command).SPEC.config)
        model_names(made)
        algorithm_kwargs(made.script.algorithm, made.script.algorithm_kwargs)
    text = f"kedge {command}: error: {' '.join(str(refusal.value).split())}\n"
    assert answers[number] == ([2, text],) * 2


def test_what_is_accepted_with_a_warning_is_said_once(caplog):
    words = flags(RUN | {"lora_dropout": 0.05, "use_cache": True, "num_ppo_epochs": 2})
    assert quick.answer("ppo", words) is False
    assert caplog.messages == []
    parse(words, prog="ppo", config=load_trainer("ppo").SPEC.config)
    assert [text.partition("=")[0] for text in caplog.messages] == ["use_cache", "lora_dropout"]
