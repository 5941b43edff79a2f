"""Builds the vLLM rollout engine from its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kedge.backends.hf.fingerprint import policy_weights
from kedge.backends.hf.rollout import check_prompts
from kedge.backends.rollout import ShardedEngine, start_all
from kedge.backends.vllm.engine import FULL_PRECISION, LOW_PRECISION, VLLMEngine
from kedge.backends.vllm.inprocess import InProcess
from kedge.backends.vllm.policy_spec import PolicySpec, weights_dtype
from kedge.backends.vllm.remote import Remote
from kedge.backends.vllm.server import Server
from kedge.backends.vllm.service import Service
from kedge.config.rollout import RolloutOptions
from kedge.errors import ConfigError
from kedge.types import Sampling

# Supported by vLLM 0.32's attention on CPUs; other sizes crash the engine at its first token.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_vllm(options: RolloutOptions, sampling: Sampling, *, model: Any) -> None:
    """Check options and sampling before any weights are loaded.

    Args:
        options: of the rollout engine.
        sampling: the sampling distribution.
        model: the policy, or the folder or Hub name to load it from.

    Raises:
        ConfigError: naming the option, its value and what to set.
    """
    if options.kind == "url" and sampling.min_new_tokens:
        raise ConfigError(
            f"min_new_tokens={sampling.min_new_tokens} is not supported with the server at"
            f" {options.url}: vLLM would ban its model's EOS token even if it is not a stop token;"
            " set it to 0, or use rollout_engine='vllm_server'"
        )
    if options.kind != "url" and not torch.cuda.is_available():
        check_head_size(model.config if isinstance(model, nn.Module) else _config_of(model))
    if options.transfer == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "vllm_transfer='nccl' needs a GPU, and this machine has none; set it to 'auto'"
        )
    if options.sleep and not torch.cuda.is_available():
        raise ConfigError("vllm_sleep=True needs a GPU: vLLM on CPUs cannot sleep; leave it out")


def check_head_size(config: Any) -> None:
    """Check that vLLM can run the model on a CPU.

    Raises:
        ConfigError: unsupported size of attention heads.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"the policy has attention heads of size {size}, but vLLM on CPUs supports only"
            f" {', '.join(map(str, CPU_HEAD_SIZES))}; use rollout_engine='embedded'"
        )


def _config_of(name: Any) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {name!r} cannot be loaded: {error}") from error


Start = Callable[[], Service]
Starts = Callable[[PolicySpec, Mapping[str, Tensor], Mapping[str, Any]], Sequence[Start]]


def vllm_engine(
    policy: nn.Module,
    options: RolloutOptions,
    *,
    pad_id: int,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    extra_slot: bool = False,
    share: bool = False,
    starts: Starts | None = None,
    on_close: Callable[[], None] | None = None,
) -> VLLMEngine | ShardedEngine:
    """One vLLM engine with a copy of the policy, or several that share the rows of a batch.

    Args:
        policy: a transformers causal language model with its current weights.
        options: of the rollout engine.
        pad_id: token id that fills ``Rollout.ids`` after the end of a response.
        tokenizer: only needed for stop strings.
        dtype: precision of the learner; None is float32.
        extra_slot: leave one slot after the longest response.
        share: every rank has its engines, rather than all ranks together.
        starts: maps (policy spec, weights, engine arguments) to one function per vLLM that starts
            it; None: as set in ``options``.
        on_close: called after all engines are closed.

    Raises:
        ConfigError: vLLM rejects the model or the arguments.
    """
    arguments: dict[str, Any] = {
        "dtype": str(dtype or weights_dtype(policy)).removeprefix("torch."),
        **({"enable_sleep_mode": True} if options.sleep else {}),
    }
    arguments |= options.engine_args
    spec = PolicySpec.of(policy, tokenizer, dtype=arguments["dtype"])
    low = str(arguments["dtype"]).removeprefix("torch.") != "float32"
    default = LOW_PRECISION if low else FULL_PRECISION
    weights = policy_weights(policy)

    def make(start: Start) -> VLLMEngine:
        return VLLMEngine(
            start(),
            spec,
            pad_id=pad_id,
            tolerance=default if options.tolerance is None else options.tolerance,
            extra_slot=extra_slot,
            sleeps=options.sleep,
        )

    if starts is None:
        per_server = int(arguments.get("tensor_parallel_size", 1))
        gpus = (
            gpus_of_servers(options.num_engines, per_server, share=share)
            if options.kind == "vllm_server"
            else [None]
        )
        service_starts: Sequence[Start] = [
            partial(_service, spec, weights, options, arguments, devices) for devices in gpus
        ]
        if len(service_starts) == 1:
            return make(service_starts[0])
    else:
        service_starts = starts(spec, weights, arguments)
    engines = start_all([partial(make, start) for start in service_starts], undo=on_close)
    config: Any = policy.config
    return ShardedEngine(
        engines,
        pad_id=pad_id,
        check=partial(check_prompts, config=config),
        on_close=on_close,
    )


def _service(
    spec: PolicySpec,
    weights: Mapping[str, Tensor],
    options: RolloutOptions,
    arguments: Mapping[str, Any],
    devices: str | None,
) -> Service:
    if options.kind == "vllm":
        return InProcess(spec, weights, arguments)
    if options.kind == "vllm_server":
        return Server(
            spec,
            weights,
            arguments,
            python=options.python,
            folder=options.sync_folder,
            start_timeout=options.start_timeout,
            heartbeat=options.heartbeat,
            patience=options.patience,
            devices=devices,
        )
    remote = Remote(
        options.url,
        folder=options.sync_folder,
        heartbeat=options.heartbeat,
        patience=options.patience,
        slow=options.start_timeout,
    )
    try:
        remote.check(
            tied=spec.tied is not None and spec.adapter is None,
            precision=str(arguments["dtype"]),
            adapter=spec.adapter is not None,
        )
        remote.load(spec.payload(weights), 0)
    except BaseException:
        remote.close()
        raise
    return remote


def gpus_of_servers(count: int, each: int, *, share: bool = False) -> list[str | None]:
    """The GPUs of each server, as in ``CUDA_VISIBLE_DEVICES``, apart from those of the learners.

    None if there are no GPUs, or a single server has to share the learners' GPUs.

    Args:
        count: number of servers.
        each: GPUs per server.
        share: every learner on this machine has ``count`` servers.

    Raises:
        ConfigError: several servers, and too few GPUs besides those of the learners.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = torch.cuda.device_count()
    names = visible.split(",")[:number] if visible else [str(i) for i in range(number)]
    learners = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    before = int(os.environ.get("LOCAL_RANK", "0")) if share else 0
    needed = count * each * (learners if share else 1)
    if len(free := names[learners:]) >= needed:
        gpus = free[before * count * each :]
        return [",".join(gpus[i * each : (i + 1) * each]) for i in range(count)]
    if names and (count > 1 or share):
        raise ConfigError(
            f"{needed // each} servers of {each} GPUs (vllm_num_engines) and {learners} learners"
            f" need {needed + learners} GPUs, got {len(names)}; use fewer servers, or"
            " rollout_engine='ray' with more machines"
        )
    return [None] * count
