"""Serves reward functions over HTTP, with the standard library alone."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import ipaddress
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kedge.errors import ConfigError
from kedge.verifiers.by_column import accepted

logger = logging.getLogger(__name__)

WAIT_SECONDS = 120.0  # that a request waits for its turn
IDLE_SECONDS = 60.0  # that a client may take for its next bytes
DRAIN_SECONDS = 5.0  # that a refused client has to send the rest of its request
MAX_DRAINED = 64 << 20  # bytes of it that are read
MAX_CONNECTIONS = 1024  # at the same time, each with a thread; more are told to come back
BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b'\r\n{"error": "too many connections; try again later"}'
)


class Refused(Exception):
    """A request that gets another answer than rewards.

    Args:
        status: of HTTP.
        problem: what is wrong, for the client.
    """

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RewardServer:
    """An HTTP server for reward functions.

    ``POST /score`` (of the only function) or ``/score/<name>``, with the JSON that ``RemoteReward``
    sends; ``GET /health`` answers ``{"status": "ok", "rewards": [names]}``, also without a token.
    What a function raises is answered with 422 and the message.

    Args:
        functions: reward functions by name, synchronous or asynchronous.
        host: address to listen on; anything but this machine alone needs a token.
        port: to listen on; 0 takes a free one.
        token: that requests must carry as ``Authorization: Bearer``.
        workers: calls at the same time; more than 1 only for functions that threads can share.
        max_mb: largest request, in MiB.

    Raises:
        ConfigError: there is no function, or no token where one is needed.
        OSError: the port is taken.
    """

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
            raise ConfigError("there is no reward function to serve")
        if workers < 1 or max_mb < 1 or not 0 <= port < 1 << 16:
            raise ConfigError(f"workers={workers}, max_mb={max_mb} or port={port} does not fit")
        if not token and not is_loopback(host):
            raise ConfigError(
                f"host={host!r} can be reached by others: set a token, or listen on 127.0.0.1"
            )
        self.functions, self.host, self.max_bytes = dict(functions), host, max_mb << 20
        self._token, self._turns = token, threading.BoundedSemaphore(workers)
        self._http = _http_server(host, port, self)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where requests go."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self._http.server_address[1]}/score"

    def __enter__(self) -> RewardServer:
        self._thread = threading.Thread(
            target=self.serve_forever, name="kedge-reward-server", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        if self._thread is not None:
            self._thread.join()
        self.close()

    def serve_forever(self) -> None:
        """Answer requests until the process is interrupted."""
        self._http.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Give the port back."""
        self._http.server_close()

    def answer(self, path: str, headers: Mapping[str, str], read: Callable[[int], bytes]) -> Any:
        """The rewards for one request.

        Args:
            path: of the request.
            headers: of the request, names in small letters.
            read: gives so many bytes of its body.

        Raises:
            Refused: the request is not in order, or the function raised.
        """
        self._admit(headers)
        function = self._function(path)
        body = self._body(headers, read)
        completions = body.get("completions")
        columns = body.get("columns", {})
        if not isinstance(completions, list) or not isinstance(columns, dict):
            raise Refused(400, "the JSON must hold a list 'completions' and a mapping 'columns'")
        offered = {**columns, "completions": completions}
        if "prompts" in body:
            offered["prompts"] = body["prompts"]
        rows = len(completions)
        odd = [key for key, v in offered.items() if not isinstance(v, list) or len(v) != rows]
        if odd:
            raise Refused(400, f"{', '.join(odd)} must be lists of {rows} values")
        if not self._turns.acquire(timeout=WAIT_SECONDS):
            raise Refused(503, "too many requests; try again later")
        try:
            returned = _called(function, offered)
        except Exception as error:
            logger.exception("a reward function failed")
            raise Refused(422, f"{type(error).__name__}: {error}") from error
        finally:
            self._turns.release()
        return {"rewards": _checked(returned, rows)}

    def _admit(self, headers: Mapping[str, str]) -> None:
        if self._token:
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                raise Refused(401, "the token is missing or wrong")
            return
        host = headers.get("host", "")
        host = (host.rpartition(":")[0] if not host.endswith("]") else host).strip("[]") or host
        if host not in (self.host, "localhost") and not is_loopback(host):
            raise Refused(403, f"no service for the host {host!r}")  # a web page that found us

    def _function(self, path: str) -> Callable[..., Any]:
        place = path.partition("?")[0].rstrip("/")
        if place == "/score" and len(self.functions) == 1:
            return next(iter(self.functions.values()))
        name = place.removeprefix("/score/")
        if not place.startswith("/score/") or name not in self.functions:
            known = ", ".join(f"/score/{own}" for own in self.functions)
            raise Refused(404, f"there is no {place}; there are {known}")
        return self.functions[name]

    def _body(self, headers: Mapping[str, str], read: Callable[[int], bytes]) -> dict[str, Any]:
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the Content-Type must be application/json")
        length = headers.get("content-length", "")
        if not _is_number(length):
            raise Refused(411, "the request must have a Content-Length")
        if int(length) > self.max_bytes:
            raise Refused(413, f"the request has {length} bytes; at most {self.max_bytes}")
        try:
            body = json.loads(read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        return body


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _called(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    returned = function(**accepted(function, offered))
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


def _checked(returned: Any, rows: int) -> list[float | None]:
    rewards = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(rewards, (list, tuple)) or len(rewards) != rows:
        raise Refused(422, f"the function returned {str(rewards)[:80]!r} for {rows} completions")
    found: list[float | None] = []
    for reward in rewards:
        value = reward.item() if hasattr(reward, "item") else reward
        number = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
        if value is not None and not number:
            raise Refused(
                422, f"the function returned {str(value)[:80]}, not a finite number or None"
            )
        found.append(None if value is None else float(value))
    return found


class _Body:
    def __init__(self, file: Any, length: str) -> None:
        self._file, self._unread = file, int(length) if _is_number(length) else 0

    def read(self, size: int) -> bytes:
        self._unread -= size
        data: bytes = self._file.read(size)
        return data

    def drain(self, most: int) -> None:
        """Read what a client still sends: closing before would lose it its answer."""
        left, until = min(self._unread, most), time.monotonic() + DRAIN_SECONDS
        while left > 0 and time.monotonic() < until and (data := self._file.read1(1 << 16)):
            left -= len(data)


def _http_server(host: str, port: int, rewards: RewardServer) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS
        server_version, sys_version = "kedge", ""

        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = _Body(self.rfile, headers.get("content-length", ""))
            try:
                self._send(200, rewards.answer(self.path, headers, body.read))
            except Refused as refused:
                self._send(refused.status, {"error": str(refused)})
                self.connection.shutdown(socket.SHUT_WR)
                self.connection.settimeout(DRAIN_SECONDS)
                body.drain(max(rewards.max_bytes, MAX_DRAINED))

        def do_GET(self) -> None:
            if self.path == "/health":
                self._send(200, {"status": "ok", "rewards": list(rewards.functions)})
            else:
                self._send(404, {"error": f"there is no {self.path}; there is /health"})

        def _send(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status == 503:
                self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            logger.info("%s %s", self.address_string(), format % arguments)

    return _Server(host, port, Handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS  # that wait to be accepted; socketserver has 5

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("a client went away: %s", client_address, exc_info=True)
