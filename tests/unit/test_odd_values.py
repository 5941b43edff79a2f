"""Every field of every config against odd values: accepted as meaningful, or refused by name."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from kedge import classic
from kedge.cli.arguments import ModelArguments, ScriptArguments
from kedge.cli.train.reward import RewardArguments
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.base import foreign
from kedge.config.declare import Alias, NoEffect, status
from kedge.config.grpo import GRPOConfig
from kedge.config.ppo import PPOConfig, PPOv2Config
from kedge.config.rloo import RLOOConfig
from kedge.config.rollout_engines import assume_all_packages
from kedge.errors import ConfigError, KedgeError
from tests.e2e.small import small


class Thing:
    def __repr__(self) -> str:
        raise RuntimeError("no representation")


VALUES: dict[str, Callable[[], Any]] = {
    **{str(x): lambda x=x: x for x in (math.nan, math.inf, -math.inf, -1, -0.5, 0, 0.5, 3, 1e308)},
    **{str(x): lambda x=x: x for x in (2**64, 2.5, True, False, None)},
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,  # Python refuses to print it
    **{repr(x): lambda x=x: x for x in ("3", "false", "", "x", "\ud800", "a\0b", b"x")},
    "long": lambda: "x" * 5000,  # longer than a file name may be
    **{repr(x): lambda x=x: list(x) for x in ([], [1], ["x"], ["\ud800"], [math.nan])},
    "tuple": lambda: (1, 2, 3),
    **{repr(x): lambda x=x: dict(x) for x in ({}, {"a": 1}, {1: 2})},
    "set": lambda: {1},
    "thing": Thing,
    "function": lambda: len,
    "class": lambda: int,
}

# Fields in which a number below 0, or an infinite one, means something.
SIGNED = {
    *("max_steps", "local_rank", "save_freq"),
    *(
        "penalty_reward_value",
        "reward_error_score",
        "env_error_score",
        "eval_success_score",
        "reward_weights",
    ),
    *("reward_model_multiplier", "verification_reward", "r1_style_format_reward"),
}
UNBOUNDED = {
    *("cliprange", "cliprange_value", "cliprange_high", "epsilon", "epsilon_high"),
    *("max_grad_norm", "sampler_correction_high", "score_clip"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    *("target_kl", "ratio_threshold"),
}
# What Python may give in addition to what the annotation says.
BESIDE: dict[str, Any] = {
    "fsdp": bool | list[str],
    "resume_from_checkpoint": bool,
    "max_grad_norm": type(None),
    "min_p": type(None),
    "debug": type(None),
    "scale_rewards": bool,
    "reward_clip_range": float,
}
MAY_BE_EMPTY = ("fsdp", "debug")  # whose default is or was the empty text

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "ppo": (PPOv2Config, {"output_dir": "out"}),
    "rloo": (RLOOConfig, {"output_dir": "out", "kl_coef": 0.05}),
    "rloo-newer": (RLOOConfig, {"output_dir": "out", "beta": 0.05}),
    "grpo": (GRPOConfig, {"output_dir": "out"}),
    "async": (AsyncPPOConfig, {"output_dir": "out"}),
    "script": (ScriptArguments, {}),
    "model": (ModelArguments, {}),
    "reward": (RewardArguments, {}),
    "classic": (classic.PPOConfig, {"exp_name": "x"}),
}


def meaningful(hint: Any, value: Any, name: str) -> bool:
    """Whether a field of this type can mean something by the value."""
    args, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in args)
    if origin in (list, dict) or hint in (list, dict):
        if not isinstance(value, list | tuple if (origin or hint) is list else dict):
            return False
        inner = args[0] if args else Any
        return inner is Any or all(meaningful(inner, each, name) for each in value)
    if args:
        return any(meaningful(a, value, name) for a in args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in [member.value for member in hint]
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        allowed = type(value) in kinds and (value >= 0 or name in SIGNED) and value > -math.inf
        return allowed and (abs(value) <= 2**64 or (value == math.inf and name in UNBOUNDED))
    if hint is str:
        writable = isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)
        return writable and (value != "" or name in MAY_BE_EMPTY)
    return type(value) is hint


def cases(cls: type) -> Iterator[tuple[Field[Any], str, Any]]:
    for field in fields(cls):
        for shown, make in VALUES.items():
            if field.init:
                yield field, shown, make()


def other_names(cls: type) -> Iterator[tuple[Field[Any], str, Any]]:
    """Aliases, each as the field that it stands for under its own name."""
    targets = {f.name: f for f in fields(cls)}
    for name, alias in foreign(cls).items():
        if isinstance(alias, Alias) and alias.convert is None:
            field = copy.copy(targets[alias.target])
            field.name = name
            yield from ((field, shown, make()) for shown, make in VALUES.items())


def judged(cls: type, base: dict[str, Any], field: Field[Any], hint: Any, value: Any) -> str | None:
    """What is wrong with how the config takes the value."""
    try:
        cls(**base | {field.name: value})
    except KedgeError as error:
        return _unclear(str(error), cls, field.name, value)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    if hasattr(cls, "INHERITED") and isinstance(status(cls, field.name), NoEffect):
        return None  # without effect, and a warning says so
    beside = BESIDE.get(field.name, Literal["no such"])
    if not (meaningful(hint, value, field.name) or meaningful(beside, value, field.name)):
        return "is accepted"
    return None


def _unclear(message: str, cls: type, name: str, value: Any) -> str | None:
    target = getattr(foreign(cls).get(name), "target", name)
    if not re.search(rf"(?<!\w)({name}|{target})=", message):
        return f"is refused without its name: {message}"
    secret = name in ("hub_token", "push_to_hub_token")
    if isinstance(value, Thing) or secret or (isinstance(value, int) and value >= 2**64):
        return None
    forms = (value, [*value], [*map(float, value)]) if isinstance(value, tuple) else (value,)
    if "\n" in message or not any(repr(each)[:60] in message for each in forms):
        return f"is refused without its value: {message}"
    return None


@pytest.mark.filterwarnings("ignore:.* is deprecated")
@pytest.mark.parametrize("name", CONFIGS)
def test_each_odd_value_is_meaningful_or_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cls, base = CONFIGS[name]
    hints = get_type_hints(cls)
    wrong = []
    with assume_all_packages():  # options of Ray and vLLM are judged without them
        for field, shown, value in (*cases(cls), *other_names(cls)):
            target = getattr(foreign(cls).get(field.name), "target", field.name)
            hint = hints[target] if target == field.name else hints[target] | None
            what = judged(cls, base, field, hint, value)
            if what is not None:
                wrong.append(f"{field.name}={shown} {what}")
    assert not wrong, "\n".join(wrong)


def test_values_of_other_types_that_mean_the_same_are_converted(tmp_path: Path) -> None:
    import numpy as np

    made = PPOConfig(
        output_dir=tmp_path,
        total_episodes=1e4,
        seed=np.int64(3),
        learning_rate=np.float32(0.5),
        stop_token_ids=(1, 2),
        kl_coef=2**64,
    )
    assert (made.output_dir, made.stop_token_ids) == (str(tmp_path), [1, 2])
    numbers = (made.total_episodes, made.seed, made.learning_rate, made.kl_coef)
    assert numbers == (10_000, 3, 0.5, 2**64)
    assert [type(x) for x in numbers] == [int, int, float, float]


def test_a_field_keeps_its_range_where_a_subclass_changes_its_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature=0 must be at least 0\.000001"):
        RLOOConfig(output_dir=str(tmp_path), temperature=0)


def test_runs_of_no_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps=0 must be at least 1, or -1 for no limit"):
        small(output_dir=str(tmp_path), total_episodes=None, max_steps=0)


def test_tokens_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hub_token=<list> must be a string") as error:
        PPOConfig(output_dir=str(tmp_path), hub_token=["hf_secret"])
    assert "hf_secret" not in str(error.value)
