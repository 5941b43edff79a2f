"""Rewards over HTTP: the server, and ``kedge serve-reward``."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from kedge.cli.main import main as kedge
from kedge.cli.tools.serve_reward import load
from kedge.errors import ConfigError, RewardError
from kedge.verifiers import RemoteReward, gsm8k
from kedge.verifiers.remote import TOKEN_ENV
from kedge.verifiers.server import RewardServer

from .reward_servers import QUICK, length


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)


def request(
    url: str, body: bytes, path: str = "/score", method: str = "POST", **headers: str
) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def test_what_the_server_refuses() -> None:
    def bad(completions: list[str]) -> list[float]:
        raise ValueError("the reason")

    def ends(completions: list[str]) -> list[float]:
        raise SystemExit(3)

    good = json.dumps({"completions": ["x"]}).encode()
    functions = {
        "length": length,
        "bad": bad,
        "ends": ends,
        "short": lambda completions: [],
        "nan": lambda **_: [float("nan")],
        "huge": lambda **_: [10**400],
    }
    with RewardServer(functions, max_mb=1) as server:
        url = server.url
        assert request(url, good, "/score/length") == (200, {"rewards": [1.0]})
        assert request(url, good, "/score/length/") == (200, {"rewards": [1.0]})
        assert request(url, good)[0] == 404
        assert request(url, good, "/score/none")[0] == 404
        assert request(url, good, "/other", "GET")[0] == 404
        assert request(url, b"", "/health", "GET") == (
            200,
            {"status": "ok", "rewards": list(functions)},
        )
        bodies = [b"{", b"[]", b"{}", b'{"completions": "x"}', b"[" * 100_000]
        odd = ({"columns": []}, {"columns": {"a": 1}}, {"prompts": []})
        bodies += [json.dumps({"completions": ["x"]} | more).encode() for more in odd]
        for body in bodies:
            assert request(url, body, "/score/length")[0] == 400
        assert request(url, good, "/score/bad") == (422, {"error": "ValueError: the reason"})
        assert request(url, good, "/score/ends") == (422, {"error": "SystemExit: 3"})
        assert request(url, good, "/score/short")[0] == 422
        assert request(url, good, "/score/nan")[0] == 422
        assert request(url, good, "/score/huge")[0] == 422
        assert request(url, b"x" * (2 << 20), "/score/length")[0] == 413
        html = {"Content-Type": "text/plain"}
        assert request(url, good, "/score/length", "POST", **html)[0] == 415
        assert request(url, good, "/score/length", "POST", Host="evil.example")[0] == 403
        for host in ("localhost:1", "127.0.0.1", "[::1]:80", "[::1]", "localhost"):
            assert request(url, good, "/score/length", "POST", Host=host)[0] == 200


def test_a_request_that_is_too_large_is_refused_at_once() -> None:
    """With what the client claims to send, and while it still sends."""
    claim = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    claim += b"Content-Length: 1000000000000000000\r\n\r\n"
    with RewardServer({"length": length}, max_mb=1) as server:
        place = ("127.0.0.1", urlsplit(server.url).port or 0)
        with socket.create_connection(place, timeout=60) as client:
            client.sendall(claim)
            assert client.recv(64).startswith(b"HTTP/1.1 413 ")
        body = json.dumps({"completions": ["x" * (8 << 20)]}).encode()
        assert request(server.url, body)[0] == 413


def test_many_connections_at_once_are_served() -> None:
    """More than socketserver's backlog of 5 that arrive while the server is busy elsewhere."""
    head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"completions": ["xy"]}'
    ask = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    server = RewardServer({"length": length})
    place = ("127.0.0.1", urlsplit(server.url).port or 0)
    clients = [socket.socket() for _ in range(200)]
    for client in clients:
        client.settimeout(60)
        client.setblocking(False)
        client.connect_ex(place)  # all of them before the first is accepted
    with server:
        for client in clients:
            client.settimeout(60)
            client.sendall(ask)
        answers = [client.makefile("rb").read() for client in clients]
    for client in clients:
        client.close()
    assert [answer.endswith(b'{"rewards":[2.0]}') for answer in answers] == [True] * 200


