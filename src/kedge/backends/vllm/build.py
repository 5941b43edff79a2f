"""From options to an engine."""

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
from kedge.backends.vllm.policy_spec import PolicySpec
from kedge.backends.vllm.remote import Remote
from kedge.backends.vllm.server import Server
from kedge.backends.vllm.service import Service
from kedge.config.rollout import RolloutOptions
from kedge.errors import ConfigError
from kedge.types import Sampling

# Of vLLM 0.32's attention on CPUs; other sizes end the engine at its first token.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_vllm(options: RolloutOptions, sampling: Sampling, *, model: Any) -> None:
    """Refuse what cannot work, before any weight is loaded.

    Args:
        options: the engine.
        sampling: the distribution that it shall sample from.
        model: the policy, or the folder or name that it will be loaded from.

    Raises:
        ConfigError: naming the option, its value and the way out.
    """
    if sampling.truncates:
        raise ConfigError(
            f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p} cut the"
            " distribution, and vLLM does not say which tokens were left; sample from all of them,"
            " or use rollout_engine='embedded'"
        )
    if options.kind == "url" and sampling.min_new_tokens:
        raise ConfigError(
            f"min_new_tokens={sampling.min_new_tokens} with the server at {options.url}: vLLM bans"
            " its model's own end-of-text token then, even where it is no stop token; set it to 0,"
            " or use rollout_engine='vllm_server'"
        )
    if options.kind != "url" and not torch.cuda.is_available():
        check_head_size(model.config if isinstance(model, nn.Module) else _config_of(model))
    if options.transfer == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "vllm_transfer='nccl' sends weights from GPU to GPU, and there is none here; set it to"
            " 'auto'"
        )
    if options.sleep and not torch.cuda.is_available():
        raise ConfigError("vllm_sleep=True needs a GPU: vLLM on CPUs cannot sleep; leave it out")


def check_head_size(config: Any) -> None:
    """Refuse a model that vLLM cannot run on a CPU.

    Raises:
        ConfigError: with its head size.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"the policy has attention heads of size {size}; vLLM on CPUs runs"
            f" {', '.join(map(str, CPU_HEAD_SIZES))}: use rollout_engine='embedded'"
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
    """An engine that samples from a copy of the policy, or several that share the rows.

    Args:
        policy: a transformers causal language model, as it is now.
        options: which engine, and its arguments.
        pad_id: fills ``Rollout.ids`` after the end of a response.
        tokenizer: needed for stop strings only.
        dtype: what the learner computes in; None is float32.
        extra_slot: leave one slot after the longest response.
        share: these are the engines of this process; others have theirs.
        starts: from (blueprint, weights, engine arguments) to what starts each vLLM; None: as the
            options say.
        on_close: called after several engines were closed.

    Raises:
        ConfigError: vLLM refuses the model or the arguments.
    """
    blueprint = PolicySpec.of(policy, tokenizer)
    name = str(dtype or torch.float32).removeprefix("torch.")
    arguments: dict[str, Any] = {
        "dtype": name,
        **({"enable_sleep_mode": True} if options.sleep else {}),
    }
    arguments |= options.engine_args
    low = str(arguments["dtype"]).removeprefix("torch.") != "float32"
    default = LOW_PRECISION if low else FULL_PRECISION
    weights = policy_weights(policy)

    def make(start: Start) -> VLLMEngine:
        return VLLMEngine(
            start(),
            blueprint,
            pad_id=pad_id,
            tolerance=default if options.tolerance is None else options.tolerance,
            extra_slot=extra_slot,
            sleeps=options.sleep,
        )

    if starts is None:
        each = int(arguments.get("tensor_parallel_size", 1))
        gpus = (
            gpus_of_servers(options.num_engines, each, share=share)
            if options.kind == "vllm_server"
            else [None]
        )
        found: Sequence[Start] = [
            partial(_service, blueprint, weights, options, arguments, devices) for devices in gpus
        ]
        if len(found) == 1:
            return make(found[0])
    else:
        found = starts(blueprint, weights, arguments)
    engines = start_all([partial(make, start) for start in found], undo=on_close)
    config: Any = policy.config
    return ShardedEngine(
        engines,
        pad_id=pad_id,
        check=partial(check_prompts, config=config),
        on_close=on_close,
    )


def _service(
    blueprint: PolicySpec,
    weights: Mapping[str, Tensor],
    options: RolloutOptions,
    arguments: Mapping[str, Any],
    devices: str | None,
) -> Service:
    if options.kind == "vllm":
        return InProcess(blueprint, weights, arguments)
    if options.kind == "vllm_server":
        return Server(
            blueprint,
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
            tied=blueprint.tied is not None and blueprint.adapter is None,
            precision=str(arguments["dtype"]),
            adapter=blueprint.adapter is not None,
        )
        remote.load(blueprint.parcel(weights), 0)
    except BaseException:
        remote.close()
        raise
    return remote


def gpus_of_servers(count: int, each: int, *, share: bool = False) -> list[str | None]:
    """The GPUs of every server, as in ``CUDA_VISIBLE_DEVICES``: those that no learner has.

    None where there are no GPUs, or one server has to share the learners' own.

    Args:
        count: servers.
        each: GPUs of one.
        share: every learner on this machine has as many.

    Raises:
        ConfigError: several servers, and too few GPUs besides those of the learners.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = torch.cuda.device_count()
    names = visible.split(",")[:number] if visible else [str(i) for i in range(number)]
    learners = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    before = int(os.environ.get("LOCAL_RANK", "0")) if share else 0
    asked = count * each * (learners if share else 1)
    if len(free := names[learners:]) >= asked:
        mine = free[before * count * each :]
        return [",".join(mine[i * each : (i + 1) * each]) for i in range(count)]
    if names and (count > 1 or share):
        raise ConfigError(
            f"{asked // each} servers of {each} GPUs (vllm_num_engines) and {learners} learners"
            f" need {asked + learners}, and there are {len(names)}; ask for fewer, or use"
            " rollout_engine='ray' with more machines"
        )
    return [None] * count
