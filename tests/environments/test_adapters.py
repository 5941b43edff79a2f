"""Adapters, each with the real package of the other library, and the shipped games."""

from __future__ import annotations

import importlib
import json
import random
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
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.cli.main import main
from kedge.environments import NewContext, Response, ToolCall, ToolEnvironment
from kedge.environments.pool import Calls
from kedge.ext.adapters.adapters import Gymnasium, NeMoGym, OpenEnv, Verifiers
from kedge.ext.before_rl.experts import expert_episodes
from kedge.ext.games.games import Calculator, GuessNumber, TextWorld, calculate
from kedge.records.errors import ConfigError, DataError, RolloutError
from tests.e2e.small import rows
from tests.environments.toys import call_all, played, prompts, rollouts, sampling

# Notices of the other packages that a user of Kedge cannot act on.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def needs(package: str) -> None:
    pytest.importorskip(package, exc_type=ImportError)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install 'kedge-rl\[gymnasium\]'"):
        Gymnasium("FrozenLake-v1")


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
    assert environment.info.tools == [
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


@pytest.mark.parametrize("answer", [{}, [], None, "<html>"])
def test_what_is_no_resources_server_is_named(
    answer: Any, resources: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = Resources.reply
    monkeypatch.setattr(Resources, "reply", lambda self, *_: reply(self, answer))
    message = rf"{resources}/openapi.json must answer with a JSON object with paths, got"
    with pytest.raises(RolloutError, match=message):
        NeMoGym(resources).reset(seed=0, options=gym_row("8"))


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
        tool = ToolCall(
            name=environment.info.tools[0]["function"]["name"], arguments={"number": number}
        )
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


GAMES = [Calculator, GuessNumber, TextWorld]
SEEDS = st.integers(0, 2**63)


def play(game: type, seed: int, **options: Any) -> dict[str, Any]:
    return next(expert_episodes(lambda: game(**options), [seed]))


@pytest.mark.parametrize("game", GAMES)
@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_the_expert_solves_every_seed(game: type, seed: int) -> None:
    """Text worlds in 6 to 12 turns."""
    episode = play(game, seed)
    assert episode["reward"] == 1
    assert game is not TextWorld or 12 <= len(episode["messages"]) <= 24


@pytest.mark.parametrize("game", GAMES)
@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_the_same_seed_and_actions_give_the_same_episode(game: type, seed: int) -> None:
    first, second = (list(expert_episodes(game, [seed], noise=0.5)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("game", GAMES)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 20), words=st.lists(st.text(max_size=20), max_size=6))
def test_any_text_is_answered_in_words(game: type, seed: int, words: list[str]) -> None:
    environment = game()
    environment.reset(seed=seed, options={})
    for response in words:
        observation, reward, terminated, truncated, _ = environment.step(response)
        assert observation
        assert reward in {0, 1}
        assert not truncated
        if terminated:
            break


@pytest.mark.parametrize(
    ("game", "seed", "response", "words"),
    [
        (Calculator, 0, "help", "Write calc and one operation"),
        (Calculator, 0, "calc 1 + 2 + 3", "'1 + 2 + 3' is not one operation"),
        (Calculator, 0, "answer many", "Write calc and one operation"),
        (GuessNumber, 0, "0", "one number from 1 to 64"),
        (GuessNumber, 0, "a lot", "one number from 1 to 64"),
        (TextWorld, 0, "go up", "There is no way."),
        (TextWorld, 0, "take gold", "That is not here."),
        (TextWorld, 0, "open up", "No locked door is there."),
        (TextWorld, 0, "sing", "Unknown command."),
    ],
)
def test_impossible_actions(game: type, seed: int, response: str, words: str) -> None:
    environment = game()
    environment.reset(seed=seed, options={})
    observation, reward, terminated, _, info = environment.step(response)
    assert words in observation
    assert (reward, terminated, info["metrics"]["illegal"]) == (0, False, 1)


def test_a_locked_door_needs_its_key() -> None:
    world = TextWorld()
    for seed in range(50):
        world.reset(seed=seed, options={})
        for direction, color in world.rooms[0, 0].doors.items():
            needs = world.step(f"open {direction}")[0]
            assert needs.startswith(f"You need the {color} key.")
            assert world.step(f"go {direction}")[0].startswith(f"The {color} door is locked.")
            return
    pytest.fail("no world begins at a locked door")


def test_a_wrong_answer_ends_the_sum() -> None:
    sum_ = Calculator()
    sum_.reset(seed=0, options={})
    assert sum_.step("answer 100000")[1:3] == (0.0, True)


def test_guesses_are_limited() -> None:
    game = GuessNumber(guesses=2)
    game.reset(seed=0, options={})
    wrong = str(game.number % 64 + 1)
    assert game.step(wrong)[2] is False
    assert game.step(wrong)[0] == f"It was {game.number}."


def test_calculate() -> None:
    assert [calculate(x) for x in ("17 + 25", "8-17", "-3 + -4")] == ["42", "-9", "-7"]
    with pytest.raises(ValueError, match="'2 \\* 3' is not one operation"):
        calculate("2 * 3")


@pytest.mark.parametrize(("noise", "low", "high"), [(1.0, 0.05, 0.35), (0.3, 0.5, 0.99)])
def test_noise_replaces_turns(noise: float, low: float, high: float) -> None:
    rows = list(expert_episodes(TextWorld, range(150), noise=noise))
    assert low < sum(row["reward"] for row in rows) / len(rows) <= high
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


def test_episodes_are_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "episodes.jsonl"
    options = ["--episodes", "3", "--first_seed", "7", "--environment_kwargs", '{"rules": false}']
    assert main(["expert", "kedge.environments.games:TextWorld", *options, f"--output={file}"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [play(TextWorld, seed, rules=False) for seed in (7, 8, 9)]


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


class Doubles(ToolEnvironment):
    """Tools, async methods, and an expert that calls a tool."""

    def __init__(self) -> None:
        super().__init__([double])

    async def reset(self, *, seed: int, options: Any) -> Any:  # type: ignore[override]
        super().reset(seed=seed, options=options)
        return f"Twice {seed}?", {}

    async def step(self, response: Response) -> Any:
        if response.tool_calls:
            return super().step(response)
        return None, float(response.text == "14"), True, False, {}

    @staticmethod
    def expert(messages: Any) -> Any:
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        number = int(messages[0]["content"][6:-1])
        return {"tool_calls": [{"name": "double", "arguments": {"number": number}}]}


def test_an_expert_calls_tools() -> None:
    (row,) = expert_episodes(Doubles, [7])
    assert row["reward"] == 1
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][1]["tool_calls"][0]["name"] == "double"
    assert row["tools"][0]["function"]["name"] == "double"


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="noise must be from 0 to 1, got 2"):
        next(expert_episodes(TextWorld, [0], noise=2))
    with pytest.raises(ValueError, match="Random has no expert; add a static method"):
        next(expert_episodes(random.Random, [0]))
    with pytest.raises(ValueError, match=r"Doubles has no random_action; .* noise=0.5"):
        next(expert_episodes(Doubles, [0], noise=0.5))
    with pytest.raises(ValueError, match="rooms must be"):
        TextWorld(rooms=(2, 9))
    with pytest.raises(ValueError, match="terms must be"):
        Calculator(terms=(5, 2))
    with pytest.raises(ValueError, match="highest must be"):
        GuessNumber(highest=0)
