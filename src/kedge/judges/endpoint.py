"""Judge: a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.errors import JudgeError
from kedge.http_client import Reply, excerpt, post, retry_request
from kedge.judges.match import Answer, Pair, Prefer

TEMPLATE = """\
Compare two responses to the same prompt. Judge by how well each does what the prompt asks: \
correct, complete, to the point, well written. Neither length nor order is a merit.

<prompt>
{prompt}
</prompt>

<response_A>
{first}
</response_A>

<response_B>
{second}
</response_B>

Say in one sentence what decides, then end with one line: "Winner: A", "Winner: B" or \
"Winner: tie"."""
_PLACEHOLDERS = re.compile(r"\{(prompt|first|second)\}")
_WORDS = re.compile(r"\bwinner\s*[:=]?\s*[\"'*(\[]*\s*(?:response[_ ])?(a|b|tie)\b", re.IGNORECASE)
_BARE = re.compile(r"[\s\"'*().\[\]]*(a|b|tie)[\s\"'*().\[\]]*", re.IGNORECASE)
MAX_REPLY = 16 << 20  # bytes; much longer than any answer
_MOST_WAIT = 60.0  # seconds between two attempts


class Cache:
    """Replies keyed by request, in an SQLite file that survives kills; thread-safe.

    Without a file, replies are kept in memory.
    """

    def __init__(self, file: str | Path | None) -> None:
        self._lock, path = threading.Lock(), ":memory:"
        try:
            if file is not None:
                path = str(Path(file).expanduser())
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(path, check_same_thread=False, timeout=30)
            weakref.finalize(self, self._base.close)
            self._run("create table if not exists replies (key text primary key, reply text)")
        except (sqlite3.Error, OSError) as error:
            raise JudgeError(
                f"the cache {path} cannot be opened: {error}; choose another file"
            ) from error

    def _run(self, statement: str, *values: str) -> Any:
        with self._lock, self._base:  # the data is on disk when this returns
            return self._base.execute(statement, values).fetchone()

    def get(self, request: Mapping[str, Any]) -> Any:
        """The cached reply, or None."""
        row = self._run("select reply from replies where key = ?", cache_key(request))
        return None if row is None else json.loads(row[0])

    def put(self, request: Mapping[str, Any], reply: Any) -> None:
        """Store a reply."""
        values = cache_key(request), json.dumps(reply)
        try:
            self._run("insert or replace into replies values (?, ?)", *values)
        except sqlite3.Error as error:
            raise JudgeError(f"a reply cannot be written to the cache: {error}") from error


def cache_key(request: Mapping[str, Any]) -> str:
    """A hash of all inputs of a reply."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class Endpoint:
    """Queries ``POST base_url/chat/completions``: a hosted model, or your own ``vllm serve``.

    Replies are cached by all their inputs, so an interrupted run resumes and pays
    for nothing twice.  The key is only read from the environment and never sent to another host:
    redirects are rejected.

    Args:
        base_url: such as ``http://127.0.0.1:8000/v1``.
        model: model name at the endpoint.
        key_env: environment variable with the API key; unset or empty: no key is sent.
        template: text with ``{prompt}``, ``{first}`` and ``{second}``.
        temperature: sampling temperature of the judge.
        max_tokens: maximum tokens of a reply.
        concurrency: concurrent requests.
        timeout: seconds for one request, from the connection to the last byte of the reply.
        retries: maximum retries after a timeout, rate limit or server error.
        cache: file with the replies; None: in memory.
        sleep: function that waits between requests.

    Raises:
        JudgeError: a template without its placeholders, or a cache that cannot be opened.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key_env: str = "OPENAI_API_KEY",
        template: str = TEMPLATE,
        temperature: float = 0.0,
        max_tokens: int = 256,
        concurrency: int = 8,
        timeout: float = 60.0,
        retries: int = 5,
        cache: str | Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        missing = [n for n in ("{prompt}", "{first}", "{second}") if n not in template]
        if missing:
            raise JudgeError(f"template must contain {', '.join(missing)}")
        if not base_url.startswith(("http://", "https://")):
            raise JudgeError(f"base_url={base_url!r} must begin with http:// or https://")
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.name, self.template, self.key_env = model, template, key_env
        self._options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self.concurrency, self.timeout, self.retries = concurrency, timeout, retries
        self._cache, self._sleep = Cache(cache), sleep
        self._stop = threading.Event()

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """Answer each pair; a reply is cached even if other pairs fail.

        Raises:
            JudgeError: the endpoint rejects requests, or some pairs have no reply.
        """
        self._stop.clear()
        self._headers()  # reject an invalid key before the first request
        with ThreadPoolExecutor(self.concurrency) as threads:
            running = [threads.submit(self._ask, pair) for pair in pairs]
            try:
                failures = [e for future in running if (e := future.exception()) is not None]
            except BaseException:  # Ctrl-C
                self._stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        if failures:
            done = len(pairs) - len(failures)
            raise JudgeError(
                f"{self.url}: {failures[0]} ({done} of {len(pairs)} pairs are answered and"
                " cached; run again to continue with the rest)"
            ) from failures[0]
        return [future.result() for future in running]

    def _ask(self, pair: Pair) -> Answer:
        # A single pass, since texts may contain braces.
        text = _PLACEHOLDERS.sub(lambda match: str(getattr(pair, match[1])), self.template)
        body = {"messages": [{"role": "user", "content": text}], **self._options}
        request = {"url": self.url, **body}
        reply = self._cache.get(request)
        known = reply is not None
        if not known:
            reply = self._reply(body)
            self._cache.put(request, reply)
        text = reply.pop("text")
        return Answer(prefer=winner_in(text), reply=text, cached=known, **reply)

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply of the endpoint, with retries."""
        content: dict[str, Any] = {}

        def send() -> Reply:
            if self._stop.is_set():
                return Reply(problem="not sent, because the endpoint rejects requests")
            reply = post(
                self.url,
                json.dumps(body).encode(),
                self._headers(),
                seconds=self.timeout,
                most=MAX_REPLY,
                proxies=True,
            )
            if reply.status != 200:
                return replace(reply, retry_after=min(reply.retry_after, _MOST_WAIT))
            try:
                content.update(_parse_reply(reply.body))
            except ValueError as error:
                return replace(reply, status=0, problem=str(error), retry=True)
            return reply

        reply, sent = retry_request(
            send, retries=self.retries, backoff=1.0, longest_wait=_MOST_WAIT, sleep=self._sleep
        )
        if content:
            return content
        if reply.retry:
            raise JudgeError(f"no reply after {sent} requests; the last: {reply.problem}")
        if reply.status:  # all pairs would be rejected, too
            self._stop.set()
            raise JudgeError(f"{reply.problem}; check model, key ({self.key_env}) and URL")
        raise JudgeError(reply.problem)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.key_env, "")
        if not (key.isascii() and key.isprintable()):
            raise JudgeError(
                f"the key in {self.key_env} must be one line of printable ASCII; it is not shown"
                " here"
            )
        return {"Authorization": f"Bearer {key}"} if key else {}


def _parse_reply(body: bytes) -> dict[str, Any]:
    """Text and token counts of a reply; raises ValueError for anything but a chat completion."""
    try:
        reply = json.loads(body)
        text = str(reply["choices"][0]["message"]["content"] or "")
        usage = reply.get("usage") or {}
        return {
            # Encoding a lone surrogate fails.
            "text": text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
            "prompt_tokens": int(usage.get("prompt_tokens") or 0),
            "completion_tokens": int(usage.get("completion_tokens") or 0),
        }
    except Exception as error:  # the server may send anything
        raise ValueError(f"the reply has no choices: {excerpt(body)}") from error


def winner_in(text: str) -> Prefer:
    """Parse the verdict: the last "Winner: ...", or a reply that is just A, B or tie."""
    whole = _BARE.fullmatch(text)
    winners = [whole[1]] if whole else _WORDS.findall(text)
    sides: dict[str, Prefer] = {"a": "first", "b": "second", "tie": "tie"}
    return sides[winners[-1].lower()] if winners else "invalid"
