"""A language model behind an OpenAI-compatible endpoint as a judge."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.errors import JudgeError
from kedge.http_client import Reply, excerpt, post, retried
from kedge.judges.base import Answer, Pair, Prefer
from kedge.judges.cache import Cache

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
_PLACES = re.compile(r"\{(prompt|first|second)\}")
_WORDS = re.compile(r"\bwinner\s*[:=]?\s*[\"'*(\[]*\s*(?:response[_ ])?(a|b|tie)\b", re.IGNORECASE)
_BARE = re.compile(r"[\s\"'*().\[\]]*(a|b|tie)[\s\"'*().\[\]]*", re.IGNORECASE)
MAX_REPLY = 16 << 20  # bytes; far more than any answer has
_MOST_WAIT = 60.0  # seconds between two requests


class Endpoint:
    """Asks ``POST base_url/chat/completions``: a hosted model, or a ``vllm serve`` of yours.

    Replies are cached by everything that they depend on, so that a run that was killed resumes
    where it was and pays for nothing twice.  The key is read from the environment alone, and sent
    to no other host: redirects are refused.

    Args:
        base_url: such as ``http://127.0.0.1:8000/v1``.
        model: as the endpoint calls it.
        key_env: environment variable with the key; unset or empty there: no key is sent.
        template: text with ``{prompt}``, ``{first}`` and ``{second}``.
        temperature: of the judge.
        max_tokens: most tokens that it may say.
        concurrency: requests at the same time.
        timeout: seconds for one request, from the connection to the last byte of the reply.
        retries: how often a request that ran into a timeout, a rate limit or a server error is
            repeated.
        cache: file with the replies; None: this process's memory.
        sleep: waits between requests.

    Raises:
        JudgeError: a template without its places, or a cache that cannot be opened.
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
            raise JudgeError(f"the judge's template has no {', '.join(missing)}; add it")
        if not base_url.startswith(("http://", "https://")):
            raise JudgeError(f"base_url={base_url!r} must begin with http:// or https://")
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.model, self.template, self.key_env = model, template, key_env
        self.temperature, self.max_tokens = temperature, max_tokens
        self.concurrency, self.timeout, self.retries = concurrency, timeout, retries
        self._cache, self._sleep = Cache(cache), sleep
        self._stop = threading.Event()

    @property
    def name(self) -> str:
        """The model's."""
        return self.model

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer per pair; every reply is in the cache, whatever happens to the other pairs.

        Raises:
            JudgeError: the endpoint refuses, or some pairs have no reply.
        """
        self._stop.clear()
        self._headers()  # a key that cannot be sent is refused before anything is asked
        with ThreadPoolExecutor(self.concurrency) as threads:
            running = [threads.submit(self._ask, pair) for pair in pairs]
            try:
                failures = [e for each in running if (e := each.exception()) is not None]
            except BaseException:  # Ctrl-C
                self._stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        if failures:
            done = len(pairs) - len(failures)
            raise JudgeError(
                f"{self.url}: {failures[0]} ({done} of {len(pairs)} pairs have an answer, which is"
                " cached; run it again to ask for the rest)"
            ) from failures[0]
        return [each.result() for each in running]

    def _ask(self, pair: Pair) -> Answer:
        # In one pass, so that texts may contain braces.
        text = _PLACES.sub(lambda place: str(getattr(pair, place[1])), self.template)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        asked = {"url": self.url, **body}
        reply = self._cache.get(asked)
        known = reply is not None
        if not known:
            reply = self._reply(body)
            self._cache.put(asked, reply)
        return Answer(
            prefer=winner_in(reply["text"]),
            said=reply["text"],
            prompt_tokens=reply["prompt_tokens"],
            completion_tokens=reply["completion_tokens"],
            cached=known,
        )

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the endpoint says, after as many requests as it takes."""
        found: dict[str, Any] = {}

        def send() -> Reply:
            if self._stop.is_set():
                return Reply(problem="not asked, since the endpoint refuses")
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
                found.update(_read(reply.body))
            except ValueError as error:
                return replace(reply, status=0, problem=str(error), retry=True)
            return reply

        reply, sent = retried(
            send, retries=self.retries, backoff=1.0, longest_wait=_MOST_WAIT, sleep=self._sleep
        )
        if found:
            return found
        if reply.retry:
            raise JudgeError(f"no reply after {sent} requests; the last: {reply.problem}")
        if reply.status:  # a refusal, which all pairs would get
            self._stop.set()
            raise JudgeError(f"{reply.problem}; see model, key ({self.key_env}) and URL")
        raise JudgeError(reply.problem)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.key_env, "")
        if not (key.isascii() and key.isprintable()):
            raise JudgeError(
                f"the key in {self.key_env} must be one line of printable ASCII; it is not shown"
                " here"
            )
        return {"Authorization": f"Bearer {key}"} if key else {}


def _read(body: bytes) -> dict[str, Any]:
    """Text and tokens of a reply.

    Raises:
        ValueError: it is not a reply of the chat completions API.
    """
    try:
        found = json.loads(body)
        text = str(found["choices"][0]["message"]["content"] or "")
        used = found.get("usage") or {}
        return {
            # Half of a surrogate pair alone can be written to no file.
            "text": text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
            "prompt_tokens": int(used.get("prompt_tokens") or 0),
            "completion_tokens": int(used.get("completion_tokens") or 0),
        }
    except (
        *(ValueError, KeyError, IndexError, TypeError),
        *(AttributeError, OverflowError, RecursionError),
    ) as error:
        raise ValueError(f"a reply without choices: {excerpt(body)}") from error


def winner_in(text: str) -> Prefer:
    """What a judge's words come to: the last "Winner: ...", or an answer that is nothing else."""
    found = _WORDS.findall(text)
    if not found:
        whole = _BARE.fullmatch(text)
        found = [whole[1]] if whole else []
    if not found:
        return "invalid"
    said: dict[str, Prefer] = {"a": "first", "b": "second", "tie": "tie"}
    return said[found[-1].lower()]
