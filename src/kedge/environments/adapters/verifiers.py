"""Environments of ``verifiers``: tasksets, and the agent programs (harnesses) that work on them.

An agent program asks for a chat completion whenever it needs the policy.  Here an endpoint on
this machine takes these requests: each is a turn of the episode, answered by the policy's response.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kedge.environments.adapters.packages import import_package
from kedge.environments.turn_tokens import plain_text
from kedge.errors import RolloutError
from kedge.protocols import NewContext, Observation, Step
from kedge.types import Response

Message = Mapping[str, Any]
_MODEL = "policy"


class Verifiers:
    """One environment of ``verifiers`` 0.4 or newer, with one agent.

    The seed chooses the task, unless the dataset has a column ``task`` with its index.  System and
    user messages of the task are joined to the last user message of the prompt, which may be empty.

    Args:
        make: makes a ``verifiers.v1.Env``, for example
            ``lambda: vf.SingleAgentEnv(vf.SingleAgentEnvConfig(...))``.

    Raises:
        ConfigError: verifiers is not installed.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._vf = import_package("verifiers.v1", "verifiers")
        self._make = make
        self._tasks: list[Any] = []
        self._endpoint: _Endpoint | None = None
        self._serving: Any = None
        self._episode: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._history: list[Message] = []
        self.tools: list[Any] = []  # JSON schemas, set when an episode begins

    async def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Start the agent program on a task; returns what it asks first."""
        await self._stop_episode()
        endpoint = await self._start()
        task = self._tasks[int(options.get("task", seed)) % len(self._tasks)]
        config = self._vf.EvalClientConfig(base_url=endpoint.url, api_key_var="KEDGE_NO_KEY")
        context = self._vf.ModelContext(model=_MODEL, client=config)
        self._history = []
        self._episode = asyncio.ensure_future(self._environment.run_episode(task, context))
        messages = await self._next_messages()
        if messages is None:
            await self._result()
            raise RolloutError("the agent program ended without asking the policy")
        return "\n\n".join(message["content"] for message in self._history), {}

    async def step(self, response: Response) -> Step:
        """Answer the agent program, and wait for its next request or its end."""
        assert self._endpoint is not None
        answer = assistant_message(response)
        self._history.append(answer)
        self._endpoint.answer(answer, "stop" if response.terminated else "length")
        messages = await self._next_messages()
        if messages is None:
            trace = await self._result()
            whole, info = response.terminated, {"metrics": dict(trace.metrics)}
            return None, float(trace.reward), whole, not whole, info
        return messages, 0.0, False, False, {}

    def close(self) -> None:
        """Stop the agent program and the servers."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=30)

    async def _start(self) -> _Endpoint:
        """The endpoint; with the first episode, environment and servers start."""
        if self._endpoint is None:
            self._loop = asyncio.get_running_loop()
            self._environment = self._make()
            self._tasks = list(self._environment.taskset)
            self._endpoint = _Endpoint()
            await self._endpoint.start()
            self._serving = self._environment.serving()
            await self._serving.__aenter__()
        return self._endpoint

    async def _stop(self) -> None:
        await self._stop_episode()
        if self._endpoint is not None:
            await self._serving.__aexit__(None, None, None)
            await self._endpoint.stop()
            self._endpoint = None

    async def _stop_episode(self) -> None:
        if self._episode is not None and not self._episode.done():
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)

    async def _next_messages(self) -> Sequence[Message] | NewContext | None:
        """What the next request adds to the conversation; None: the program has ended."""
        assert self._endpoint is not None
        assert self._episode is not None
        request = asyncio.ensure_future(self._endpoint.requests.get())
        await asyncio.wait({request, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return None
        body = request.result()
        self.tools = body.get("tools") or []
        messages = [m | {"content": plain_text(m.get("content") or "")} for m in body["messages"]]
        return self._extend(messages)

    def _extend(self, messages: Sequence[Message]) -> Sequence[Message] | NewContext:
        """The messages after known ones; all messages if the program changed known ones."""
        known = [(message["role"], message["content"]) for message in self._history]
        self._history = list(messages)
        if [(m["role"], m["content"]) for m in messages[: len(known)]] != known:
            return NewContext(messages)
        return messages[len(known) :]

    async def _result(self) -> Any:
        """The trace of the finished episode.

        Raises:
            RolloutError: the episode failed.
        """
        assert self._episode is not None
        episode = await self._episode
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            raise RolloutError("; ".join(f"{e.type}: {e.message}" for e in errors))
        return episode.traces[-1]


class _Endpoint:
    """Chat completions on a port of this machine, answered one at a time."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.url = ""
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._runner: Any = None

    async def start(self) -> None:
        from aiohttp import web

        application = web.Application(client_max_size=2**26)
        application.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(application, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        if self._answer is not None:
            self._answer.cancel()  # the episode ended with a request pending
        await self._runner.cleanup()

    def answer(self, message: Message, reason: str) -> None:
        """Answer the request that waits."""
        assert self._answer is not None
        reason = "tool_calls" if message.get("tool_calls") else reason
        self._answer.set_result({"message": message, "finish_reason": reason})

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        self._answer = asyncio.get_running_loop().create_future()
        await self.requests.put(body)
        choice = {"index": 0, **await self._answer}
        if not body.get("stream"):
            return web.json_response(_completion("chat.completion", choice))
        choice["delta"] = choice.pop("message")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        chunk = json.dumps(_completion("chat.completion.chunk", choice))
        await stream.write(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())
        return stream


def _completion(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head = {"id": "turn", "object": kind, "created": 0, "model": _MODEL}
    return {**head, "choices": [choice], "usage": usage}


def assistant_message(response: Response) -> Message:
    """A response in OpenAI's format, with its tool calls."""
    message: dict[str, Any] = {"role": "assistant", "content": response.text}
    calls = [call for call in response.tool_calls if not call.error]
    if calls:
        message["tool_calls"] = [
            {
                "index": i,
                "id": f"call{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for i, call in enumerate(calls)
        ]
    return message
