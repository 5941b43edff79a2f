"""Builds rollout engines of vLLM; options are named as in the config."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kedge.config.rollout_engines import engine_args
from kedge.ext.vllm.engine import Service, VLLMEngine
from kedge.ext.vllm.inprocess import InProcess
from kedge.ext.vllm.policy_template import PolicyTemplate, weights_dtype
from kedge.ext.vllm.server import Server
from kedge.ext.vllm.weights import WeightFiles
from kedge.models.fingerprint import policy_weights
from kedge.records.errors import ConfigError
from kedge.records.protocols import RolloutEngine
from kedge.records.types import Sampling
from kedge.rollout.embedded.engine import check_prompts
from kedge.rollout.engines import EngineInputs, ShardedEngine, start_all
from kedge.rollout.liveness import WorkerLimits

if TYPE_CHECKING:
    from kedge.config.base import OnPolicyConfig

# Head sizes that vLLM 0.32 supports on CPUs; others crash the engine at its first token.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_local(model: Any, sampling: Sampling, args: OnPolicyConfig) -> None:
    """Check a vLLM that Kedge starts, before any weights are loaded; ``model`` may be a name."""
    if torch.cuda.is_available():
        return
    if isinstance(model, nn.Module):
        config: Any = model.config
    else:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model {model!r} cannot be loaded: {error}") from error
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"the policy has attention heads of size {size}, but vLLM on CPUs supports only"
            f" {', '.join(map(str, CPU_HEAD_SIZES))}; use rollout_engine='embedded'"
        )
    if args.vllm_transfer == "nccl":
        raise ConfigError(
            "vllm_transfer='nccl' needs a GPU, and this machine has none; set it to 'auto'"
        )
    if args.vllm_sleep:
        raise ConfigError("vllm_sleep=True needs a GPU: vLLM on CPUs cannot sleep; leave it out")


def check_remote(model: Any, sampling: Sampling, args: OnPolicyConfig) -> None:
    """Check a running server at the address ``args.rollout_engine``; see ``check_local``."""
    if sampling.min_new_tokens:
        raise ConfigError(
            f"min_new_tokens={sampling.min_new_tokens} is not supported with the server at"
            f" {args.rollout_engine}: vLLM would ban its model's EOS token even if it is not a stop"
            " token; set it to 0, or use rollout_engine='vllm_server'"
        )


def build_template(
    inputs: EngineInputs, args: OnPolicyConfig
) -> tuple[PolicyTemplate, dict[str, Any]]:
    """The policy without its weights, and vLLM's engine arguments."""
    dtype = str(inputs.dtype or weights_dtype(inputs.policy)).removeprefix("torch.")
    arguments: dict[str, Any] = {"dtype": dtype}
    if args.vllm_sleep:
        arguments["enable_sleep_mode"] = True
    if args.in_flight_weight_updates:
        # Otherwise a token in flight would count as sampled with the next weights.
        arguments["async_scheduling"] = False
    arguments |= engine_args(
        args.vllm_engine_args, tensor_parallel_size=args.vllm_tensor_parallel_size
    )
    return PolicyTemplate.of(inputs.policy, inputs.tokenizer, dtype=arguments["dtype"]), arguments


def _build_engines(
    inputs: EngineInputs,
    args: OnPolicyConfig,
    template: PolicyTemplate,
    starters: Sequence[Callable[[], Service]],
) -> VLLMEngine | ShardedEngine:
    """One vLLM engine, or several that share the rows of a batch; ``starters`` start one each."""

    def make(start: Callable[[], Service]) -> VLLMEngine:
        return VLLMEngine(
            start(),
            template,
            pad_id=inputs.pad_id,
            tolerance=args.vllm_tolerance,
            extra_column=inputs.extra_column,
            sleeps=args.vllm_sleep,
        )

    if len(starters) == 1:
        return make(starters[0])
    engines = start_all([partial(make, start) for start in starters])
    check = partial(check_prompts, config=inputs.policy.config)
    return ShardedEngine(engines, pad_id=inputs.pad_id, check=check)


def build_in_process(inputs: EngineInputs, args: OnPolicyConfig) -> RolloutEngine:
    """A vLLM in this process."""
    template, arguments = build_template(inputs, args)
    start = partial(InProcess, template, policy_weights(inputs.policy), arguments)
    return _build_engines(inputs, args, template, [start])


def build_servers(inputs: EngineInputs, args: OnPolicyConfig) -> RolloutEngine:
    """One vLLM server or several, each in its own process."""
    template, arguments = build_template(inputs, args)
    gpus = gpus_of_servers(args.vllm_num_engines, int(arguments.get("tensor_parallel_size", 1)))
    start = partial(
        Server.start,
        template,
        policy_weights(inputs.policy),
        arguments,
        python=args.vllm_python,
        files=WeightFiles(len(gpus), args.weight_sync_folder),
        limits=WorkerLimits.of(args),
    )
    return _build_engines(inputs, args, template, [partial(start, devices=d) for d in gpus])


def build_remote(inputs: EngineInputs, args: OnPolicyConfig) -> RolloutEngine:
    """A running vLLM server at ``args.rollout_engine``, with the policy's weights."""
    template, arguments = build_template(inputs, args)
    files, limits = WeightFiles(parent=args.weight_sync_folder), WorkerLimits.of(args)
    server = Server(args.rollout_engine, files=files, limits=limits)
    adapter = template.adapter is not None
    try:
        tied = template.tied is not None and not adapter
        server.check(tied=tied, precision=str(arguments["dtype"]), adapter=adapter)
        server.load(template.payload(policy_weights(inputs.policy)), 0)
    except BaseException:
        server.close()
        raise
    return _build_engines(inputs, args, template, [lambda: server])


def gpus_of_servers(count: int, each: int) -> list[str | None]:
    """The GPUs of each server, as in ``CUDA_VISIBLE_DEVICES``, apart from those of the learners.

    ``count`` servers have ``each`` GPUs.  None if there are no GPUs, or a single server has to
    share the learners'.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = torch.cuda.device_count()
    names = visible.split(",")[:number] if visible else [str(i) for i in range(number)]
    learners = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    needed = count * each
    if len(gpus := names[learners:]) >= needed:
        return [",".join(gpus[i * each : (i + 1) * each]) for i in range(count)]
    if names and count > 1:
        raise ConfigError(
            f"{count} servers of {each} GPUs (vllm_num_engines) and {learners} learners"
            f" need {needed + learners} GPUs, got {len(names)}; use fewer servers, or"
            " rollout_engine='ray' with more machines"
        )
    return [None] * count


def engine_of_model(model: nn.Module, *, pad_id: int) -> VLLMEngine:
    """An engine in this process that samples from a loaded model."""
    spec = PolicyTemplate.of(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return VLLMEngine(InProcess(spec, weights), spec, pad_id=pad_id)
