"""Servers for the tests of remote rewards."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

QUICK: dict[str, Any] = {"backoff": 0.001, "timeout": 60.0, "time_limit": 100.0}


def length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


@contextmanager
def raw_server(reply: Callable[[int, str], bytes | None]) -> Iterator[tuple[str, list[str]]]:
    """Answers each request with the bytes that ``reply(number, request)`` returns."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    requests: list[str] = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            with client:
                client.settimeout(60)
                with suppress(OSError):
                    requests.append(_request(client))
                    for piece in _pieces(reply(len(requests), requests[-1])):
                        if stop.is_set():
                            break
                        client.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        stop.set()
        thread.join()
        listener.close()


def _request(client: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(client)
    head, _, body = data.partition(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < size:
        body += _received(client)
    return (head + b"\r\n\r\n" + body).decode()


def _received(client: socket.socket) -> bytes:
    if data := client.recv(65536):
        return data
    raise ConnectionError("the client has left")


def _pieces(answer: bytes | None) -> Iterator[bytes]:
    if answer is None:  # drips for ever
        yield b"HTTP/1.0 200 OK\r\n"
        while True:
            time.sleep(0.05)
            yield b"X: y\r\n"
    yield answer


def ok(value: Any) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(value).encode()
