"""Rewards over HTTP: the client."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest

from kedge.errors import ConfigError, RewardError
from kedge.verifiers import RemoteReward
from kedge.verifiers.remote import TOKEN_ENV
from kedge.verifiers.server import RewardServer

from .reward_servers import QUICK, length, ok, raw_server


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
