"""Serves reward functions over HTTP, with Starlette and uvicorn (the extra `serve`)."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kedge.background import in_thread, on_event_loop
from kedge.records.errors import ConfigError, install_command
from kedge.verifiers.base import read_scores
from kedge.verifiers.compose import accepted_arguments

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ConfigError(f"serving rewards needs Starlette: run {install_command('serve')}") from error

logger = logging.getLogger(__name__)

WAIT_SECONDS = 120.0  # most seconds that a request waits for a free worker
HEAD_SECONDS = 5.0  # seconds for a client to send its request line and headers
IDLE_SECONDS = 60.0  # seconds for a client to send its next bytes
MAX_CONNECTIONS = 1024  # concurrent connections; the server answers others with 503


class RewardServer:
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
        self._token = token
        self._turns = asyncio.Semaphore(workers)
        routes = [
            Route("/health", self._health),
            Route("/{path:path}", self._score, methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=MAX_CONNECTIONS,
                limit_concurrency=MAX_CONNECTIONS + 1,
                timeout_graceful_shutdown=5,
            )
        )

    @property
    def url(self) -> str:
        """The URL to send requests to."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/score"

    def serve_forever(self) -> None:
        """Serve until the process is interrupted or terminated."""
        self._server.run(sockets=[self._socket])

    def __enter__(self) -> RewardServer:
        self._thread = threading.Thread(
            target=self.serve_forever, name="kedge-reward-server", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "rewards": list(self.functions)})

    async def _score(self, request: Request) -> JSONResponse:
        self._admit(request)
        function = self._function(request.url.path.rstrip("/"))
        if request.method != "POST":
            known = ", ".join(self.functions)
            raise HTTPException(405, f"send a POST request with JSON; rewards: {known}")
        body = await self._read_body(request)
        completions, columns = body.get("completions"), body.get("columns", {})
        if not isinstance(completions, list) or not isinstance(columns, dict):
            raise HTTPException(
                400, "the JSON must have a list 'completions' and an object 'columns'"
            )
        offered = {**columns, **{n: body[n] for n in ("completions", "prompts") if n in body}}
        rows = len(completions)
        invalid = [key for key, v in offered.items() if not isinstance(v, list) or len(v) != rows]
        if invalid:
            raise HTTPException(400, f"{', '.join(invalid)} must be lists of {rows} values")
        returned = await self._call(function, offered)
        try:
            rewards = {"rewards": read_scores(returned, rows)}
        except ValueError as error:
            raise HTTPException(422, f"the function {error}") from error
        return JSONResponse(rewards, headers={"Connection": "close"})

    def _function(self, path: str) -> Callable[..., Any]:
        if path == "/score" and len(self.functions) == 1:
            return next(iter(self.functions.values()))
        name = path.removeprefix("/score/")
        if not path.startswith("/score/") or name not in self.functions:
            known = ", ".join(f"/score/{known_name}" for known_name in self.functions)
            raise HTTPException(404, f"unknown path {path}; known: {known}")
        return self.functions[name]

    def _admit(self, request: Request) -> None:
        if self._token:
            authorization = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(authorization, f"Bearer {self._token}".encode()):
                raise HTTPException(401, "the token is missing or wrong")
            return
        host = request.headers.get("host", "")
        host = (host.rpartition(":")[0] if not host.endswith("]") else host).strip("[]") or host
        if host not in (self.host, "localhost") and not is_loopback(host):
            # protects against DNS rebinding
            raise HTTPException(403, f"the host {host!r} is not allowed")

    async def _read_body(self, request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send JSON by POST, with Content-Type: application/json")
        data, chunks = bytearray(), request.stream()
        size = int(request.headers.get("content-length", 0))  # validated by h11
        try:
            while max(size, len(data)) <= self.max_bytes:
                data += await asyncio.wait_for(anext(chunks), IDLE_SECONDS)
            size = max(size, len(data))
            raise HTTPException(413, f"the request has {size} bytes; the limit is {self.max_bytes}")
        except StopAsyncIteration:
            pass  # the whole body has arrived
        except (asyncio.TimeoutError, ClientDisconnect) as error:
            raise HTTPException(408, "the body did not arrive") from error
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise HTTPException(400, "the body must be a JSON object")
        return body

    async def _call(self, function: Callable[..., Any], offered: dict[str, Any]) -> Any:
        try:
            await asyncio.wait_for(self._turns.acquire(), WAIT_SECONDS)
        except asyncio.TimeoutError as error:
            retry = {"Retry-After": "1"}
            raise HTTPException(503, "too many requests; try again later", retry) from error

        def call() -> Any:
            value = function(**accepted_arguments(function, offered))
            return on_event_loop(value, "server").result() if inspect.isawaitable(value) else value

        try:  # a function that hangs in its thread does not keep a terminated server alive
            return await asyncio.wrap_future(in_thread(call))
        except (Exception, SystemExit) as error:
            logger.exception("a reward function failed")
            raise HTTPException(422, f"{type(error).__name__}: {error}") from error
        finally:
            self._turns.release()


class _Protocol(H11Protocol):
    """Closes connections that send no head in time, and the oldest if there are too many.

    A connection with a refused request counts, too: its remaining data is read, so that it gets the
    answer, but not for longer.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        live = [c for c in self.connections if not c.transport.is_closing()]
        waiting = [c for c in live if isinstance(c, _Protocol) and c.idle]
        if len(live) > MAX_CONNECTIONS and len(waiting) > 1:
            min(waiting, key=lambda connection: connection.since).transport.abort()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        self.since = self.loop.time()
        self.loop.call_later(HEAD_SECONDS, self._close_late, self.since)

    def _close_late(self, since: float) -> None:
        if self.idle and self.since == since:
            self.transport.close()


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


def is_loopback(host: str) -> bool:
    """Whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
