"""Rewards over HTTP: the client, the server, ``kedge serve-reward``; rewards of other ranks."""

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
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kedge.cli.main import main as kedge
from kedge.ext.serve.command import load
from kedge.ext.serve.server import RewardServer
from kedge.records.errors import ConfigError, RewardError
from kedge.rollout.scheduler import rank_rewards
from kedge.verifiers import RemoteReward, gsm8k
from kedge.verifiers.remote import TOKEN_ENV
from tests.unit.reward_servers import QUICK, length, ok, raw_server


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)


def test_scores_come_back_in_order_whatever_the_batches() -> None:
    texts = ["x" * n for n in range(23)]
    with RewardServer({"length": length}) as server:
        for size in (1, 5, 23, 100):
            remote = RemoteReward(server.url, batch_size=size, concurrency=3)
            assert remote(texts) == [float(n) for n in range(23)]
        assert RemoteReward(server.url)([]) == []


def test_prompts_columns_and_chats_arrive() -> None:
    def seen(prompts: list[str], completions: list[Any], **columns: Any) -> list[Any]:
        assert prompts == ["p", "q"]
        assert completions[0] == [{"role": "assistant", "content": "\u00e9"}]
        assert sorted(columns) == ["answer", "level"]
        return [columns["answer"][0], None]

    chats = [[{"role": "assistant", "content": "\u00e9"}], "y"]
    columns = {"answer": [3, 4], "level": ["a", "b"], "completion_ids": [[1], [2]]}
    with RewardServer({"seen": seen}) as server:
        remote = RemoteReward(server.url)
        scores = remote(chats, prompts=["p", "q"], log_metric=print, trainer_state=None, **columns)
    assert scores == [3.0, None]


def test_ids_and_columns_on_request() -> None:
    def ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        assert set(columns) == {"completions", "a"}
        return [float(len(row)) for row in completion_ids]

    with RewardServer({"ids": ids}) as server:
        remote = RemoteReward(server.url, send_ids=True, columns=["a"])
        assert remote(["x"], completion_ids=[[1, 2]], a=[1], b=[object()]) == [2.0]
        with pytest.raises(RewardError, match="missing: c; available: a"):
            RemoteReward(server.url, columns=["c"])(["x"], a=[1])
        with pytest.raises(RewardError, match=r"columns=\["):
            RemoteReward(server.url)(["x"], b=[object()])
        with pytest.raises(RewardError, match="2 values for 1 completions"):
            RemoteReward(server.url)(["x"], b=[1, 2])


@pytest.mark.parametrize(
    "failures",
    [
        [b"HTTP/1.0 503 Busy\r\nRetry-After: 0\r\n\r\nbusy"] * 2,
        [b""],  # a dropped connection
        [b"HTTP/1.0 200 OK\r\nContent-Length: 999\r\n\r\n{"],  # an answer that was cut off
    ],
)
def test_a_failing_server_is_asked_again(failures: list[bytes]) -> None:
    answers = [*failures, ok({"rewards": [1.5]})]
    with raw_server(lambda number, _: answers[number - 1]) as (url, requests):
        assert RemoteReward(url, **QUICK)(["x"]) == [1.5]
    assert len(requests) == len(answers)
    assert requests[0].startswith("POST /score HTTP/1.1")


def test_retries_end() -> None:
    answer = b"HTTP/1.0 500 Broken\x1b[2J\r\n\r\nsecret cause"
    message = r"500 Broken\ufffd\[2J: secret cause \(3 attempts"
    with (
        raw_server(lambda *_: answer) as (url, requests),
        pytest.raises(RewardError, match=message),
    ):
        RemoteReward(url, retries=2, **QUICK)(["x"])
    assert len(requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 301, 302, 307])
def test_refusals_are_not_repeated_and_redirects_not_followed(status: int) -> None:
    answer = f"HTTP/1.0 {status} No\r\nLocation: http://127.0.0.1:9/steal\r\n\r\nno".encode()
    message = f"answered {status} No"
    with (
        raw_server(lambda *_: answer) as (url, requests),
        pytest.raises(RewardError, match=message),
    ):
        RemoteReward(url, token="t", **QUICK)(["x"])
    assert len(requests) == 1


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RewardError, match=r"cannot be reached: ConnectionRefusedError.*2 attempts"):
        RemoteReward(f"http://127.0.0.1:{port}", retries=1, **QUICK)(["x"])


def test_a_server_that_drips_for_ever_is_left_in_time() -> None:
    with raw_server(lambda *_: None) as (url, _):
        began = time.perf_counter()
        with pytest.raises(RewardError, match=r"no answer after 0\.3 s"):
            RemoteReward(url, timeout=0.3, retries=0)(["x"])
        assert time.perf_counter() - began < 60


