"""Rewards from another machine, over HTTP.

A request is ``POST`` with the JSON
``{"prompts": [...], "completions": [...], "columns": {name: [...]}}``;
the answer is ``{"rewards": [...]}``, one number per completion, or null where it does not apply.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kedge.errors import ConfigError, RewardError
from kedge.rewards.base import parallel

logger = logging.getLogger(__name__)

TOKEN_ENV = "KEDGE_REWARD_TOKEN"
MAX_ANSWER = 64 << 20  # bytes
LONGEST_WAIT = 30.0  # seconds between two attempts
AGAIN = {408, 425, 429, 500, 502, 503, 504}  # answers that may be different next time
REPORTS = ("log_metric", "log_extra", "trainer_state", "prompt_ids")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class RemoteReward:
    """A reward function that asks a server, such as ``kedge serve-reward``.

    The rows are sent in batches, several at a time.  A request that fails for a reason that may
    pass (no connection, no answer in time, a server that is busy or broken) is repeated, each time
    after a longer wait; a request that the server refuses is not.

    Args:
        url: of the server, ``http://`` or ``https://``; without a path, ``/score`` is added.
        token: sent as ``Authorization: Bearer``; by default the environment variable
            ``KEDGE_REWARD_TOKEN``, if it is set.
        batch_size: rows in one request.
        concurrency: requests at the same time.
        timeout: seconds for one request, from the first byte to the last.
        time_limit: seconds for all requests and waits of one call.
        retries: how often a request is repeated.
        backoff: seconds before the first repetition, doubled every time.
        columns: dataset columns to send; None sends all.
        send_ids: send ``completion_ids``, too.
        name: of the part in the judgement.

    Raises:
        ConfigError: the address cannot be used, or a number does not fit.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        batch_size: int = 64,
        concurrency: int = 4,
        timeout: float = 60.0,
        time_limit: float = 600.0,
        retries: int = 5,
        backoff: float = 0.5,
        columns: Sequence[str] | None = None,
        send_ids: bool = False,
        name: str = "remote",
    ) -> None:
        least = {"batch_size": (batch_size, 1), "concurrency": (concurrency, 1),
                 "timeout": (timeout, 1e-3), "time_limit": (time_limit, 1e-3),
                 "retries": (retries, 0), "backoff": (backoff, 0)}  # fmt: skip
        for option, (value, bound) in least.items():
            if not value >= bound:
                raise ConfigError(f"{option}={value} must be at least {bound}")
        self.__name__ = name
        self._address = _address(url)
        self._token = token if token is not None else os.environ.get(TOKEN_ENV)
        if self._token is not None and not self._token.isprintable():
            raise ConfigError("the token of a remote reward must be one line of printable letters")
        self._batch, self._concurrency = batch_size, concurrency
        self._timeout, self._time_limit = timeout, time_limit
        self._retries, self._backoff = retries, backoff
        self._columns, self._send_ids = columns, send_ids
        plain = not self._address.secure and self._address.host not in LOOPBACK
        if self._token and plain:
            logger.warning(
                "the token for %s travels unencrypted: use https, or a tunnel", self._address.shown
            )

    def __repr__(self) -> str:
        return f"RemoteReward({self._address.shown!r})"

    def __call__(
        self, completions: Sequence[Any], prompts: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """Score all rows.

        Raises:
            RewardError: the server refused, did not answer in time, or answered nonsense.
        """
        until = time.monotonic() + self._time_limit
        sent = self._chosen(columns, len(completions))
        starts = range(0, len(completions), self._batch)

        def ask(start: int) -> list[float | None]:
            rows = slice(start, start + self._batch)
            body: dict[str, Any] = {
                "completions": list(completions[rows]),
                "columns": {name: values[rows] for name, values in sent.items()},
            }
            if prompts is not None:
                body["prompts"] = list(prompts[rows])
            return self._ask(self._encoded(body), len(body["completions"]), until)

        answers = parallel(ask, list(starts), self._concurrency)
        return [reward for answer in answers for reward in answer]

    def _chosen(self, columns: dict[str, Any], rows: int) -> dict[str, list[Any]]:
        skipped = REPORTS if self._send_ids else (*REPORTS, "completion_ids")
        wanted = [key for key in columns if key not in skipped]
        if self._columns is not None:
            missing = [key for key in self._columns if key not in columns]
            if missing:
                raise RewardError(
                    f"{self.__name__}: the dataset has no column {', '.join(missing)}; it has"
                    f" {', '.join(wanted)}"
                )
            wanted = [*self._columns, *(["completion_ids"] if self._send_ids else [])]
        chosen = {key: list(columns[key]) for key in wanted}
        for key, values in chosen.items():
            if len(values) != rows:
                raise RewardError(
                    f"{self.__name__}: column {key!r} has {len(values)} values for {rows} rows"
                )
        return chosen

    def _encoded(self, body: dict[str, Any]) -> bytes:
        try:
            return json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"{self.__name__}: the dataset has values that JSON cannot hold ({error}); name the"
                " columns to send with columns=[...]"
            ) from error

    def _ask(self, body: bytes, rows: int, until: float) -> list[float | None]:
        wait, attempt = self._backoff, 0
        while True:
            attempt += 1
            answer = self._attempt(body, until)
            if answer.status == 200:
                return _rewards(answer.body, rows, self._address.shown)
            left = until - time.monotonic()
            pause = max(answer.pause, wait * random.uniform(0.5, 1.0))
            if not answer.again or attempt > self._retries or pause >= left:
                raise RewardError(
                    f"reward server {self._address.shown} {answer.problem}"
                    f" ({attempt} attempts, {self._time_limit - left:.1f} s)"
                )
            logger.warning("reward server %s %s; again", self._address.shown, answer.problem)
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)

    def _attempt(self, body: bytes, until: float) -> _Answer:
        seconds = min(self._timeout, until - time.monotonic())
        if seconds <= 0:
            return _Answer(problem="did not answer within the time limit", again=False)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            return _post(self._address, body, headers, seconds)
        except ssl_errors() as error:
            return _Answer(problem=f"is not trusted: {error}", again=False)
        except (OSError, http.client.HTTPException) as error:
            return _Answer(problem=f"cannot be reached: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _Address:
    secure: bool
    host: str
    port: int | None
    path: str
    shown: str


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int = 0
    body: bytes = b""
    problem: str = ""
    again: bool = True
    pause: float = 0.0


def _address(url: str) -> _Address:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"url={url!r} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url={url!r} must be http://host:port/path or https://host/path")
    if parts.username or parts.password:
        raise ConfigError("the url of a reward server must not hold a password: use token=")
    path = parts.path if parts.path not in ("", "/") else "/score"
    shown = f"{parts.scheme}://{parts.netloc}{path}"
    query = f"?{parts.query}" if parts.query else ""
    return _Address(parts.scheme == "https", parts.hostname, port, path + query, shown)


