"""Rewards from a remote server, over HTTP.

A request is ``POST`` with the JSON
``{"prompts": [...], "completions": [...], "columns": {name: [...]}}``;
the response is ``{"rewards": [...]}``, one number or null (not applicable) per completion.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kedge.http_client import Reply, excerpt, post, retry_request
from kedge.records.errors import ConfigError, RewardError
from kedge.verifiers.base import map_parallel, read_column, read_scores

logger = logging.getLogger(__name__)

TOKEN_ENV = "KEDGE_REWARD_TOKEN"
LONGEST_WAIT = 30.0  # seconds between two attempts
REPORTS = ("log_metric", "log_extra", "trainer_state", "prompt_ids")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class RemoteReward:
    """A reward function that queries a server, such as ``kedge serve-reward``.

    Rows are sent in concurrent batches.  Transient failures (no connection, timeout, a busy or
    failing server) are retried with exponential backoff; rejected requests are not.

    Args:
        url: ``http://`` or ``https://`` URL of the server; without a path, ``/score`` is added.
        token: sent as ``Authorization: Bearer``; default: the environment variable
            ``KEDGE_REWARD_TOKEN``, if set.
        batch_size: rows per request.
        concurrency: concurrent requests.
        timeout: seconds for one request, from the first byte to the last.
        time_limit: seconds for one call with all its requests and waits.
        retries: maximum retries per request.
        backoff: seconds before the first retry, doubled each time.
        columns: dataset columns to send; None: all.
        send_ids: also send ``completion_ids``.
        name: reward source in the reward output.

    Raises:
        ConfigError: the URL is invalid, or a number is out of range.
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
        self._url, self._shown = _parse_url(url)
        self._token = token if token is not None else os.environ.get(TOKEN_ENV)
        if self._token is not None and not (self._token.isascii() and self._token.isprintable()):
            raise ConfigError("the token of a remote reward must be one line of printable ASCII")
        self._batch, self._concurrency = batch_size, concurrency
        self._timeout, self._time_limit = timeout, time_limit
        self._retries, self._backoff = retries, backoff
        self._columns, self._send_ids = columns, send_ids
        parts = urlsplit(url)
        if self._token and parts.scheme == "http" and parts.hostname not in LOOPBACK:
            logger.warning("the token for %s is sent unencrypted; use https", self._shown)

    def __repr__(self) -> str:
        return f"RemoteReward({self._shown!r})"

    def __call__(
        self, completions: Sequence[Any], prompts: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """Score all rows.

        Raises:
            RewardError: the server rejected a request, timed out, or sent an invalid response.
        """
        until = time.monotonic() + self._time_limit
        selected = self._select_columns(columns, len(completions))
        starts = range(0, len(completions), self._batch)

        def score_batch(start: int) -> list[float | None]:
            rows = slice(start, start + self._batch)
            body: dict[str, Any] = {
                "completions": list(completions[rows]),
                "columns": {name: values[rows] for name, values in selected.items()},
            }
            if prompts is not None:
                body["prompts"] = list(prompts[rows])
            try:
                data = json.dumps(body, allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                raise RewardError(
                    f"{self.__name__}: a dataset column cannot be sent as JSON ({error}); list the"
                    " columns to send with columns=[...]"
                ) from error
            return self._request(data, len(body["completions"]), until)

        answers = map_parallel(score_batch, list(starts), self._concurrency)
        return [reward for answer in answers for reward in answer]

    def _select_columns(self, columns: dict[str, Any], rows: int) -> dict[str, list[Any]]:
        skipped = REPORTS if self._send_ids else (*REPORTS, "completion_ids")
        wanted = [key for key in columns if key not in skipped]
        if self._columns is not None:
            missing = [key for key in self._columns if key not in columns]
            if missing:
                raise RewardError(
                    f"{self.__name__}: columns={list(self._columns)} must exist in the dataset;"
                    f" missing: {', '.join(missing)}; available: {', '.join(wanted)}"
                )
            wanted = [*self._columns, *(["completion_ids"] if self._send_ids else [])]
        return {key: read_column(columns, key, rows, self.__name__) for key in wanted}

    def _request(self, body: bytes, rows: int, until: float) -> list[float | None]:
        shown = self._shown

        def send() -> Reply:
            seconds = min(self._timeout, until - time.monotonic())
            if seconds <= 0:
                return Reply(problem="did not answer within the time limit")
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            return post(self._url, body, headers, seconds=seconds)

        reply, attempts = retry_request(
            send,
            retries=self._retries,
            backoff=self._backoff,
            longest_wait=LONGEST_WAIT,
            until=until,
            on_retry=lambda reply: logger.warning(
                "reward server %s %s; retrying", shown, reply.problem
            ),
        )
        if reply.status != 200:
            hint = f"; pass token= or set {TOKEN_ENV}" if reply.status == 401 else ""
            elapsed = self._time_limit - (until - time.monotonic())
            raise RewardError(
                f"reward server {shown} {reply.problem}{hint} ({attempts} attempts, {elapsed:.1f}"
                " s)"
            )
        try:
            rewards = json.loads(reply.body)["rewards"]
            if bool in map(type, rewards):
                raise ValueError("returned true or false, not a number or null")
            return read_scores(rewards, rows)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RewardError(
                f'reward server {shown} must answer {{"rewards": [...]}}, one number or null for'
                f" each of {rows} completions, got {excerpt(reply.body, 80)!r} ({str(error)[:80]})"
            ) from error


def _parse_url(url: str) -> tuple[str, str]:
    """The URL, and its form for messages: without the query, which may hold a secret."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # an invalid port raises
    except ValueError as error:
        raise ConfigError(f"url={url!r} is not a valid URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url={url!r} must be http://host:port/path or https://host/path")
    if parts.username or parts.password:
        raise ConfigError("the URL of a reward server must not contain a password; use token=")
    path = parts.path if parts.path not in ("", "/") else "/score"
    shown = f"{parts.scheme}://{parts.netloc}{path}"
    return shown + (f"?{parts.query}" if parts.query else ""), shown
