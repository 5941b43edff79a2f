"""Ctrl-C in a script: the first finishes the iteration and saves, a second one ends at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kedge.checkpoint import checkpoint
from kedge.rollout.scheduler.scheduler import stop
from tests import processes

from .small import rows, small
from .test_resume import PROMPTS, assert_same, trainer, whole_run

# A script that gets a signal in the second optimizer step of its third iteration.
PRESSED = """
    import os
    from pathlib import Path
    from tests.e2e.test_resume import trainer

    made = trainer(Path(os.environ["RUN"]), max_lag=1, save_steps=500)
    real, count = made.engine.learner.optimizer_step, []

    def pressed(*args, **kwargs):
        count.append(1)
        if len(count) == 2 * 4 + 2:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return real(*args, **kwargs)

    made.engine.learner.optimizer_step = pressed
    made.train()
    print("trained to the end")
"""

# Gets SIGTERM while its trainer is built, as while a server starts.
STARTING = """
    import os, signal
    from kedge.ext.vllm.weights import WeightFolder
    from tests.e2e.small import small

    class Slow:
        def reset(self, **columns):
            return ""

        def __init__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    folder = WeightFolder(os.environ["RUN"])
    small(environment_factory=Slow)
"""

# From the seventh call on, responses take longer than this test: 60 tokens of half a second.
ENDLESS = """
    import os, sys, time
    from pathlib import Path
    from tests.e2e.small import small

    pieces = {"rollout_schedule": "as_completed"}
    made = small(
        output_dir=os.environ["RUN"], total_episodes=400, save_strategy="steps", save_steps=1,
        response_length=60, stop_token=None, preflight=False, max_lag=int(os.environ["LAG"]),
        **(pieces if os.environ["PIECES"] else {}),
    )
    engine, calls = made.engine.rollout_engine, []
    generate, advance = engine.generate, engine.advance

    def counted(*args, **kwargs):
        calls.append(1)
        return generate(*args, **kwargs)

    def advanced():  # as completed; a call is one that completes responses
        rollout = advance()
        calls.extend([1] * (rollout is not None))
        return rollout

    def slow(model, args, kwargs):
        if len(calls) > 6 and {"cache", "past_key_values"} & kwargs.keys():
            Path(os.environ["RUN"], "slow").touch()
            time.sleep(0.5)

    engine.generate, engine.advance = counted, advanced
    engine.model.register_forward_pre_hook(slow, with_kwargs=True)
    try:
        made.train()
    except KeyboardInterrupt:
        sys.exit(130)
