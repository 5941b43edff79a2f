"""JSON requests over HTTP that always end: a deadline for the whole request, a limit on the reply.

Redirects are not followed, so that a key or token reaches only the host that it was given for.
"""

from __future__ import annotations

import asyncio
import functools
import random
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

MAX_REPLY = 64 << 20  # bytes
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # may succeed later


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one request returned.

    Args:
        status: of HTTP; 0 if the server did not answer.
        body: of a reply within the size limit.
        problem: for the error message, where the request did not succeed.
        retry: whether the same request may succeed later.
        retry_after: seconds that the server asks to wait.
    """

    status: int = 0
    body: bytes = b""
    problem: str = ""
    retry: bool = False
    retry_after: float = 0.0


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    seconds: float,
    most: int = MAX_REPLY,
    proxies: bool = False,
) -> Reply:
    """Send one request; failures of network and server are returned, not raised.

    Args:
        url: ``http://`` or ``https://``.
        body: JSON.
        headers: in addition to the Content-Type.
        seconds: from the start of the connection to the last byte of the reply.
        most: largest reply, in bytes.
        proxies: whether the environment's proxies (``HTTPS_PROXY``, ...) are used.
    """
    import httpx

    job = _post(url, body, {"Content-Type": "application/json", **headers}, most, proxies)
    try:
        return _wait(asyncio.wait_for(job, seconds))
    except (TimeoutError, asyncio.TimeoutError):
        return Reply(problem=f"no answer after {seconds:.1f} s", retry=True)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        cause = _root(error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Reply(problem=f"is not trusted: {cause}")
        said = f"{type(cause).__name__}: {cause}"
        return Reply(problem=f"cannot be reached: {said}", retry=True)


def retried(
    send: Callable[[], Reply],
    *,
    retries: int,
    backoff: float,
    longest_wait: float,
    sleep: Callable[[float], object] = time.sleep,
    until: float = float("inf"),
    on_retry: Callable[[Reply], object] | None = None,
) -> tuple[Reply, int]:
    """The first reply that needs no retry, or the last one; and how many requests were sent.

    Args:
        send: sends one request.
        retries: most requests after the first.
        backoff: seconds before the first retry, doubled each time, less up to half at random.
        longest_wait: upper bound of these pauses; a longer Retry-After of the server is honored.
        sleep: waits.
        until: ``time.monotonic()`` at which to give up; no pause goes beyond it.
        on_retry: called before each pause.
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
    """The beginning of a reply's body as one line of text, without control characters."""
    text = " ".join(body[: 8 * most].decode(errors="replace").split())
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= most else text[:most] + "..."


async def _post(
    url: str, body: bytes, headers: Mapping[str, str], most: int, proxies: bool
) -> Reply:
    import httpx

    headers = {"Accept": "application/json", "Accept-Encoding": "identity", **headers}
    async with (
        httpx.AsyncClient(verify=_trusted(), timeout=None, trust_env=proxies) as client,
        client.stream("POST", url, content=body, headers=headers) as response,
    ):
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > most:
                return Reply(problem=f"answered more than {most} bytes")
    status = response.status_code
    redirect = " (redirects are not followed)" if 300 <= status < 400 else ""
    return Reply(
        status=status,
        body=bytes(data),
        problem=f"answered {status} {response.reason_phrase}: {excerpt(bytes(data))}{redirect}",
        retry=status in RETRIED,
        retry_after=_seconds(response.headers.get("Retry-After", "")),
    )


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The certificates that this machine trusts."""
    return ssl.create_default_context()


def _wait(job: Coroutine[object, object, Reply]) -> Reply:
    """Run a coroutine to its end, also below an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, job).result()


def _root(error: BaseException) -> BaseException:
    """What the operating system said, if it did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            error = cause
        cause = cause.__cause__ or cause.__context__
    return error


def _seconds(retry_after: str) -> float:
    try:
        found = float(retry_after)
    except ValueError:
        return 0.0
    return found if 0.0 < found < 1e9 else 0.0
