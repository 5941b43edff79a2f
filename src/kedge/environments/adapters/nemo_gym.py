"""Environments on a resources server of NeMo Gym."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from kedge.environments.turn_tokens import plain_text
from kedge.errors import DataError, RolloutError
from kedge.protocols import Observation, Step
from kedge.types import Response, ToolCall

Items = list[dict[str, Any]]
_PARAMS = "responses_create_params"


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

    reads_calls = True

    def __init__(self, url: str) -> None:
        self.tools: list[dict[str, Any]] = []  # JSON schemas, once an episode has begun
        self._client = httpx.Client(base_url=url, timeout=None)
        self._gymnasium: bool | None = None  # the server has /step
        self._row: dict[str, Any] = {}
        self._output: Items = []  # of the episode, in the format of the Responses API

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Begin a session for the row; the seed is sent as the column ``seed`` if it has none.

        Raises:
            DataError: the row has no ``responses_create_params``.
            RolloutError: the server did not answer, or with an error.
        """
        row = without_none({"seed": seed, **options})
        params = row.get(_PARAMS)
        if not isinstance(params, Mapping) or not params.get("input"):
            raise DataError(
                f"a row for NeMo Gym needs the column {_PARAMS} with the key input, got"
                f" {str(params)[:80]!r}; the columns are {', '.join(options) or 'none'}"
            )
        self._row, self._output = row, []
        self.tools = [_chat_schema(tool) for tool in params.get("tools") or []]
        self._client.cookies.clear()
        if self._gymnasium is None:
            self._gymnasium = "/step" in self._send("GET", "/openapi.json")["paths"]
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
        names = [tool["function"]["name"] for tool in self.tools]
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
        result = self._send("POST", "/verify", self._row | {"response": self._response()})
        known = {"reward", "response", *self._row}
        return float(result["reward"]), {k: v for k, v in result.items() if k not in known}

    def _response(self, output: Items | None = None) -> dict[str, Any]:
        return {
            "id": "episode",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "output": self._output if output is None else output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._row[_PARAMS].get("tools") or [],
        }

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        reply = self._request(method, path, body)
        if reply.is_error:
            raise RolloutError(f"{reply.url} answered {reply.status_code}: {reply.text[:200]!r}")
        return reply.json()

    def _request(self, method: str, path: str, body: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise RolloutError(
                f"{self._client.base_url} did not answer ({type(error).__name__}: {error}); start"
                " the resources server, or correct its address"
            ) from error


def _chat_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of the Responses API as chat templates show it."""
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}


def without_none(value: Any) -> Any:
    """``value`` without the None that datasets fill in where rows have different keys."""
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value
