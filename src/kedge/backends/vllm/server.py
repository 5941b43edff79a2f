"""A vLLM server that Kedge starts, watches, restarts and stops."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from kedge.backends.vllm import process_guard
from kedge.backends.vllm.inprocess import device_args, fixed_args
from kedge.backends.vllm.policy_spec import PolicySpec
from kedge.backends.vllm.remote import LostServerError, Remote
from kedge.backends.vllm.service import GenerationRequest, GenerationResult
from kedge.backends.vllm.weight_payload import WeightPayload
from kedge.errors import ConfigError, RolloutError

T = TypeVar("T")
logger = logging.getLogger(__name__)
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # endpoints that exchange weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_GRACE = 10.0  # seconds that a server gets to end by itself
_IN_A_ROW = 3  # restarts without a batch in between


class Server:
    """A vLLM server process of our own, on a Unix socket that nobody else can open.

    If it dies or hangs while it generates, it is started again with the weights it had, and gets
    the rows that it had not answered: every row is answered once, by the same version.

    Args:
        blueprint: the policy.
        weights: the first ones; they count as version 0.
        engine_args: engine arguments of vLLM by name.
        python: the Python that has vLLM; None is the one that runs.
        folder: weights travel through a folder below it; None is this machine's shared memory.
        start_timeout: most seconds that starting, or exchanging weights, may take.
        heartbeat: seconds between two signs of life asked of it while it generates.
        patience: seconds without one after which it counts as hung and is killed.
        devices: GPUs it sees, as in ``CUDA_VISIBLE_DEVICES``; None: those of this process.

    Raises:
        ConfigError: it does not start; with the end of what it said.
    """

    def __init__(
        self,
        blueprint: PolicySpec,
        weights: Mapping[str, Tensor],
        engine_args: Mapping[str, Any] | None = None,
        *,
        python: str | None = None,
        folder: str | None = None,
        start_timeout: float = 600.0,
        heartbeat: float = 5.0,
        patience: float = 60.0,
        devices: str | None = None,
    ) -> None:
        self.restarts = 0
        self._home = tempfile.TemporaryDirectory(prefix="kedge-vllm-")
        home = Path(self._home.name)
        blueprint.write(home / "policy", weights)
        arguments = fixed_args(blueprint) | device_args() | dict(engine_args or {})
        socket = self._socket = home / "socket"
        self._process = Process(
            [
                *(python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(home / "policy"), "--uds", str(socket), "--enable-scale-out"),
                *flags(arguments),
            ],
            log=home / "log",
            eager=bool(arguments.get("enforce_eager")),
            devices=devices,
        )
        self._start_timeout = start_timeout
        self._remote = Remote(
            "http://vllm",
            uds=str(socket),
            folder=folder,
            heartbeat=heartbeat,
            patience=patience,
            slow=start_timeout,
        )
        self._version = 0
        self._loaded = False
        try:
            self._up()
            self.load(blueprint.parcel(weights), 0)
        except BaseException:
            self.close()
            raise

    def generate(self, asks: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """The answers, in the order of the asks, through any death of the server.

        Raises:
            RolloutError: it died again and again, or refuses the request.
        """
        answers: list[GenerationResult | None] = [None] * len(asks)
        tries = 0
        while missing := [i for i, a in enumerate(answers) if a is None]:
            try:
                found: Sequence[GenerationResult | None] = self._remote.generate(
                    [asks[i] for i in missing]
                )
            except LostServerError as error:
                found = error.answers
                tries = self._again(error, tries)
            for i, answer in zip(missing, found, strict=False):
                answers[i] = answer
        return [a for a in answers if a is not None]

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability of each token of each row but its first."""
        return self._through(lambda: self._remote.score(rows))

    def load(self, parcel: WeightPayload, version: int) -> None:
        """Exchange the weights, or the adapter, and drop the cache of prefixes."""
        self._version = version
        try:
            self._remote.load(parcel, version)
            self._loaded = True
        except LostServerError as error:  # they are written: a new server starts with them
            self._loaded = True
            self._again(error, 0)

    def version(self) -> int:
        """The version of the weights, as vLLM says."""
        return self._through(self._remote.version)

    def sleep(self) -> None:
        """Free the cache."""
        self._through(self._remote.sleep)

    def wake(self) -> None:
        """Undo ``sleep``."""
        self._through(self._remote.wake)

    def close(self) -> None:
        """End the server and remove its files."""
        self._process.stop()
        self._remote.close()
        self._home.cleanup()

    @property
    def pid(self) -> int:
        """The process group of the server."""
        return self._process.pid

    def _through(self, call: Callable[[], T]) -> T:
        tries = 0
        while True:
            try:
                return call()
            except LostServerError as error:  # noqa: PERF203
                tries = self._again(error, tries)

    def _again(self, error: LostServerError, tries: int) -> int:
        if tries >= _IN_A_ROW:
            raise RolloutError(
                f"the vLLM server died {tries + 1} times in a row ({error}); the end of its log:\n"
                f"{self._process.said()}"
            ) from error
        logger.warning("%s; starting it again with version %d", error, self._version)
        self.restarts += 1
        self._process.kill()
        self._up()
        return tries + 1

    def _up(self) -> None:
        self._socket.unlink(missing_ok=True)  # of a server that was killed
        self._process.start()
        until = time.monotonic() + self._start_timeout
        while not self._remote.healthy():
            late = time.monotonic() > until
            if late or not self._process.alive:
                how = f"was not ready within {self._start_timeout:g} s" if late else "ended"
                said = self._process.said()
                self._process.kill()
                raise ConfigError(
                    f"the vLLM server {how} (worker_start_timeout, vllm_engine_args and vllm_python"
                    f" steer it); the end of its log:\n{said}"
                )
            time.sleep(0.2)
        if self._loaded:
            self._remote.reload(self._version)


class Process:
    """A command with a keeper: it ends with this process, however that ends."""

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
        self._end: Any = None

    def start(self) -> None:
        """Start it, in a process group of its own."""
        with self._log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._running)

    @property
    def pid(self) -> int:
        """The process group."""
        assert self._running is not None
        return self._running.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._running is not None and self._running.poll() is None

    def said(self, lines: int = 30) -> str:
        """The end of its log."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End it and wait until it is gone."""
        if self._end is not None:
            self._end()

    def kill(self) -> None:
        """End it at once."""
        if self._running is not None:
            _kill(self._running)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_GRACE + 5)
    except subprocess.TimeoutExpired:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as command line flags of vLLM.

    >>> flags({"max_model_len": 256, "enforce_eager": True, "hf_overrides": {"a": 1}})
    ['--max-model-len=256', '--enforce-eager', '--hf-overrides={"a": 1}']
    """
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            found.append(f"--{flag}={text}")
    return found