def test_the_time_limit_is_for_all_attempts() -> None:
    answer = b"HTTP/1.0 503 Busy\r\nRetry-After: 3600\r\n\r\n"
    with raw_server(lambda *_: answer) as (url, requests):
        began = time.perf_counter()
        with pytest.raises(RewardError, match="503 Busy"):
            RemoteReward(url, retries=100, time_limit=60.0, timeout=60.0)(["x"])
        assert time.perf_counter() - began < 60
    assert len(requests) == 1


@pytest.mark.parametrize(
    "answer",
    [b"", b"no json", b"[1]", b'{"rewards": 1}', b'{"rewards": []}', b'{"rewards": [1, 2]}',
     b'{"rewards": ["1"]}', b'{"rewards": [NaN]}', b'{"rewards": [1e999]}', b'{"rewards": [true]}',
     b'{"rewards": [1' + b"0" * 400 + b"]}", b'{"rewards": ' + b"[" * 100_000,
     b'{"rewards": "' + b"x" * 1_000_000 + b'"}'],
)  # fmt: skip
def test_nonsense_is_an_error(answer: bytes) -> None:
    whole = b"HTTP/1.0 200 OK\r\n\r\n" + answer
    with (
        raw_server(lambda *_: whole) as (url, _),
        pytest.raises(RewardError, match="reward server") as error,
    ):
        RemoteReward(url, **QUICK)(["x"])
    assert len(str(error.value)) < 400


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardServer({"length": length}, token="right") as server:
        assert httpx.get(server.url.replace("/score", "/health")).status_code == 200  # needs none
        assert RemoteReward(server.url, token="right")(["xy"]) == [2.0]
        for wrong in (None, "", "wrong", "right2"):
            with pytest.raises(RewardError, match=f"401.* set {TOKEN_ENV}"):
                RemoteReward(server.url, token=wrong)(["x"])
        monkeypatch.setenv(TOKEN_ENV, "right")
        remote = RemoteReward(server.url)
        assert remote(["xyz"]) == [3.0]
        assert "right" not in repr(remote)


def test_what_cannot_be_used_is_refused_at_once() -> None:
    for url in ("", "ftp://x", "http://", "http://x:port", "http://user:pw@x", "x:80"):
        with pytest.raises(ConfigError):
            RemoteReward(url)
    for option in (
        {"batch_size": 0},
        {"timeout": 0},
        {"retries": -1},
        {"time_limit": float("nan")},
    ):
        with pytest.raises(ConfigError, match=next(iter(option))):
            RemoteReward("http://x", **option)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="token"):
        RemoteReward("http://x", token="a\r\nb")
    with pytest.raises(ConfigError, match="set a token"):
        RewardServer({"length": length}, host="0.0.0.0")
    with pytest.raises(ConfigError, match="functions must not be empty"):
        RewardServer({})
    with pytest.raises(ConfigError, match="port=99999"):
        RewardServer({"length": length}, port=99999)


def test_a_token_in_the_open_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    RemoteReward("http://10.0.0.1", token="t")
    assert "unencrypted" in caplog.text


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
        assert request(url, good, "/score/length", "GET")[0] == 405
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
    monkeypatch.setattr("kedge.ext.serve.server.MAX_CONNECTIONS", 2)
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
        monkeypatch.setattr("kedge.ext.serve.server.HEAD_SECONDS", 0.2)
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


class Ranks:
    """Two ranks in two threads."""

    size = 2

    def __init__(self, rank: int, shared: Any) -> None:
        self.rank, self.shared = rank, shared

    def run_on_first(self, local: Any, work: Any) -> Any:
        self.shared.local[self.rank] = local
        self.shared.barrier.wait()
        if self.rank == 0:
            self.shared.items = work(self.shared.local)
        self.shared.barrier.wait()
        return self.shared.items[self.rank]


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no route to another machine")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("remote", [False, True])
def test_the_port_is_bound_to_the_address_by_which_ranks_reach_it(remote, monkeypatch) -> None:
    """On one machine that is 127.0.0.1, also where its address in the network is advertised."""
    monkeypatch.setenv("MASTER_ADDR", own := own_address())
    assert rank_rewards.address_of_first() == "127.0.0.1"
    if remote:
        monkeypatch.setattr(rank_rewards, "address_of_first", lambda: own)
    bound: list[str] = []

    class Listener(rank_rewards.Listener):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            bound.append(self._listener._socket.getsockname()[0])

    monkeypatch.setattr(rank_rewards, "Listener", Listener)
    shared = SimpleNamespace(local=[None, None], items=None, barrier=threading.Barrier(2))
    reward = SimpleNamespace(score=lambda rollout: rollout + 1)
    scheduler: Any = SimpleNamespace(collector=SimpleNamespace(reward=reward))
    ranks: Any = [Ranks(n, shared) for n in range(2)]
    other = threading.Thread(target=rank_rewards.connect, args=(ranks[1], scheduler), daemon=True)
    other.start()
    (connected,) = rank_rewards.connect(ranks[0], scheduler)
    assert bound == [own if remote else "127.0.0.1"]
    assert connected.score(1) == 2
    connected._connection.close()
