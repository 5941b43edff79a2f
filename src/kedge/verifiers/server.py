"""Serves reward functions over HTTP, with only the standard library."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kedge.errors import ConfigError
from kedge.verifiers.base import is_finite
from kedge.verifiers.by_column import accepted

logger = logging.getLogger(__name__)

WAIT_SECONDS = 120.0  # a request waits for a free worker
IDLE_SECONDS = 60.0  # a client may take to send its next bytes
DRAIN_SECONDS = 5.0  # a rejected client has to send the rest of its request
MAX_DRAINED = 64 << 20  # bytes of that rest that are read
MAX_CONNECTIONS = 1024  # concurrent, each with a thread; further ones get 503
BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b'\r\n{"error": "too many connections; try again later"}'
)


class Refused(Exception):
    """A rejected request, with its HTTP status and an error message for the client."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """An HTTP server for reward functions.

    ``POST /score`` (if there is one function) or ``/score/<name>``, with the JSON that
    ``RemoteReward`` sends.  ``GET /health`` answers ``{"status": "ok", "rewards": [names]}``
    without a token.  An exception in a function returns 422 with its message.  A context manager
    that serves in a thread; ``serve_forever`` serves until the process is interrupted.

    Args:
        functions: reward functions by name, synchronous or asynchronous.
        host: address to listen on; any but a loopback address needs a token.
        port: port to listen on; 0 picks a free one.
        token: required as ``Authorization: Bearer`` with every request.
        workers: concurrent calls; more than 1 only for thread-safe functions.
        max_mb: maximum size of a request, in MiB.

    Raises:
        ConfigError: no function, a missing token, or a number out of range.
        OSError: the port is in use.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS  # waiting to be accepted; the default is 5

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        workers: int = 1,
        max_mb: int = 64,
    ) -> None:
        if not functions:
            raise ConfigError("functions must not be empty; pass {'name': function}")
        if workers < 1 or max_mb < 1 or not 0 <= port < 1 << 16:
            raise ConfigError(
                f"workers={workers} and max_mb={max_mb} must be at least 1, and port={port} between"
                " 0 and 65535"
            )
        if not token and not is_loopback(host):
            raise ConfigError(
                f"host={host!r} is reachable from other machines: set a token, or listen on"
                " 127.0.0.1"
            )
        self.functions, self.host, self.max_bytes = dict(functions), host, max_mb << 20
        self._token, self._turns = token, threading.BoundedSemaphore(workers)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The URL to send requests to."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.server_address[1]}/score"

    def __enter__(self) -> RewardServer:
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="kedge-reward-server", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, or reject it if there are too many."""
        if not self._connections.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed connection."""
        logger.info("a client disconnected: %s", client_address, exc_info=True)

    def answer(self, path: str, headers: Message, read: Callable[[int], bytes]) -> Any:
        """The rewards for one request; raises Refused."""
        self._admit(headers)
        function = self._function(path)
        body = self._read_body(headers, read)
        completions = body.get("completions")
        columns = body.get("columns", {})
        if not isinstance(completions, list) or not isinstance(columns, dict):
            raise Refused(400, "the JSON must have a list 'completions' and an object 'columns'")
        offered = {**columns, "completions": completions}
        if "prompts" in body:
            offered["prompts"] = body["prompts"]
        rows = len(completions)
        invalid = [key for key, v in offered.items() if not isinstance(v, list) or len(v) != rows]
        if invalid:
            raise Refused(400, f"{', '.join(invalid)} must be lists of {rows} values")
        if not self._turns.acquire(timeout=WAIT_SECONDS):
            raise Refused(503, "too many requests; try again later")
        try:
            returned = _call(function, offered)
        except Exception as error:
            logger.exception("a reward function failed")
            raise Refused(422, f"{type(error).__name__}: {error}") from error
        finally:
            self._turns.release()
        return {"rewards": _check_rewards(returned, rows)}

    def _admit(self, headers: Message) -> None:
        if self._token:
            authorization = headers.get("authorization", "").encode()
            if not hmac.compare_digest(authorization, f"Bearer {self._token}".encode()):
                raise Refused(401, "the token is missing or wrong")
            return
        host = headers.get("host", "")
        host = (host.rpartition(":")[0] if not host.endswith("]") else host).strip("[]") or host
        if host not in (self.host, "localhost") and not is_loopback(host):
            raise Refused(403, f"the host {host!r} is not allowed")  # DNS rebinding by a web page

    def _function(self, path: str) -> Callable[..., Any]:
        place = path.partition("?")[0].rstrip("/")
        if place == "/score" and len(self.functions) == 1:
            return next(iter(self.functions.values()))
        name = place.removeprefix("/score/")
        if not place.startswith("/score/") or name not in self.functions:
            known = ", ".join(f"/score/{known_name}" for known_name in self.functions)
            raise Refused(404, f"unknown path {place}; known: {known}")
        return self.functions[name]

    def _read_body(self, headers: Message, read: Callable[[int], bytes]) -> dict[str, Any]:
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the Content-Type must be application/json")
        length = headers.get("content-length", "")
        if not _is_number(length):
            raise Refused(411, "the request must have a Content-Length")
        if int(length) > self.max_bytes:
            raise Refused(413, f"the request has {length} bytes; the limit is {self.max_bytes}")
        try:
            body = json.loads(read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        return body


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _call(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    returned = function(**accepted(function, offered))
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


def _check_rewards(returned: Any, rows: int) -> list[float | None]:
    rewards = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(rewards, (list, tuple)) or len(rewards) != rows:
        raise Refused(422, f"the function returned {str(rewards)[:80]!r} for {rows} completions")
    checked: list[float | None] = []
    for reward in rewards:
        value = reward.item() if hasattr(reward, "item") else reward
        if value is not None and not is_finite(value):
            raise Refused(
                422, f"the function returned {str(value)[:80]}, not a finite number or None"
            )
        checked.append(None if value is None else float(value))
    return checked


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = IDLE_SECONDS
    server_version, sys_version = "kedge", ""

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        self._unread = int(length) if _is_number(length) else 0
        try:
            self._send(200, self.server.answer(self.path, self.headers, self._read))
        except Refused as refused:
            self._send(refused.status, {"error": str(refused)})
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(DRAIN_SECONDS)
            self._drain(max(self.server.max_bytes, MAX_DRAINED))

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok", "rewards": list(self.server.functions)})
        else:
            self._send(404, {"error": f"unknown path {self.path}; known: /health"})

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.info("%s %s", self.address_string(), format % arguments)

    def _read(self, size: int) -> bytes:
        self._unread -= size
        return self.rfile.read(size)

    def _drain(self, most: int) -> None:
        """Read the rest of a request: closing earlier would drop the response."""
        left, until = min(self._unread, most), time.monotonic() + DRAIN_SECONDS
        while left > 0 and time.monotonic() < until and (data := self.rfile.read1(1 << 16)):
            left -= len(data)

    def _send(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)
