"""Client of a vLLM server over HTTP: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx

from kedge.backends.vllm.service import (
    GenerationRequest,
    GenerationResult,
    allowed_tokens,
    check_version,
    parse_version,
)
from kedge.backends.vllm.weight_payload import WeightPayload, shared_memory
from kedge.errors import ConfigError, RolloutError, SyncError


class LostServerError(RolloutError):
    """The server stopped responding; results received before are in ``answers``, else None."""

    def __init__(self, message: str, answers: Sequence[GenerationResult | None] = ()) -> None:
        super().__init__(message)
        self.answers = answers


class Remote:
    """Client of a running vLLM server.

    The server must be started with ``VLLM_SERVER_DEV_MODE=1`` in its environment (endpoints that
    load weights), ``--enable-scale-out`` (tokens in and out) and
    ``--logprobs-mode processed_logprobs``.

    Args:
        url: of the server, e.g. ``http://host:8000``.
        uds: Unix socket that the server listens on, instead of the address in ``url``.
        folder: parent of the folder for sending weights, which the server must see at the same
            path; None: this machine's shared memory, or its temporary folder.
        heartbeat: seconds between health checks while the server generates.
        patience: seconds without a response after which the server counts as lost.
        slow: seconds that loading weights may take.
    """

    def __init__(
        self,
        url: str,
        *,
        uds: str | None = None,
        folder: str | None = None,
        heartbeat: float = 5.0,
        patience: float = 60.0,
        slow: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._uds = uds
        self._heartbeat, self._patience, self._slow = heartbeat, patience, slow
        self._folder = Path(
            tempfile.mkdtemp(prefix="kedge-weights-", dir=folder or shared_memory())
        )
        # Also without close(): shared memory outlives the process.
        self._clean = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._loads = 0
        self._adapter: str | None = None  # name of the newest one in vLLM
        transport = httpx.HTTPTransport(uds=uds)
        self._client = httpx.Client(base_url=self.url, transport=transport, timeout=patience)

    # -- Service ---------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One result per request, in order.

        Raises:
            LostServerError: the server died or hangs; has the results received before.
            RolloutError: the server rejects the request.
        """
        results: list[GenerationResult | None] = [None] * len(requests)

        async def request(client: httpx.AsyncClient, i: int) -> None:
            body = self._body(requests[i].prompt, requests[i].params)
            response = await client.post("/inference/v1/generate", json=body)
            results[i] = _result(_json(response)["choices"][0])

        try:
            asyncio.run(self._watched(lambda c: [request(c, i) for i in range(len(requests))]))
        except LostServerError as error:
            error.answers = results
            raise
        return [result for result in results if result is not None]

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability (nats) of each token of each row but its first."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        scores = []
        for row in rows:
            body = self._body(row, params)
            tokens = self._post("/inference/v1/generate", json=body)["prompt_logprobs"]
            pairs = zip(tokens[1:], row[1:], strict=True)
            scores.append([logprobs[str(t)]["logprob"] for logprobs, t in pairs])
        return scores

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights or the adapter, and reset the prefix cache.

        Raises:
            SyncError: vLLM rejected them.
        """
        self._loads += 1
        payload.write(self._folder / str(self._loads))
        previous, self._adapter = self._adapter, None
        if payload.adapter is not None:
            self._adapter = f"kedge-{self._loads}"
        self.reload(version)
        if previous is not None:
            self._post("/v1/unload_lora_adapter", json={"lora_name": previous})
        shutil.rmtree(self._folder / str(self._loads - 1), ignore_errors=True)

    def reload(self, version: int) -> None:
        """Load the last written weights again, for example after a restart.

        Raises:
            SyncError: vLLM rejected them.
        """
        folder = str(self._folder / str(self._loads))
        path = "/collective_rpc"
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if self._adapter is not None:
            path, body = "/v1/load_lora_adapter", {"lora_name": self._adapter, "lora_path": folder}
        try:
            with self._paused():
                self._post(path, json=body, timeout=self._slow)
                if not self._post("/reset_prefix_cache")["success"]:
                    raise SyncError("vLLM did not reset its prefix cache: requests are running")
                self.name_version(version)
        except LostServerError:
            raise
        except RolloutError as error:
            raise SyncError(f"vLLM rejected the weights of version {version}: {error}") from error

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Context in which the server is paused: running requests finish first, new ones wait."""
        self._post("/pause?mode=wait", timeout=self._slow)
        try:
            yield
        except LostServerError:
            raise  # the server cannot be resumed
        except BaseException:
            self._post("/resume")
            raise
        self._post("/resume")

    def version(self) -> int:
        """Version of the weights that vLLM reports."""
        return parse_version(self._get("/weight_info")["weight_version"])

    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return int(self._get("/v1/models")["data"][0]["max_model_len"])

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory."""
        self._post("/sleep?level=1")

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate a part of the GPU memory again."""
        self._post(f"/wake_up?tags={part}")

    def close(self) -> None:
        """Close connections and delete the folder of weights; the server keeps running."""
        self._client.close()
        self._clean()

    def name_version(self, version: int) -> None:
        """Set the version of the weights in vLLM."""
        self._post("/update_weight_version", json={"new_version": str(version)})

    # -- state of the server ---------------------------------------------------------------------

    def healthy(self) -> bool:
        """Whether the server responds."""
        if self._uds is not None and not _has_listener(self._uds):
            return False
        try:
            return self._client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def check(self, *, tied: bool, precision: str, adapter: bool = False) -> None:
        """Check that the server was started such that it samples from the policy.

        Args:
            tied: whether the policy's output head and embedding are one weight.
            adapter: whether a LoRA adapter is trained and sent.
            precision: of the learner, e.g. "float32".

        Raises:
            ConfigError: naming the missing flags.
        """
        if not self.healthy():
            raise ConfigError(f"no vLLM server responds at {self.url}; start one, or check the URL")
        try:
            check_version(self._get("/version")["version"], f"the vLLM server at {self.url}")
            missing = self._missing(tied=tied, precision=precision, adapter=adapter)
        except httpx.TransportError as error:
            raise ConfigError(
                f"the vLLM server at {self.url} did not report its configuration: {error!r}"
            ) from error
        if missing:
            raise ConfigError(
                f"the vLLM server at {self.url} must be started with {' '.join(missing)};"
                " otherwise it would not sample from the policy"
            )

    def _missing(self, *, tied: bool, precision: str, adapter: bool) -> list[str]:
        """Required flags that the server was not started with."""
        missing = []
        info = self._client.get(
            "/server_info", params={"config_format": "json"}, timeout=self._slow
        )
        if info.status_code == 404:
            raise ConfigError(
                f"the vLLM server at {self.url} cannot load new weights; start it with"
                " VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        model = _json(info)["vllm_config"]["model_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            missing.append("--logprobs-mode processed_logprobs")
        if precision not in str(model["dtype"]):
            missing.append(f"--dtype {precision}")
        hf_config = model.get("hf_config") or {}
        if tied and (not isinstance(hf_config, dict) or hf_config.get("tie_word_embeddings", True)):
            missing.append("""--hf-overrides '{"tie_word_embeddings": false}'""")

        def unknown(path: str) -> bool:
            return self._client.post(path, json={}, timeout=self._slow).status_code == 404

        if adapter and unknown("/v1/load_lora_adapter"):
            missing.append("--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
        if unknown("/inference/v1/generate"):
            missing.append("--enable-scale-out")
        return missing

    # -- HTTP ------------------------------------------------------------------------------------

    def _body(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        model = {} if self._adapter is None else {"model": self._adapter}
        return {"token_ids": prompt, "sampling_params": params} | model

    async def _watched(self, work: Any) -> None:
        """Run the coroutines of ``work(client)``; fail if the server misses health checks."""
        transport = httpx.AsyncHTTPTransport(
            uds=self._uds, limits=httpx.Limits(max_connections=None)
        )
        client = httpx.AsyncClient(base_url=self.url, transport=transport, timeout=None)
        async with client:
            heartbeat = asyncio.create_task(self._check_health(client))
            jobs: list[asyncio.Task[None]] = [asyncio.create_task(job) for job in work(client)]
            try:
                await _first_error([heartbeat], jobs)
            except httpx.TransportError as error:
                raise LostServerError(
                    f"the vLLM server at {self.url} is gone: {error!r}"
                ) from error
            finally:
                for task in (heartbeat, *jobs):
                    task.cancel()
                await asyncio.gather(heartbeat, *jobs, return_exceptions=True)

    async def _check_health(self, client: httpx.AsyncClient) -> None:
        """Poll the server's engine loop; raises once it does not respond in time."""
        while True:
            await asyncio.sleep(self._heartbeat)
            try:
                _json(await client.get("/weight_info", timeout=self._patience))
            except httpx.TimeoutException:
                raise LostServerError(
                    f"the vLLM server at {self.url} did not respond for {self._patience:g} s"
                    " (worker_timeout)"
                ) from None

    def _get(self, path: str) -> Any:
        return self._request(lambda: self._client.get(path))

    def _post(self, path: str, **kwargs: Any) -> Any:
        return self._request(lambda: self._client.post(path, **kwargs))

    def _request(self, send: Any) -> Any:
        try:
            return _json(send())
        except httpx.TransportError as error:
            raise LostServerError(f"the vLLM server at {self.url} is gone: {error!r}") from error


async def _first_error(watchers: list[asyncio.Task[None]], jobs: list[asyncio.Task[None]]) -> None:
    """Wait for all jobs; raises the first error of a job or a watcher."""
    waiting = set(jobs)
    while waiting:
        done, _ = await asyncio.wait(waiting | set(watchers), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        waiting -= done


def _json(response: httpx.Response) -> Any:
    """The body of a successful response.

    Raises:
        LostServerError: status 500 or above.
        RolloutError: status 400 to 499.
    """
    path, text = response.request.url.path, response.text[:500]
    if response.status_code >= 500:
        raise LostServerError(f"the vLLM server failed at {path}: {text}")
    if response.status_code >= 400:
        raise RolloutError(f"the vLLM server rejected {path}: {text}")
    with contextlib.suppress(ValueError):
        return response.json()
    return None


def _result(choice: dict[str, Any]) -> GenerationResult:
    versions = [parse_version(span["version"]) for span in choice["weight_versions"] or ()]
    content = choice["logprobs"]["content"]
    # The first of ``top_logprobs`` is the sampled token, whether or not it is among the others.
    tops = [[(x["token_id"], x["logprob"]) for x in at["top_logprobs"]] for at in content]
    return GenerationResult(
        tokens=choice["token_ids"],
        logprobs=[at["logprob"] for at in content],
        allowed=[allowed_tokens(top) for top in tops] if max(map(len, tops)) > 1 else None,
        stopped=choice["finish_reason"] == "stop",
        version=min(versions, default=-1),
    )


def _has_listener(path: str) -> bool:
    """Whether a process listens on a Unix socket; httpx leaks a socket if none does."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