def ssl_errors() -> tuple[type[Exception], ...]:
    """Errors of a certificate that does not fit: trying again does not help."""
    try:
        import ssl
    except ImportError:  # a Python without TLS
        return ()
    return (ssl.SSLCertVerificationError,)


def _post(address: _Address, body: bytes, headers: dict[str, str], seconds: float) -> _Answer:
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=seconds)
    expired = threading.Event()
    began = time.monotonic()
    try:
        connection.connect()
        timer = threading.Timer(
            max(0.0, seconds - (time.monotonic() - began)), _cut(connection.sock, expired)
        )
        timer.daemon = True
        timer.start()
        try:
            connection.request("POST", address.path, body, headers)
            response = connection.getresponse()
            data = response.read(MAX_ANSWER + 1)
            if response.length and len(data) <= MAX_ANSWER:  # bytes that are missing
                raise http.client.IncompleteRead(data, response.length)
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set():
                raise TimeoutError(f"no answer after {seconds:.1f} s") from error
            raise
        finally:
            timer.cancel()
    finally:
        connection.close()
    if expired.is_set():
        raise TimeoutError(f"no answer after {seconds:.1f} s")
    if len(data) > MAX_ANSWER:
        return _Answer(problem=f"answered more than {MAX_ANSWER} bytes", again=False)
    text = data[:300].decode(errors="replace")
    return _Answer(
        status=response.status,
        body=data,
        problem=f"answered {response.status} {response.reason}: {text}{_hint(response.status)}",
        again=response.status in AGAIN,
        pause=_pause(response.getheader("Retry-After")),
    )


def _hint(status: int) -> str:
    return f"; give token=, or set {TOKEN_ENV}" if status == 401 else ""


def _cut(sock: Any, expired: threading.Event) -> Callable[[], None]:
    """Ends a request that drips: a socket's own time limit is for every read anew."""

    def cut() -> None:
        expired.set()
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was just closed

    return cut


def _pause(retry_after: str | None) -> float:
    return float(retry_after) if retry_after and retry_after.isdigit() else 0.0


def _rewards(body: bytes, rows: int, shown: str) -> list[float | None]:
    try:
        rewards = json.loads(body)["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RewardError(
            f'reward server {shown} answered {body[:200]!r}, not {{"rewards": [...]}}'
        ) from error
    if not isinstance(rewards, list) or len(rewards) != rows:
        found = len(rewards) if isinstance(rewards, list) else rewards
        raise RewardError(f"reward server {shown} gave {found!r} rewards for {rows} completions")
    for reward in rewards:
        number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if reward is not None and not (number and math.isfinite(reward)):
            raise RewardError(f"reward server {shown} gave {reward!r}, not a finite number")
    return [None if reward is None else float(reward) for reward in rewards]
