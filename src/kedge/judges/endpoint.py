"""A language model behind an OpenAI-compatible endpoint as a judge."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kedge.errors import JudgeError
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
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_MOST_WAIT = 60.0  # seconds between two tries


class Endpoint:
    """Asks ``POST base_url/chat/completions``: a hosted model, or a ``vllm serve`` of yours.

    Replies are cached by everything that they depend on, so that a run that was killed goes on
    where it was and pays for nothing twice.  The key is read from the environment alone.

    Args:
        base_url: such as ``http://127.0.0.1:8000/v1``.
        model: as the endpoint calls it.
        key_env: environment variable with the key; unset or empty there: no key is sent.
        template: text with ``{prompt}``, ``{first}`` and ``{second}``.
        temperature: of the judge.
        max_tokens: most tokens that it may say.
        concurrency: requests at the same time.
        timeout: seconds for one request.
        retries: tries after the first that failed by time-out, rate limit or server error.
        cache: file with the replies; None: this process's memory.
        sleep: waits between tries.

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
        """One answer a pair; what could be asked is in the cache, whatever happens to the rest.

        Raises:
            JudgeError: the endpoint refuses, or some pairs stayed without a reply.
        """
        self._stop.clear()
        with ThreadPoolExecutor(self.concurrency) as threads:
            running = [threads.submit(self._ask, pair) for pair in pairs]
        failures = [e for each in running if (e := each.exception()) is not None]
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
        """The endpoint's reply, after as many tries as it takes."""
        problem = ""
        for turn in range(self.retries + 1):
            if self._stop.is_set():
                raise JudgeError("not asked, since the endpoint refuses")
            try:
                return self._once(body)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {_short(error.read())}"
                if error.code not in _AGAIN:
                    self._stop.set()
                    raise JudgeError(
                        f"{problem}; see model, key ({self.key_env}) and URL"
                    ) from error
                wait = _asked_to_wait(error)
            except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
                problem, wait = f"{type(error).__name__}: {error}", None
            if turn < self.retries:
                pause = min(2.0**turn, _MOST_WAIT) * (0.5 + random.random() / 2)
                self._sleep(min(wait, _MOST_WAIT) if wait is not None else pause)
        raise JudgeError(f"no reply after {self.retries + 1} tries; the last: {problem}")

    def _once(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            found = json.loads(answer.read())
        try:
            text = found["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"a reply without choices: {_short(json.dumps(found).encode())}"
            ) from error
        used = found.get("usage") or {}
        return {
            "text": str(text),
            "prompt_tokens": int(used.get("prompt_tokens") or 0),
            "completion_tokens": int(used.get("completion_tokens") or 0),
        }


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


def _asked_to_wait(error: urllib.error.HTTPError) -> float | None:
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except ValueError:
        return None


def _short(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return text if len(text) <= 200 else text[:200] + "..."
