"""Pairwise evaluation after training: judges that training never used, and matches by them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np

from kedge.http_client import Reply, excerpt, post, retry_request
from kedge.math.intervals import share_interval
from kedge.records.errors import JudgeError

Prefer = Literal["first", "second", "tie", "invalid"]
Preference = Callable[[list[str], list[str], list[str]], Sequence[float | None]]
Score = Callable[[list[str], list[str]], Sequence[float | None]]
Outcome = Literal["win", "loss", "tie", "invalid"]
# Points of an outcome; an invalid answer has none.
WORTH: dict[str, float] = {"win": 1.0, "tie": 0.5, "loss": 0.0}
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


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a prompt, in the order shown to the judge."""

    prompt: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A judge's answer about a pair."""

    prefer: Prefer  # the better answer; "invalid" if the reply names none
    reply: str = ""  # text of the reply, if any
    prompt_tokens: int = 0  # tokens read, as reported by the judge
    completion_tokens: int = 0  # tokens generated
    cached: bool = False  # the reply came from the cache, at no cost


class Judge(Protocol):
    """Decides which of two answers is better."""

    name: str  # shown in tables

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer per pair, in order.

        Raises:
            JudgeError: the judge failed or cannot be reached.
        """
        ...


class FunctionJudge:
    """Wraps ``f(prompts, firsts, seconds)``, which returns how likely each first answer is better.

    1: the first is better, 0: the second, 0.5: a tie, None: no answer.

    Args:
        function: see above.
        name: shown in tables; default: the name of the function.
    """

    def __init__(self, function: Preference, name: str | None = None) -> None:
        self._function, self.name = function, name or _name(function)

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer per pair.

        Raises:
            JudgeError: the function raised, or returned invalid values.
        """
        columns = [[getattr(p, n) for p in pairs] for n in ("prompt", "first", "second")]
        values = _call(self._function, columns, len(pairs), self.name)
        for value in values:
            if value is not None and not 0 <= value <= 1:
                raise JudgeError(
                    f"judge {self.name} must return numbers from 0 (second) to 1 (first),"
                    f" got {value!r}"
                )
        return [Answer(prefer=_preference(value, 0.5)) for value in values]


class ScoreJudge:
    """Compares the scores that ``f(prompts, answers)`` gives to each answer separately.

    Args:
        score: see above; None means no answer.
        name: shown in tables.
        margin: scores closer than this are a tie.
    """

    def __init__(self, score: Score, name: str | None = None, *, margin: float = 0.0) -> None:
        self._score, self._margin, self.name = score, margin, name or _name(score)

    def judge(self, pairs: Sequence[Pair]) -> list[Answer]:
        """One answer per pair.

        Raises:
            JudgeError: the function raised, or returned invalid values.
        """
        answers = [p.first for p in pairs] + [p.second for p in pairs]
        columns = [[p.prompt for p in pairs] * 2, answers]
        scores = _call(self._score, columns, len(answers), self.name)
        return [
            Answer(prefer="invalid")
            if a is None or b is None
            else Answer(prefer=_preference(a, b, self._margin), reply=f"{a:.6g} {b:.6g}")
            for a, b in zip(scores[: len(pairs)], scores[len(pairs) :], strict=True)
        ]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _preference(value: float | None, other: float, margin: float = 0.0) -> Prefer:
    if value is None:
        return "invalid"
    if abs(value - other) <= margin:
        return "tie"
    return "first" if value > other else "second"


def _call(
    function: Callable[..., Sequence[float | None]], columns: list[list[str]], rows: int, name: str
) -> list[float | None]:
    try:
        values = [None if x is None else float(x) for x in function(*columns)]
    except Exception as error:
        raise JudgeError(f"judge {name} raised {type(error).__name__}: {error}") from error
    if len(values) != rows:
        raise JudgeError(f"judge {name} must return {rows} values, got {len(values)}")
    return [None if x is None or math.isnan(x) else x for x in values]


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
        row = self._run("select reply from replies where key = ?", _cache_key(request))
        return None if row is None else json.loads(row[0])

    def put(self, request: Mapping[str, Any], reply: Any) -> None:
        """Store a reply."""
        values = _cache_key(request), json.dumps(reply)
        try:
            self._run("insert or replace into replies values (?, ?)", *values)
        except sqlite3.Error as error:
            raise JudgeError(f"a reply cannot be written to the cache: {error}") from error


def _cache_key(request: Mapping[str, Any]) -> str:
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


# -- matches ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt of a match."""

    prompt: str
    ours: str
    theirs: str
    swapped: bool  # the judge saw theirs first
    outcome: Outcome
    answer: Answer


