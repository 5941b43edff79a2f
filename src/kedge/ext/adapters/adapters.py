"""Environments of other libraries.  Most need their package: ``'kedge-rl[gymnasium]'``."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from kedge.environments.turn_tokens import plain_text
from kedge.records.errors import ConfigError, DataError, RolloutError, install_command
from kedge.records.protocols import EnvironmentInfo, NewContext, Observation, Reset, Step
from kedge.records.types import Response, ToolCall

Items = list[dict[str, Any]]
Message = Mapping[str, Any]
_NOT_SHOWN = ("done", "reward", "metadata")  # fields of OpenEnv's observations
_PARAMS = "responses_create_params"  # NeMo Gym's column
_MODEL = "policy"
_SILENCE = 600.0  # seconds until a server that does not answer counts as gone


def import_package(name: str, extra: str) -> Any:
    """Import a package of another library; raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs the package {name}: {install_command(extra)} ({error})"
        ) from error


class Gymnasium:
    """A Gymnasium environment (``reset`` and ``step`` of ``gymnasium.Env``), played in text.

    A response that is not an action is answered with the list of actions, and the environment does
    not step.

    Args:
        environment: a registered id, for example "FrozenLake-v1", or an environment.
        actions: the names of the actions 0, 1, ... of a ``Discrete`` space.  None: their numbers.
        parse_action: response text -> action, for other spaces than ``Text`` and ``Discrete``;
            raises ValueError, with words for the policy, if it is not one.
        show: observation -> text, messages or token ids.  None: text as it is, or what
            ``render_mode="ansi"`` prints, or ``str``.
        intro: comes before the first observation, for example the rules.
        **options: of ``gymnasium.make``.

    Raises:
        ConfigError: Gymnasium is not installed, or the action space needs ``parse_action``.
    """

    def __init__(
        self,
        environment: Any,
        *,
        actions: Sequence[str] | None = None,
        parse_action: Callable[[str], Any] | None = None,
        show: Callable[[Any], Observation] | None = None,
        intro: str = "",
        **options: Any,
    ) -> None:
        if isinstance(environment, str):
            environment = import_package("gymnasium", "gymnasium").make(environment, **options)
        self.environment, self.intro = environment, intro
        self._parse = parse_action or _parser(environment.action_space, actions)
        self._show_with = show

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        """Begin an episode; a dataset column ``options`` is passed on."""
        observation, info = self.environment.reset(seed=seed, options=options.get("options"))
        shown = self._show(observation)
        return (f"{self.intro}\n{shown}" if self.intro else shown), info

    def step(self, response: Response) -> Step:
        """Take the action that the response names."""
        try:
            action = self._parse(response.text.strip())
        except ValueError as error:
            return str(error), 0.0, False, False, {"metrics": {"illegal": 1.0}}
        observation, reward, terminated, truncated, info = self.environment.step(action)
        return self._show(observation), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()

    def _show(self, observation: Any) -> Observation:
        if self._show_with is not None:
            return self._show_with(observation)
        ansi = not isinstance(observation, str) and self.environment.render_mode == "ansi"
        return str(self.environment.render() if ansi else observation)


def _parser(space: Any, actions: Sequence[str] | None) -> Callable[[str], Any]:
    """Text -> action for a ``Text`` or ``Discrete`` space."""
    kind = type(space).__name__
    if kind == "Text":
        return lambda text: text
    if kind != "Discrete":
        raise ConfigError(
            f"parse_action must say which action of {space} a response means; pass"
            " parse_action=FUNCTION"
        )
    if actions is not None and len(actions) != space.n:
        raise ConfigError(f"actions must name the {space.n} actions of {space}, got {actions}")
    first = int(space.start)
    names = actions or [str(first + i) for i in range(int(space.n))]
    numbers = {name.lower(): first + i for i, name in enumerate(names)}

    def parse(text: str) -> int:
        if text.lower() not in numbers:
            raise ValueError(f"Unknown action {text[:40]!r}. The actions are: {', '.join(names)}.")
        return numbers[text.lower()]

    return parse