def test_connections_without_a_head_give_way_and_others_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kedge.verifiers.server.MAX_CONNECTIONS", 2)
    head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with RewardServer({"length": length}) as server:
        place = ("127.0.0.1", urlsplit(server.url).port or 0)
        idle = [socket.create_connection(place, timeout=60) for _ in range(40)]
        for client in idle:
            client.sendall(b"POST /score HTTP/1.1\r\nX: ")
        assert RemoteReward(server.url, **QUICK | {"retries": 0})(["xyz"]) == [3.0]
        busy = [socket.create_connection(place, timeout=60) for _ in range(2)]
        for client in busy:
            client.sendall(head + b"Content-Length: 9\r\n\r\n")
        connections = server._server.server_state.connections
        while sum(not connection.idle for connection in list(connections)) < 2:
            time.sleep(0.01)
        with socket.create_connection(place, timeout=60) as third:
            third.sendall(head + b"Content-Length: 9\r\n\r\n")
            assert b"503 Service Unavailable" in third.recv(200)
        for client in (*idle, *busy):
            client.close()
        assert RemoteReward(server.url, **QUICK)(["xyz"]) == [3.0]
        monkeypatch.setattr("kedge.verifiers.server.HEAD_SECONDS", 0.2)
        with socket.create_connection(place, timeout=60) as slow:
            slow.sendall(b"POST /score HTTP/1.1\r\nX: ")
            assert slow.recv(1) == b""


def test_what_a_function_may_return() -> None:
    import numpy as np

    async def later(completions: list[str]) -> list[float]:
        return [2.0]

    for function in (
        later,
        lambda **_: np.array([2.0]),
        lambda **_: [np.float32(2)],
        lambda **_: (2,),
    ):
        with RewardServer({"f": function}) as server:
            assert RemoteReward(server.url, **QUICK)(["x"]) == [2.0]


def test_functions_are_called_one_at_a_time_unless_told_otherwise() -> None:
    running, most = 0, 0

    def slow(completions: list[str]) -> list[float]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.05)
        running -= 1
        return [0.0]

    with RewardServer({"slow": slow}) as server:
        RemoteReward(server.url, batch_size=1, concurrency=4)(["x"] * 4)
    assert most == 1
    four = threading.Barrier(4, timeout=60)
    with RewardServer({"four": lambda **_: [float(four.wait() >= 0)]}, workers=4) as server:
        assert RemoteReward(server.url, batch_size=1, concurrency=4)(["x"] * 4) == [1.0] * 4


def test_what_serve_reward_loads() -> None:
    assert load("gsm8k") == ("gsm8k", gsm8k)
    assert load("by_column")[0] == "by_column"
    assert load("kedge.verifiers:think_answer")[0] == "think_answer"
    for bad in ("gsm8", "kedge.verifiers:nothing", "nowhere:f"):
        with pytest.raises(ConfigError):
            load(bad)


@pytest.mark.parametrize(
    "flags",
    [[], ["gsm8"], ["gsm8k", "gsm8k"], ["gsm8k", "--port", "x"], ["gsm8k", "--host", "0.0.0.0"],
     ["gsm8k", "--workers", "0"]],
)  # fmt: skip
def test_serve_reward_refuses(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert kedge(["serve-reward", *flags]) == 2
    assert "kedge serve-reward: error:" in capsys.readouterr().err


def test_the_command() -> None:
    environment = {**os.environ, TOKEN_ENV: "right"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kedge.cli.main", "serve-reward", "gsm8k", "math", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "with a token" in line
        url = next(word.rstrip(",") for word in line.split() if word.endswith("/score/gsm8k,"))
        remote = RemoteReward(url, token="right")
        assert remote(["#### 4", "5"], ground_truth=["4", "4"]) == [1.0, 0.0]
        with pytest.raises(
            RewardError, match=r"422.*RewardError: verifier gsm8k needs the dataset column"
        ):
            remote(["4"], answer=["4"])
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors.split("a reward function failed")[0]