@dataclass(frozen=True, slots=True)
class Match:
    """All rows of a match, and their statistics."""

    judge: str
    rows: list[Row]

    def count(self, outcome: Outcome) -> int:
        """Number of rows with this outcome."""
        return sum(row.outcome == outcome for row in self.rows)

    @property
    def win_rate(self) -> float:
        """Share of wins among the valid answers; a tie counts half."""
        return fmean(self._worths())

    def interval(self, *, level: float = 0.95) -> tuple[float, float]:
        """Interval of the win rate over prompts; a prompt may have several answers."""
        self._worths()  # an error if there is no valid answer
        groups: dict[str, list[float]] = {}
        for row in self.rows:
            if (worth := WORTH.get(row.outcome)) is not None:
                groups.setdefault(row.prompt, []).append(worth)
        return share_interval(list(groups.values()), level=level)

    @property
    def length_controlled(self) -> float | None:
        """Length-controlled win rate: the estimate for answers of equal length.

        A logistic regression of the outcome on a constant and tanh(difference of lengths in
        characters / its standard deviation); the rate at difference 0.  This is the model of Dubois
        et al. 2024 (arXiv:2404.04475), equation 2, without its term for how hard a prompt is.
        None if the answers do not differ in length, or length alone determines the outcome.
        """
        worths = np.array(self._worths())
        gaps = np.array(
            [len(row.ours) - len(row.theirs) for row in self.rows if row.outcome != "invalid"]
        )
        if len(set(gaps.tolist())) < 2:
            return None
        constant = _logistic(np.tanh(gaps / math.sqrt((gaps**2).mean())), worths)
        return None if constant is None else 1 / (1 + math.exp(-constant))

    def summary(self) -> dict[str, float | int | str | None]:
        """All statistics, as JSON values."""
        low, high = self.interval()
        answers = [row.answer for row in self.rows]
        return {
            "judge": self.judge,
            "prompts": len(self.rows),
            "wins": self.count("win"),
            "losses": self.count("loss"),
            "ties": self.count("tie"),
            "invalid": self.count("invalid"),
            "win_rate": self.win_rate,
            "win_rate_low": low,
            "win_rate_high": high,
            "length_controlled_win_rate": self.length_controlled,
            "mean_length_ours": fmean([len(row.ours) for row in self.rows]),
            "mean_length_theirs": fmean([len(row.theirs) for row in self.rows]),
            "first_preferred": fmean([float(row.answer.prefer == "first") for row in self.rows]),
            "prompt_tokens": sum(a.prompt_tokens for a in answers if not a.cached),
            "completion_tokens": sum(a.completion_tokens for a in answers if not a.cached),
            "cached": sum(a.cached for a in answers),
        }

    def _worths(self) -> list[float]:
        worths = [value for row in self.rows if (value := WORTH.get(row.outcome)) is not None]
        if not worths:
            raise JudgeError(f"judge {self.judge} gave no valid answer to {len(self.rows)} pairs")
        return worths


def match(
    prompts: Sequence[str],
    ours: Sequence[str],
    theirs: Sequence[str],
    judge: Judge,
    *,
    seed: int = 0,
) -> Match:
    """Have a judge compare two answers to every prompt, in random order.

    Args:
        prompts: the prompts.
        ours: answers to compute the win rate of.
        theirs: answers to compare with.
        judge: compares them.
        seed: seed of the order in which the judge sees the two answers.

    Raises:
        JudgeError: there is nothing to compare, or the judge failed.
    """
    if not prompts or not len(prompts) == len(ours) == len(theirs):
        raise JudgeError(
            f"prompts, ours and theirs must have the same, nonzero length; got {len(prompts)},"
            f" {len(ours)} and {len(theirs)}"
        )
    keys = (f"{seed}/{i}/{x}".encode(errors="surrogatepass") for i, x in enumerate(prompts))
    swaps = [bool(hashlib.blake2b(key, digest_size=1).digest()[0] & 1) for key in keys]
    pairs = [
        Pair(prompt, b, a) if swap else Pair(prompt, a, b)
        for prompt, a, b, swap in zip(prompts, ours, theirs, swaps, strict=True)
    ]
    answers = judge.judge(pairs)
    rows = []
    for p, a, b, swap, answer in zip(prompts, ours, theirs, swaps, answers, strict=True):
        outcome: Outcome = "win" if (answer.prefer == "first") != swap else "loss"
        if answer.prefer in ("tie", "invalid"):
            outcome = answer.prefer
        rows.append(Row(prompt=p, ours=a, theirs=b, swapped=swap, outcome=outcome, answer=answer))
    return Match(judge.name, rows)


def rank(
    prompts: Sequence[str], answers: Mapping[str, Sequence[str]], judge: Judge, *, seed: int = 0
) -> dict[str, float]:
    """Round robin: name -> mean win rate over its matches, best first."""
    if len(answers) < 2:
        raise JudgeError(f"a ranking needs at least two sets of answers, got {len(answers)}")
    rates: dict[str, list[float]] = {name: [] for name in answers}
    for one, other in combinations(answers, 2):
        rate = match(prompts, answers[one], answers[other], judge, seed=seed).win_rate
        rates[one].append(rate)
        rates[other].append(1 - rate)
    means = {name: fmean(values) for name, values in rates.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _logistic(xs: Any, ys: Any) -> float | None:
    """The constant of a logistic regression on x by Newton's method; None if it diverges."""
    design, fit = np.stack([np.ones(len(xs)), xs], 1), np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-(design @ fit).clip(-30, 30)))
        hessian = (design.T * (p * (1 - p))) @ design
        if np.linalg.det(hessian) < 1e-12 or (abs(fit) > (20, 40)).any():
            return None  # the outcomes are linearly separable
        step = np.linalg.solve(hessian, design.T @ (ys - p))
        fit += step
        if abs(step).sum() < 1e-9:
            return float(fit[0])
    return None
