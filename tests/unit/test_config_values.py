"""Values and combinations of options that cannot work are one clear error."""

import math

import pytest
from transformers import SchedulerType

from kedge.config.declare import format_value
from kedge.config.ppo import PPOConfig
from kedge.errors import ConfigError

BAD = [
    ({"lam": 1.5}, "lam=1.5 must be at most 1"),
    ({"cliprange": 0}, "cliprange=0 must be above 0"),
    ({"temperature": "hot"}, "temperature='hot' must be a number"),
    ({"num_mini_batches": 0}, "num_mini_batches=0 must be at least 1"),
    ({"num_ppo_epochs": 1.5}, "num_ppo_epochs=1.5 must be an integer"),
    ({"min_p": 1.0}, "min_p=1.0 must be below 1"),
    ({"kl_estimator": "k4"}, "kl_estimator='k4' must be one of 'k1', 'k2', 'k3', 'abs' or 'full'"),
    ({"stop_token": "pad"}, "stop_token='pad' must be 'eos' or None"),
    ({"stop_token": None, "missing_eos_penalty": 1.0}, "nothing can end a response"),
    ({"stop_token": None, "non_eos_penalty": True}, 'Set stop_token="eos", or leave non_eos_pen'),
    ({"stop_token_ids": [-1]}, "stop_token_ids=[-1] must be at least 0 (item 0) or None"),
    ({"stop_strings": "end"}, "stop_strings='end' must be a list"),
    ({"min_new_tokens": 9, "response_length": 8}, "min_new_tokens=9 must be at most"),
    ({"non_eos_penalty": True, "missing_eos_penalty": 1.0}, "set one of them"),
    ({"on_reward_error": "score"}, "needs reward_error_score"),
    ({"reward_weights": ["a"]}, "reward_weights=['a'] must be a number, without quotes (item 0)"),
    ({"adaptive_kl": True, "kl_coef": 0.0}, "kl_coef=0 would stay 0"),
    ({"ref_adapter_name": "a", "model_adapter_name": "a"}, "the reference would be the policy"),
    ({"replay_rollouts": "/nowhere"}, "replay_rollouts='/nowhere' is not a folder"),
    ({"replay_rollouts": "/tmp", "max_lag": 1}, "max_lag=1 has no effect"),
    ({"optim": "galore_adamw"}, "optim='galore_adamw' is not supported"),
    ({"optim": "adafacto"}, "; the nearest is 'adafactor'"),
    ({"optim_args": "x"}, "optim_args='x' must be comma-separated name=value pairs"),
    ({"fsdp_config": "x"}, "the name of a JSON file, or JSON; the file does not exist"),
    ({"deepspeed": "x"}, "deepspeed='x' cannot be used"),
    ({"torch_compile_mode": "x"}, "torch_compile_mode='x' must be one of 'default', 'lite'"),
    ({"log_level": "loud"}, "log_level='loud' must be one of 'detail', 'debug'"),
    ({"warmup_steps": math.inf}, "warmup_steps=inf must be a finite number"),
    ({"save_rollouts": "a\0b"}, r"save_rollouts='a\x00b' must be a non-empty string"),
    ({"stop_strings": ["\ud800"]}, "without NUL characters or lone surrogates"),
    ({"total_episodes": 10**5000}, "total_episodes=a number of about 5001 digits must be"),
    ({"load_best_model_at_end": True}, "load_best_model_at_end"),
]
if "greedy" in list(SchedulerType):  # not in early releases of transformers 5
    BAD += [({"lr_scheduler_type": "greedy"}, "lr_scheduler_type='greedy' is not supported")]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[format_value(o)[:60] for o, _ in BAD])
def test_a_bad_value_is_one_clear_error(tmp_path, options, message):
    with pytest.raises(ConfigError) as error:
        PPOConfig(**{"output_dir": str(tmp_path / "out"), **options})
    assert message in str(error.value)