class OpenEnv:
    """An OpenEnv environment: one session on its server per instance.

    Args:
        client: the address of a server, or a client of the environment's package.
        make_action: response text -> the environment's action; a dictionary for an address.
        show: observation -> text, messages or token ids.  None: text as it is, else JSON.

    Raises:
        ConfigError: OpenEnv is not installed.
    """

    def __init__(
        self,
        client: Any,
        *,
        make_action: Callable[[str], Any],
        show: Callable[[Any], Observation] | None = None,
    ) -> None:
        if isinstance(client, str):
            client = import_package("openenv.core", "openenv").GenericEnvClient(base_url=client)
        # The client's connection is bound to one event loop; a synchronous client has its own.
        self.client = client.sync() if hasattr(client, "sync") else client
        self._make_action, self._show = make_action, show or format_observation

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        """Begin an episode with this seed."""
        return self._show(self.client.reset(seed=seed).observation), {}

    def step(self, response: Response) -> Step:
        """Send the response as an action."""
        result = self.client.step(self._make_action(response.text))
        observation = self._show(result.observation)
        return observation, float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        """End the session."""
        self.client.close()


def format_observation(observation: Any) -> str:
    """The observation as text: a string as it is, else its fields as JSON."""
    if isinstance(observation, str):
        return observation
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    elif hasattr(observation, "__dict__"):
        observation = vars(observation)
    if isinstance(observation, Mapping):
        observation = {k: v for k, v in observation.items() if k not in _NOT_SHOWN}
    return json.dumps(observation, default=str)


