"""Adapters, each with the real package of the other library."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kedge.environments import NewContext, Response, ToolCall
from kedge.environments.adapters import Gymnasium, NeMoGym, OpenEnv, TextArena, Verifiers
from kedge.environments.pool import Calls
from kedge.errors import ConfigError, DataError, RolloutError
from tests.e2e.small import rows
from tests.environments.toys import call_all, played, prompts, rollouts, sampling

# Notices of the other packages that a user of Kedge cannot act on.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def needs(package: str) -> None:
    pytest.importorskip(package, exc_type=ImportError)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"pip install 'kedge-rl\[textarena\]'"):
        TextArena("Chess-v0")


def lake(**options: Any) -> Gymnasium:
    needs("gymnasium")
    actions = ["left", "down", "right", "up"]
    return Gymnasium(
        "FrozenLake-v1", actions=actions, render_mode="ansi", is_slippery=False, **options
    )


def test_gymnasium_by_names_of_actions() -> None:
    environment = lake(intro="Reach G.")
    observation, _ = environment.reset(seed=0, options={})
    assert isinstance(observation, str)
    assert observation.startswith("Reach G.\n")
    assert "FFFG"[1:] in observation
    answer, reward, terminated, _, info = environment.step(Response("jump"))
    assert answer == "Unknown action 'jump'. The actions are: left, down, right, up."
    assert (reward, terminated, info) == (0, False, {"metrics": {"illegal": 1.0}})
    for move in ("Down", "down", "right", "right", "down"):
        assert environment.step(Response(move))[2] is False
    assert environment.step(Response(" right\n"))[1:4] == (1.0, True, False)
    environment.close()


def test_gymnasium_spaces() -> None:
    needs("gymnasium")
    import gymnasium

    class Talk(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = action_space = gymnasium.spaces.Text(20)
        render_mode = None

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return f"say {self.np_random.integers(100)} {options}", {}

        def step(self, action: Any) -> Any:
            return action.upper(), 0.5, False, True, {}

    talk = Gymnasium(Talk())
    first = talk.reset(seed=4, options={"options": {"a": 1}})
    assert first == talk.reset(seed=4, options={"options": {"a": 1}})
    assert str(first[0]).endswith("{'a': 1}")
    assert talk.step(Response("well")) == ("WELL", 0.5, False, True, {})
    cards = Gymnasium("Blackjack-v1")
    assert str(cards.reset(seed=0, options={})[0]).startswith("(")
    assert "The actions are: 0, 1." in str(cards.step(Response("hit"))[0])
    with pytest.raises(ConfigError, match="must name the 2 actions"):
        Gymnasium("Blackjack-v1", actions=["hit"])
    with pytest.raises(ConfigError, match="parse_action must say"):
        Gymnasium("Pendulum-v1")
    assert Gymnasium("Pendulum-v1", parse_action=lambda text: [float(text)])


@pytest.mark.filterwarnings("ignore")
def test_textarena_alone() -> None:
    needs("textarena")
    game = TextArena("GuessTheNumber-v0")
    first, _ = game.reset(seed=3, options={})
    assert first.startswith("You are Player 0.")
    answers = []
    for guess in range(1, 21):
        observation, reward, terminated, _, _ = game.step(Response(f"[{guess}]"))
        answers.append(observation)
        if terminated:
            break
    assert answers[0] == "The target number is higher."
    assert reward in {0.0, 1.0} or 0 < reward < 1


@pytest.mark.filterwarnings("ignore")
def test_textarena_with_an_opponent() -> None:
    needs("textarena")

    def free(text: str) -> list[str]:
        return re.findall(r"\[\d\]", text.rpartition("Available Moves")[2])

    def play(seed: int, player: int | None) -> tuple[str, list[Any]]:
        game = TextArena("TicTacToe-v0", opponents=[lambda text: free(text)[-1]], player=player)
        observation, _ = game.reset(seed=seed, options={})
        first, steps = observation, []
        for _ in range(9):
            step = game.step(Response(free(observation)[0]))
            observation, *rest, _ = step
            steps.append((observation, *rest))
            if rest[1]:
                break
        return first, steps

    first, steps = play(0, 0)
    assert "You are Player 0" in first
    assert steps[-1][1:] == (1.0, True, False)  # 0, 1, 2 against 8, 7
    assert "[Player 1] [8]" in steps[0][0]
    assert "[Player 0]" not in steps[0][0]
    assert (first, steps) == play(0, 0)
    assert "You are Player 1" in play(1, None)[0]
    with pytest.raises(ConfigError, match="player must be from 0 to 0"):
        TextArena("TicTacToe-v0", player=1)


@pytest.mark.filterwarnings("ignore")
def test_textarena_games_side_by_side() -> None:
    """Games draw from Python's global generator; each has its state all the same."""
    needs("textarena")

    def play(seed: int) -> Any:
        game = TextArena("Bandit-v0")
        return [game.reset(seed=seed, options={})[0]] + [
            game.step(Response("[red]"))[0] for _ in range(5)
        ]

    alone = [play(seed) for seed in range(8)]
    together = call_all(Calls(), [lambda seed=seed: play(seed) for seed in range(8)])
    assert together == alone
    assert len({tuple(game) for game in alone}) > 1


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An OpenEnv server of a game that wants a word back."""
    needs("openenv.core")
    import uvicorn
    from openenv.core.env_server import http_server, interfaces, types

    class Say(types.Action):
        word: str

    class Heard(types.Observation):
        text: str

    class Repeat(interfaces.Environment):  # type: ignore[type-arg,misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, **_: Any) -> Heard:
            self.word, self.left = f"w{seed}", 2
            return Heard(text=f"say {self.word}", done=False, reward=None)

        def step(self, action: Any, **_: Any) -> Heard:
            self.left -= 1
            right = action.word == self.word
            return Heard(
                text="yes" if right else "no", done=right or not self.left, reward=float(right)
            )

        @property
        def state(self) -> Any:
            return types.State()

    application = http_server.create_fastapi_app(Repeat, Say, Heard, max_concurrent_envs=8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = uvicorn.Server(
        uvicorn.Config(application, host="127.0.0.1", port=port, log_level="critical")
    )
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(10)


@pytest.mark.filterwarnings("ignore")
def test_openenv(server: str) -> None:
    def make() -> OpenEnv:
        return OpenEnv(server, make_action=lambda text: {"word": text})

    environment = make()
    assert environment.reset(seed=7, options={}) == ('{"text": "say w7"}', {})
    assert environment.step(Response("w8"))[:4] == ('{"text": "no"}', 0.0, False, False)
    assert environment.step(Response("w7"))[:4] == ('{"text": "yes"}', 1.0, True, False)
    environment.close()
    shown = OpenEnv(server, make_action=lambda text: {"word": text}, show=lambda seen: seen["text"])
    assert shown.reset(seed=3, options={})[0] == "say w3"
    shown.close()
    play = rollouts(make, max_turns=3)
    rollout = play.generate(prompts(), sampling=sampling(max_new_tokens=80), seed=3)
    assert rollout.episodes is not None
    assert rollout.episodes.metrics["environment/turns"] == (8.0, 4.0)
    play.close()


class Resources(BaseHTTPRequestHandler):
    """A resources server like those of NeMo Gym 0.4: a tool, or a game of two turns."""

    gymnasium = False
    turns: dict[str, int] = {}  # noqa: RUF012  (by session)

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.reply({"paths": {"/step": {}} if self.gymnasium else {"/verify": {}}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = (self.headers["Cookie"] or "").removeprefix("session=")
        if self.path in {"/seed_session", "/reset"}:
            session = f"s{len(self.turns)}"
            self.turns[session] = 0
            answer: Any = {"observation": f"w{body['answer']}", "info": {}}
            self.reply(answer if self.gymnasium else {}, session)
        elif self.path == "/step":
            self.turns[session] += 1
            done = self.turns[session] == 2
            answer = {"observation": None if done else "w4", "reward": 0.5, "terminated": done}
            self.reply(answer | {"truncated": False, "info": {"turn": self.turns[session]}})
        elif self.path == "/verify":
            output = body["response"]["output"]
            said = output[-1]["content"][0]["text"] if output[-1]["type"] == "message" else ""
            calls = sum(item["type"] == "function_call" for item in output)
            right = float(said == body["answer"])
            self.reply(body | {"reward": right, "calls": calls, "session": session})
        elif self.path == "/double":
            self.reply(2 * body["x"] if "x" in body else {"detail": "x is missing"})
        else:
            self.send_error(500)

    def reply(self, answer: Any, session: str = "") -> None:
        self.send_response(200)
        if session:
            self.send_header("Set-Cookie", f"session={session}")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


@pytest.fixture
def resources() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Resources)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def gym_row(answer: str) -> dict[str, Any]:
    tool = {"type": "function", "name": "double", "parameters": {}, "strict": True}
    messages = [{"role": "user", "content": "w3"}]
    params = {"input": messages, "tools": [tool], "temperature": None}
    return {"responses_create_params": params, "answer": answer}


def test_nemo_gym_with_tools(resources: str) -> None:
    def calls(*found: ToolCall) -> Response:
        return Response("", parse=lambda _: found)

    environment = NeMoGym(resources)
    assert environment.reset(seed=0, options=gym_row("8")) == (
        [{"role": "user", "content": "w3"}],
        {},
    )
    assert environment.tools == [
        {"type": "function", "function": {"name": "double", "parameters": {}}}
    ]
    answers, *rest = environment.step(
        calls(
            ToolCall(name="double", arguments={"x": 4}),
            ToolCall(name="verify", arguments={}),
            ToolCall(name="", error="not JSON"),
        )
    )
    assert [message["content"] for message in answers] == [
        "8",
        "Error: there is no tool 'verify'; the tools are: double",
        "Error: not JSON",
    ]
    assert rest == [0.0, False, False, {"metrics": {"tool_calls": 3, "invalid_calls": 1}}]
    assert environment.final_reward() == 0.0  # nothing was said
    _, *rest, info = environment.step(Response("8"))
    assert rest == [1.0, True, False]
    assert info["calls"] == 2
    with pytest.raises(DataError, match="needs the column responses_create_params"):
        environment.reset(seed=0, options={"prompt": "w3"})
    environment.close()
    with pytest.raises(RolloutError, match="start the resources server"):
        NeMoGym("http://127.0.0.1:9").reset(seed=0, options=gym_row("8"))


def test_nemo_gym_with_a_reward_per_turn_through_the_trainer(
    resources: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Resources, "gymnasium", True)
    trainer = played(
        train_dataset=[gym_row("5"), gym_row("6")],
        environment=lambda: NeMoGym(resources),
        max_steps=1,
        credit="turn",
    )
    trainer.train()
    (row,) = rows(trainer)
    assert row["objective/scores"] == 1.0  # two turns of 0.5
    assert row["environment/turns"] == 2.0
    assert row["environment/reward_per_turn"] == 0.5


TASKS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def double(self, number: int) -> str:
        "Twice the number."
        return str(2 * number)

class Words(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

class Taskset(vf.Taskset[Words, vf.TasksetConfig]):
    def load(self):
        for number in (3, 4):
            yield Words(Data(prompt=f"Double {number}.", answer=str(2 * number)), self.config.task)

__all__ = ["Taskset"]

if __name__ == "__main__":
    Tools.run()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("uv") is None, reason="harnesses of verifiers run with uv")
def test_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A taskset with a tool, and the chat program that comes with verifiers."""
    needs("verifiers.v1")
    vf = importlib.import_module("verifiers.v1")
    (tmp_path / "kedge_test_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make() -> Any:
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        options = {"taskset": {"id": "kedge_test_tasks"}, "agent": agent}
        return vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate(options))

    calls, environment = Calls(timeout=120), Verifiers(make)

    def call(function: Any) -> Any:
        (result,) = call_all(calls, [function])
        if isinstance(result, Exception):
            raise result
        return result

    def double(number: int) -> Response:
        tool = ToolCall(name=environment.tools[0]["function"]["name"], arguments={"number": number})
        return Response("", parse=lambda _: [tool])

    observation, _ = call(lambda: environment.reset(seed=1, options={}))
    assert observation == "Double 4."
    (message,), reward, terminated, _, _ = call(lambda: environment.step(double(4)))
    assert (message["role"], message["content"], reward) == ("tool", "8", 0.0)
    assert terminated is False
    assert call(lambda: environment.step(Response("it is 8")))[1:4] == (1.0, True, False)
    call(lambda: environment.reset(seed=1, options={"task": 0}))
    assert call(lambda: environment.step(Response("7")))[1:4] == (0.0, True, False)
    call(lambda: environment.reset(seed=0, options={}))  # an episode that is left unfinished
    environment.close()
    environment._history = [{"role": "user", "content": "else"}]
    changed = [{"role": "user", "content": "Double 4."}]
    assert environment._extend(changed) == NewContext(changed)
