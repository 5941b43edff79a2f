"""JSON requests over HTTP with a deadline for the whole request and a size limit for the reply.

Redirects are not followed, so that a key or token is sent only to the host it is meant for.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kedge.background import on_event_loop
from kedge.redaction import redact, remember

MAX_REPLY = 64 << 20  # bytes of a response
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # statuses that may succeed later


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of one request."""

    status: int = 0  # of HTTP; 0 if the server did not answer
    body: bytes = b""  # if within the size limit
    problem: str = ""  # if the request failed
    retry: bool = False  # the same request may succeed later
    retry_after: float = 0.0  # seconds to wait, as requested by the server


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    seconds: float,
    most: int = MAX_REPLY,
    proxies: bool = False,
) -> Reply:
    """Send JSON; network and server failures are returned, not raised.

    ``seconds`` is the deadline from connecting to the last byte of the reply, ``most`` its largest
    size in bytes, and ``proxies`` are those of the environment (``HTTPS_PROXY``, ...).
    """
    import httpx

    remember(headers.get("Authorization", "").removeprefix("Bearer "))
    job = _post(url, body, {"Content-Type": "application/json", **headers}, most, proxies)
    try:
        return on_event_loop(asyncio.wait_for(job, seconds), "http").result()
    except (TimeoutError, asyncio.TimeoutError):
        return Reply(problem=f"no answer after {seconds:.1f} s", retry=True)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        cause = _root_cause(error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Reply(problem=f"is not trusted: {cause}")
        return Reply(problem=f"cannot be reached: {type(cause).__name__}: {cause}", retry=True)


def retry_request(
    send: Callable[[], Reply],
    *,
    retries: int,
    backoff: float,
    longest_wait: float,
    sleep: Callable[[float], object] = time.sleep,
    until: float = float("inf"),
    on_retry: Callable[[Reply], object] | None = None,
) -> tuple[Reply, int]:
    """Send until a reply needs no retry; returns the last reply and the number of requests.

    The first pause has ``backoff`` seconds, doubled each time up to ``longest_wait``; up to half is
    cut at random, and a longer Retry-After is respected.  No pause extends beyond ``until``, in
    ``time.monotonic()``.
    """
    for sent in range(1, retries + 2):
        reply = send()
        pause = min(backoff * 2.0 ** (sent - 1), longest_wait) * random.uniform(0.5, 1.0)
        pause = max(pause, reply.retry_after)
        if not reply.retry or sent > retries or time.monotonic() + pause >= until:
            break
        if on_retry is not None:
            on_retry(reply)
        sleep(pause)
    return reply, sent


def excerpt(body: bytes, most: int = 200) -> str:
    """The start of a reply's body as one line of text, without control characters or secrets."""
    text = " ".join(str(redact(body[: 8 * most].decode(errors="replace"))).split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= most else text[:most] + "..."


async def _post(
    url: str, body: bytes, headers: Mapping[str, str], most: int, proxies: bool
) -> Reply:
    import httpx

    headers = {"Accept": "application/json", "Accept-Encoding": "identity", **headers}
    async with (
        httpx.AsyncClient(verify=_ssl_context(), timeout=None, trust_env=proxies) as client,
        client.stream("POST", url, content=body, headers=headers) as response,
    ):
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > most:
                return Reply(problem=f"answered with more than {most} bytes")
    status = response.status_code
    reason = excerpt(response.reason_phrase.encode(errors="replace"))
    redirect = " (redirects are not followed)" if 300 <= status < 400 else ""
    pause = response.headers.get("Retry-After", "")  # in seconds; a date is ignored
    return Reply(
        status=status,
        body=bytes(data),
        problem=f"answered {status} {reason}: {excerpt(bytes(data))}{redirect}",
        retry=status in RETRIED,
        retry_after=float(pause) if re.fullmatch(r"\d{1,9}(\.\d*)?", pause) else 0.0,
    )


_ssl_context = functools.cache(ssl.create_default_context)  # reading certificates is slow


def _root_cause(error: BaseException) -> BaseException:
    """The innermost OSError in the chain of causes, or the error itself."""
    cause = error.__cause__ or error.__context__
    inner = error if cause is None else _root_cause(cause)
    return inner if isinstance(inner, OSError) else error