"""


def until(ready: Any, process: processes.Process) -> None:
    end = time.monotonic() + 100
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("lag", "pieces"), [(0, ""), (1, ""), (1, "2")], ids=["in turn", "ahead", "as completed"]
)
def test_a_second_interrupt_waits_for_no_response(tmp_path: Path, lag: int, pieces: str) -> None:
    env = os.environ | {"RUN": str(tmp_path), "LAG": str(lag), "PIECES": pieces}
    process = processes.start("-c", textwrap.dedent(ENDLESS), env=env)
    try:
        until((tmp_path / "slow").exists, process)
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)  # or the second would be taken for the first
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)[1]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    kept = checkpoint.checkpoints(tmp_path)
    assert kept
    for folder in kept:
        checkpoint.verify(folder)
    assert not list(tmp_path.glob(".saving-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_script_finishes_its_iteration_and_saves(tmp_path: Path, number: int) -> None:
    env = os.environ | {"RUN": str(tmp_path), "SIGNAL": str(int(number))}
    done = processes.run("-c", textwrap.dedent(PRESSED), env=env)
    assert done.returncode not in (0, -signal.SIGKILL), done.stderr
    assert "trained to the end" not in done.stdout
    (saved,) = checkpoint.checkpoints(tmp_path)
    assert saved.name == "checkpoint-3"
    hint = f"resume from {saved} with train(resume_from_checkpoint=True)"
    assert f"kedge: stopped after iteration 3 of 6; {hint}\n" in done.stderr
    second = trainer(tmp_path, max_lag=1)
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run(1))


def test_a_signal_while_a_trainer_is_built_runs_the_finalizers(tmp_path: Path) -> None:
    """Before, the process ended by the signal (-15), and the folder of weights stayed."""
    env = os.environ | {"RUN": str(tmp_path)}
    done = processes.run("-c", textwrap.dedent(STARTING), env=env)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not list(tmp_path.iterdir())


def evaluates(folder: Path, **changes: Any) -> Any:
    return trainer(folder, eval_dataset=PROMPTS[:4], eval_strategy="steps", **changes)


def press_in_evaluation(made: Any, step: int) -> None:
    evaluate = made.evaluate

    def pressed() -> Any:
        if made.state.global_step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate()

    made.evaluate = pressed
    with pytest.raises(KeyboardInterrupt):
        made.train()


@pytest.mark.parametrize("step", [2, 6])
def test_an_evaluation_is_finished_and_no_iteration_follows(tmp_path: Path, step: int) -> None:
    """After the last one, nothing else would save."""
    press_in_evaluation(evaluates(tmp_path, eval_steps=2, save_steps=500), step)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [f"checkpoint-{step}"]


def test_the_best_model_is_not_loaded_into_a_run_that_goes_on(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "objective/kl"}
    best |= {"greater_is_better": False, "eval_steps": 1, "save_steps": 1, "logging_steps": 1}
    made, whole = evaluates(tmp_path / "cut", **best), evaluates(tmp_path / "whole", **best)
    press_in_evaluation(made, 3)
    assert (made.state.global_step, made.state.best_global_step) == (3, 1)
    made.train()
    whole.train()
    scores = [[row["objective/scores"] for row in rows(run)] for run in (made, whole)]
    assert scores[0] == scores[1]


def test_a_fork_of_the_process_ends_at_a_signal() -> None:
    """As a reward function does with a worker that takes too long."""
    codes: list[int | None] = []

    def score(completions: list[str], **_: Any) -> list[float]:
        context = multiprocessing.get_context("fork")
        begun = context.Event()  # Python drops a signal that arrives while it forks

        def work() -> None:
            begun.set()
            time.sleep(60)

        worker = context.Process(target=work)
        worker.start()
        begun.wait()
        worker.terminate()
        worker.join(20)
        codes.append(worker.exitcode)
        worker.kill()
        return [1.0] * len(completions)

    small(reward_funcs=score, reward_model=None, total_episodes=4).train()
    assert codes == [-signal.SIGTERM]


@pytest.mark.parametrize("ignored", [False, True])
def test_signals_that_the_program_handles_are_left_to_it(ignored: bool) -> None:
    seen: list[int] = []
    made = small(total_episodes=8, save_strategy="no")
    score, before = made.engine.reward.score, signal.getsignal(signal.SIGTERM)

    def pressed(rollout: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return score(rollout)

    made.engine.reward.score = pressed  # type: ignore[method-assign]
    handler = signal.SIG_IGN if ignored else lambda number, _: seen.append(number)
    signal.signal(signal.SIGTERM, handler)
    try:
        made.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (made.state.global_step, bool(seen)) == (2, not ignored)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("schedule", ["in_order", "as_completed"])
def test_a_run_goes_on_after_an_interrupt(tmp_path: Path, schedule: str, presses: int) -> None:
    """In a notebook the process lives on."""
    made = small(output_dir=str(tmp_path), total_episodes=24, max_lag=1, rollout_schedule=schedule)
    score, calls = made.engine.reward.score, []

    def pressed(rollout: Any) -> Any:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            while not made._run.checkpoints.shutdown.requested:
                time.sleep(0.01)
            if presses == 2:
                os.kill(os.getpid(), signal.SIGINT)
        return score(rollout)

    made.engine.reward.score = pressed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.state.global_step < 6
    assert len(checkpoint.checkpoints(tmp_path)) == (presses == 1)
    made.train()
    assert made.state.global_step == 6
    assert all(row["rollout/lag"] <= 1 for row in rows(made))
    assert threading.active_count() == 1 or not [
        t for t in threading.enumerate() if t.name.startswith("rollout")
    ]


def press_at(made: Any, call: int) -> None:
    """Ctrl-C in optimizer step ``call`` of the run, counted from 1."""
    real, count = made.engine.learner.optimizer_step, []

    def pressed(*args: Any, **kwargs: Any) -> Any:
        count.append(1)
        if len(count) == call:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    made.engine.learner.optimizer_step = pressed
    with pytest.raises(KeyboardInterrupt):
        made.train()


def test_an_update_that_was_broken_off_is_told_of(tmp_path: Path, logged: Any) -> None:
    made = small(output_dir=str(tmp_path), total_episodes=12)
    press_at(made, 4)  # the second of two steps of the second update
    with logged("iteration 2 was interrupted between optimizer steps"):
        made.train()
    assert made.engine.state_consistent


def test_a_library_that_does_not_come_back_is_left_behind() -> None:
    held = threading.Lock()
    held.acquire()

    thread = threading.Thread(target=held.acquire, daemon=True)
    thread.start()
    stop([thread], threading.Event(), patience=0.1)
    assert thread.is_alive()
    held.release()
    thread.join(5)


def test_an_interrupt_of_a_run_in_order_changes_no_checkpoint(tmp_path: Path) -> None:
    press_at(trainer(tmp_path, max_lag=1), 4 * 4 + 2)  # in the fifth update
    assert [checkpoint.parse_step(p) for p in checkpoint.checkpoints(tmp_path)] == [3]
    second = trainer(tmp_path, max_lag=1)
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run(1))
