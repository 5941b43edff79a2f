"""Client of a vLLM server over HTTP: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import httpx
import numpy as np

from kedge.ext.vllm.service import (
    GenerationRequest,
    GenerationResult,
    allowed_matrix,
    parse_version,
)
from kedge.ext.vllm.weights import WeightFiles, WeightFolder, WeightPayload
from kedge.records.errors import RolloutError, SyncError
from kedge.rollout.liveness import WorkerLimits, reporting_silence

_RESTART = (
    "start it again with the same flags, and resume from the latest checkpoint with"
    " resume_from_checkpoint=True"
)
# Sends a request, and reads its result.
_PLAIN = {"Accept-Encoding": "identity"}  # a small body may unpack to a huge one
Send = Callable[[httpx.AsyncClient], Coroutine[Any, Any, GenerationResult]]
_GENERATE = "/inference/v1/generate"
_SECONDS = 0.1  # seconds that ``serve`` waits for a result
_OVERLOADED = {429, 502, 503}  # statuses to retry, with exponential backoff
_PAUSE = 0.5  # seconds
# A server closes idle connections, vLLM after 5 s, and a request at that moment would be lost.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.M)


class LostServerError(RolloutError):
    """The server stopped responding."""


class _Background:
    """A thread that sends requests to a server and waits for their results."""

    def __init__(self, url: str, uds: str | None) -> None:
        transport = httpx.AsyncHTTPTransport(uds=uds, limits=_LIMITS)
        self._client = httpx.AsyncClient(
            base_url=url, transport=transport, timeout=None, headers=_PLAIN
        )
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()

    def start(self, send: Send) -> Future[GenerationResult]:
        """Start ``send``; returns a future."""
        return asyncio.run_coroutine_threadsafe(send(self._client), self._loop)

    def close(self) -> None:
        """Cancel all requests, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._give_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _give_up(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error in a callback, except a Unix socket that closed during a wait."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


class Remote:
    """Client of a running vLLM server.

    The server must be started with ``VLLM_SERVER_DEV_MODE=1`` in its environment (endpoints that
    load weights), ``--enable-scale-out`` (tokens in and out; not before vLLM 0.32) and
    ``--logprobs-mode processed_logprobs``.

    Args:
        url: URL of the server, e.g. ``http://host:8000``.
        uds: Unix socket that the server listens on, instead of the address in ``url``.
        files: files for sending weights, perhaps shared by several servers; must be visible at
            the same path on the server.
        limits: timeouts; health checks are made while the server generates.
    """

    def __init__(
        self,
        url: str,
        *,
        uds: str | None = None,
        files: WeightFiles | None = None,
        limits: WorkerLimits | None = None,
    ) -> None:
        self.url, self.limits = url.rstrip("/"), limits or WorkerLimits()
        self._uds = uds
        # ``Server`` starts and restarts a server on a Unix socket.
        self._name = "the vLLM server" if uds else f"the vLLM server at {self.url}"
        self._way_out = "" if uds else f"; {_RESTART}"
        self._files = files or WeightFiles()
        self._folder: WeightFolder | None = None  # weights to load after a restart
        self._loads = 0
        self._version = 0  # version of the weights
        self._adapter: str | None = None  # vLLM's name for the newest adapter
        self._idle_since = math.inf  # time of the first look without requests
        transport = httpx.HTTPTransport(uds=uds, limits=_LIMITS)
        self._client = httpx.Client(
            base_url=self.url, transport=transport, timeout=self.limits.patience, headers=_PLAIN
        )
        self._held: dict[int, Future[GenerationResult]] = {}  # requests in flight
        self._heard = 0.0  # time of the last result, or of the first request
        self._background: _Background | None = None  # sends requests

    # -- Service ---------------------------------------------------------------------------------

    @property
    def abilities(self) -> tuple[int, bool]:
        """Number of concurrent requests, and whether ``load`` may be called while some run."""
        info = self._request(self._server_info)
        with _reading("/server_info"):
            slots = int(info["vllm_config"]["scheduler_config"]["max_num_seqs"])
        return slots, self._adapter is None and self._reports_versions

    @functools.cached_property
    def _reports_versions(self) -> bool:
        """Whether the server knows the version of its weights, as vLLM does from 0.32 on."""
        try:
            return self._client.get("/weight_info").status_code != 404
        except httpx.TransportError as error:
            raise self._gone(error) from error

    def serve(self, new: Mapping[int, GenerationRequest]) -> dict[int, GenerationResult]:
        """Add requests by key, and wait briefly; returns results by key."""
        if not self._held:
            self._heard = time.monotonic()
        model = {} if self._adapter is None else {"model": self._adapter}
        # The salt separates prefixes cached under different weights.
        body = {"cache_salt": str(self._version), **model}
        for key, request in new.items():
            self._background = self._background or _Background(self.url, self._uds)
            self._held[key] = self._background.start(partial(self._generate, request, body))
        wait(self._held.values(), timeout=_SECONDS, return_when=FIRST_COMPLETED)
        errors = {key: f.exception() for key, f in self._held.items() if f.done()}
        if results := {k: self._held.pop(k).result() for k, e in errors.items() if e is None}:
            self._heard = time.monotonic()
            return results
        try:
            for error in errors.values():
                if isinstance(error, httpx.TransportError):
                    raise self._gone(error) from error
                if error is not None:
                    raise error
            if self._held and time.monotonic() - self._heard > self.limits.heartbeat:
                self._check_alive()
                self._check_in_flight()
                self._heard = time.monotonic()
        except RolloutError:
            self.cancel()
            raise
        return {}

    @property
    def holds_requests(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._held)

    async def _generate(
        self, request: GenerationRequest, body: dict[str, str], client: httpx.AsyncClient
    ) -> GenerationResult:
        json = {"token_ids": request.prompt, "sampling_params": request.params, **body}
        give_up, pause = time.monotonic() + self.limits.patience, _PAUSE
        while True:
            response = await client.post(_GENERATE, json=json)
            if response.status_code not in _OVERLOADED or time.monotonic() + pause > give_up:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.limits.heartbeat)
        return _result(read_json(response), request, self._version)

    def cancel(self) -> None:
        """Drop all requests; the server stops when their connections close."""
        self._held.clear()
        if self._background is not None:
            self._background.close()
            self._background = None

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights or the adapter, and reset the prefix cache."""
        folder = self._files.store(payload)
        self._loads += 1
        (before, self._folder), previous = (self._folder, folder), self._adapter
        self._adapter = None if payload.adapter is None else f"kedge-{self._loads}"
        self.reload(version)
        if previous is not None:
            self._post("/v1/unload_lora_adapter", json={"lora_name": previous})
        del before  # vLLM may read an adapter's files until it is unloaded

    def reload(self, version: int) -> None:
        """Load the last written weights again, for example after a restart."""
        assert self._folder is not None  # set when weights were loaded
        folder = str(self._folder.path)
        path = "/collective_rpc"
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if self._adapter is not None:
            path, body = "/v1/load_lora_adapter", {"lora_name": self._adapter, "lora_path": folder}
        try:
            with self._paused():
                self._post(path, json=body, timeout=self.limits.start)
                answer = self._post("/reset_prefix_cache")
                with _reading("/reset_prefix_cache"):
                    reset = answer["success"]
                if not reset and not self._held:
                    raise SyncError("vLLM did not reset its prefix cache: requests are running")
                if self._reports_versions:
                    self._post("/update_weight_version", json={"new_version": str(version)})
                self._version = version
        except LostServerError:
            raise
        except RolloutError as error:
            raise SyncError(f"vLLM rejected the weights of version {version}: {error}") from error

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Context in which the server is paused; held requests keep their keys and values.

        Without ``clear_cache=false`` vLLM 0.32 preempts them and computes all their tokens again
        with the new weights.  If none is held, requests of other clients finish first.
        """
        mode = "keep" if self._held else "wait"
        self._post(f"/pause?mode={mode}&clear_cache=false", timeout=self.limits.start)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, LostServerError):  # resuming a lost server is impossible
                self._post("/resume")
            raise
        self._post("/resume")

    def version(self) -> int:
        """Weights version that vLLM reports; before vLLM 0.32, the version loaded last."""
        if not self._reports_versions:
            return self._version
        answer = self._get("/weight_info")
        with _reading("/weight_info"):
            return parse_version(answer["weight_version"])

    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        answer = self._get("/v1/models")
        with _reading("/v1/models"):
            return int(answer["data"][0]["max_model_len"])

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory."""
        self._post("/sleep?level=1")

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate a part of the GPU memory again."""
        self._post(f"/wake_up?tags={part}")

    def close(self) -> None:
        """Close connections and forget the weight files; the server keeps running."""
        self.cancel()
        self._client.close()
        self._folder = None

    # -- state of the server ---------------------------------------------------------------------

    def healthy(self) -> bool:
        """Whether the server responds."""
        if self._uds is not None:  # httpx leaks a socket without a listener
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(self._uds):
                    return False
        try:
            return self._client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    # -- HTTP ------------------------------------------------------------------------------------

    def _server_info(self) -> httpx.Response:
        query = {"config_format": "json"}
        return self._client.get("/server_info", params=query, timeout=self.limits.start)

    def _check_in_flight(self) -> None:
        """Check by the server's own request count that it is working."""
        response = self._client.get("/metrics")
        counts = _REQUESTS.findall(response.text) if response.status_code == 200 else []
        if not counts or any(float(count) for count in counts):  # no metrics, or requests running
            self._idle_since = math.inf
            return
        self._idle_since = min(self._idle_since, time.monotonic())
        if (idle := time.monotonic() - self._idle_since) > self.limits.patience:
            self._idle_since = math.inf
            raise LostServerError(
                f"{self._name} has had no requests for {idle:.0f} s (worker_timeout), but has not"
                f" answered all of those that it was sent: they were lost{self._way_out}"
            )

    def _check_alive(self) -> None:
        """Poll the server's engine loop."""
        try:
            with reporting_silence(self._name, self.limits.patience):
                path = "/weight_info" if self._reports_versions else "/is_paused"
                read_json(self._send(lambda: self._client.get(path)))
        except httpx.TimeoutException:
            raise LostServerError(
                f"{self._name} did not respond for {self.limits.patience:g} s (worker_timeout)"
                f"{self._way_out}"
            ) from None
        except httpx.TransportError as error:
            raise self._gone(error) from error

    def _get(self, path: str) -> Any:
        return self._request(lambda: self._client.get(path))

    def _post(self, path: str, **kwargs: Any) -> Any:
        return self._request(lambda: self._client.post(path, **kwargs))

    def _request(self, send: Callable[[], httpx.Response]) -> Any:
        try:
            return read_json(self._send(send))
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise self._gone(error) from error

    def _send(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """The response; sent again while the server is overloaded, at most ``patience`` seconds."""
        give_up, pause = time.monotonic() + self.limits.patience, _PAUSE
        while True:
            response = send()
            if response.status_code not in _OVERLOADED or time.monotonic() + pause > give_up:
                return response
            time.sleep(pause)
            pause = min(2 * pause, self.limits.heartbeat)

    def _gone(self, error: httpx.RequestError) -> LostServerError:
        return LostServerError(f"{self._name} is gone: {error!r}{self._way_out}")


def read_json(response: httpx.Response) -> Any:
    """The body of a successful response."""
    path, text = response.request.url.path, response.text[:500]
    if response.status_code >= 500:
        raise LostServerError(f"the vLLM server failed at {path}: {text}")
    if response.status_code >= 400:
        raise RolloutError(f"the vLLM server rejected {path}: {text}")
    with contextlib.suppress(ValueError, RecursionError):
        return response.json()
    return None


def _result(body: Any, request: GenerationRequest, loaded: int) -> GenerationResult:
    """Parse a response; before vLLM 0.32 its version is that of the weights ``loaded``."""
    with _reading(_GENERATE):
        result = _parse_choice(body["choices"][0], loaded)
        if len(result.tokens) != len(result.logprobs):
            raise ValueError(f"{len(result.tokens)} tokens, {len(result.logprobs)} logprobs")
        if "prompt_logprobs" in request.params:
            pairs = zip(body["prompt_logprobs"][1:], request.prompt[1:], strict=True)
            logprobs = tuple(at[str(token)]["logprob"] for at, token in pairs)
            result = replace(result, prompt_logprobs=logprobs)
    return result


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Context for reading an answer of vLLM; anything else is an error that names the path."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RolloutError(
            f"the vLLM server's answer to {path} is not what vLLM returns"
            f" ({type(error).__name__}: {error}); is there a proxy in between?"
        ) from error


def _parse_choice(choice: dict[str, Any], loaded: int) -> GenerationResult:
    versions = [
        (parse_version(span["version"]), span["end"] - span["start"])
        for span in choice.get("weight_versions") or ()
    ]
    content, ids = choice["logprobs"]["content"], choice["token_ids"]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"token_ids {str(ids)[:80]}")
    # ``top_logprobs`` begins with the sampled token, even if it is not among the most likely.
    tops = [[(_token_id(x), x["logprob"]) for x in at["top_logprobs"]] for at in content]
    return GenerationResult(
        tokens=np.array(ids, np.int32),
        logprobs=np.array([at["logprob"] for at in content], np.float32),
        allowed=allowed_matrix(tops) if max(map(len, tops)) > 1 else None,
        stopped=choice["finish_reason"] == "stop",
        versions=versions or [(loaded, len(ids))],
    )


def _token_id(top: dict[str, Any]) -> int:
    """The id of a token; before vLLM 0.32, only the token's name holds it."""
    return int(top["token_id"] if "token_id" in top else top["token"].removeprefix("token_id:"))