class NeMoGym:
    """A resources server of NeMo Gym, which has the tools and the verifier of a task.

    The rows of the dataset are those of NeMo Gym, without a column ``prompt``: messages and tools
    are in ``responses_create_params``, and all columns are sent to the server.  The server is of
    one of two kinds, which it tells itself:

    - tools and ``/verify``: calls are made until a turn has none, then the episode is verified
      (its numbers are logged) and its reward is that of the last turn;
    - Gymnasium's (``/reset`` and ``/step``): every turn is sent and has its own reward.

    A policy can only call the tools of its row.  A turn with calls is sent without its text.

    Args:
        url: address of the resources server, such as ``http://127.0.0.1:8000``.
    """

    def __init__(self, url: str) -> None:
        self.info = EnvironmentInfo(reads_calls=True, final_reward=True)
        # The server may close an idle connection at the moment of a request, which would be lost.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(
            base_url=url,
            timeout=_SILENCE,
            limits=limits,
            headers={"Accept-Encoding": "identity"},  # a small body may unpack to a huge one
        )
        self._gymnasium: bool | None = None  # the server has /step
        self._row: dict[str, Any] = {}
        self._output: Items = []  # of the episode, in the format of the Responses API

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        """Begin a session for the row; the seed is sent as the column ``seed`` if it has none.

        Raises:
            DataError: the row has no ``responses_create_params``.
            RolloutError: the server did not answer, or with an error.
        """
        row = {"seed": seed, **{n: value for n, value in options.items() if value is not None}}
        params = row.get(_PARAMS)
        if not isinstance(params, Mapping) or not params.get("input"):
            raise DataError(
                f"a row for NeMo Gym needs the column {_PARAMS} with the key input, got"
                f" {str(params)[:80]!r}; the columns are {', '.join(options) or 'none'}"
            )
        self._row, self._output = row, []
        names = ("name", "description", "parameters")
        tools = [  # as chat templates show them
            {"type": "function", "function": {n: tool[n] for n in names if n in tool}}
            for tool in params.get("tools") or []
        ]
        self.info = EnvironmentInfo(reads_calls=True, final_reward=True, tools=tools)
        self._client.cookies.clear()
        if self._gymnasium is None:
            self._gymnasium = "/step" in self._send("GET", "/openapi.json", key="paths")["paths"]
        begun = self._send("POST", "/reset" if self._gymnasium else "/seed_session", row)
        messages = params["input"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = [
            {"role": m["role"], "content": plain_text(m.get("content") or "")} for m in messages
        ]
        if begun.get("observation"):
            before = messages.pop()["content"] if messages[-1]["role"] == "user" else ""
            content = f"{before}\n\n{begun['observation']}" if before else begun["observation"]
            messages.append({"role": "user", "content": content})
        return messages, begun.get("info") or {}

    def step(self, response: Response) -> Step:
        """Send a turn, or make its calls; without any the episode is verified.

        Raises:
            RolloutError: the server did not answer, or with an error.
        """
        start = len(self._output)
        calls = self._append(response)
        if self._gymnasium:
            body = self._row | {"response": self._response(self._output[start:])}
            answer = self._send("POST", "/step", body)
            info = answer.get("info") or {}
            outputs = {o["call_id"]: o["output"] for o in info.get("tool_outputs", [])}
            messages = [
                self._tool_message(call, call_id, outputs[call_id])
                for call_id, call in calls.items()
                if call_id in outputs
            ]
            if answer.get("observation"):
                messages.append({"role": "user", "content": answer["observation"]})
            ends = bool(answer.get("terminated")), bool(answer.get("truncated"))
            return messages or None, float(answer.get("reward", 0.0)), *ends, info
        if not response.tool_calls:
            reward, info = self._verify()
            return None, reward, response.terminated, not response.terminated, info
        results = {call_id: self._call(call) for call_id, call in calls.items()}
        messages = [self._tool_message(calls[i], i, result) for i, result in results.items()]
        failed = [call for call in response.tool_calls if call.error]
        messages += [self._tool_message(call, "unread", f"Error: {call.error}") for call in failed]
        metrics = {"tool_calls": len(response.tool_calls), "invalid_calls": len(failed)}
        return messages, 0.0, False, False, {"metrics": metrics}

    def final_reward(self) -> float:
        """Verify an episode that a limit has ended."""
        return 0.0 if self._gymnasium else self._verify()[0]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _append(self, response: Response) -> dict[str, ToolCall]:
        """Append a turn to the output; its calls by their id."""
        turn = len(self._output)
        if response.reasoning:
            summary = [{"type": "summary_text", "text": response.reasoning}]
            self._output.append({"type": "reasoning", "id": f"r{turn}", "summary": summary})
        calls = {
            f"{turn:04d}{i:05d}": call
            for i, call in enumerate(call for call in response.tool_calls if not call.error)
        }
        if not calls:
            text = {"type": "output_text", "text": response.text, "annotations": []}
            message = {"type": "message", "role": "assistant", "status": "completed"}
            self._output.append(message | {"id": f"m{turn}", "content": [text]})
        for call_id, call in calls.items():
            item = {"type": "function_call", "call_id": call_id, "name": call.name}
            self._output.append(item | {"arguments": json.dumps(dict(call.arguments))})
        return calls

    def _call(self, call: ToolCall) -> str:
        """What the server answers to a call; an error of the server is for the policy."""
        names = [tool["function"]["name"] for tool in self.info.tools]
        if call.name not in names:
            return f"Error: there is no tool {call.name!r}; the tools are: {', '.join(names)}"
        return self._request("POST", f"/{call.name}", dict(call.arguments)).text

    def _tool_message(self, call: ToolCall, call_id: str, result: str) -> dict[str, Any]:
        item = {"type": "function_call_output", "call_id": call_id, "output": result}
        if call_id != "unread":
            self._output.append(item)
        name = call.name or "unknown"
        return {"role": "tool", "name": name, "content": result, "tool_call_id": call_id}

    def _verify(self) -> tuple[float, Mapping[str, Any]]:
        body = self._row | {"response": self._response()}
        result = self._send("POST", "/verify", body, key="reward")
        known = {"reward", "response", *self._row}
        return float(result["reward"]), {k: v for k, v in result.items() if k not in known}

    def _response(self, output: Items | None = None) -> dict[str, Any]:
        head = {"id": "episode", "object": "response", "created_at": 0, "model": _MODEL}
        tools = {"parallel_tool_calls": True, "tool_choice": "auto"}
        tools |= {"tools": self._row[_PARAMS].get("tools") or []}
        return head | tools | {"output": self._output if output is None else output}

    def _send(self, method: str, path: str, body: Any = None, *, key: str = "") -> Any:
        """The JSON object that the server answers, with a ``key`` if one is named."""
        reply = self._request(method, path, body)
        if reply.is_error:
            raise RolloutError(f"{reply.url} answered {reply.status_code}: {reply.text[:200]!r}")
        try:
            content = reply.json()
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or (key and content.get(key) is None):
            raise RolloutError(
                f"{reply.url} must answer with a JSON object{f' with {key}' if key else ''}, got"
                f" {reply.text[:200]!r}; is it a resources server of NeMo Gym?"
            )
        return content

    def _request(self, method: str, path: str, body: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise RolloutError(
                f"{self._client.base_url} did not answer ({type(error).__name__}: {error}); start"
                " the resources server, or correct its address"
            ) from error


class Verifiers:
    """One environment of ``verifiers`` 0.4 or newer: a taskset, and an agent program (harness).

    The program asks for a chat completion whenever it needs the policy.  An endpoint on this
    machine takes these requests: each is a turn of the episode, answered by the policy's response.

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
        self.info = EnvironmentInfo()  # its tools are known when an episode begins

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
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
        self.info = EnvironmentInfo(tools=body.get("tools") or [])
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
        """The trace of the finished episode; raises RolloutError if it failed."""
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
