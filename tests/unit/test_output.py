"""Where runs write, two runs in one folder, and what a run sets for its process."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import logging as transformers_logging

from kedge import PPOConfig, output
from kedge.cli import generate
from kedge.cli.main import main
from kedge.loop.shutdown import GracefulShutdown
from kedge.output import LOCK, RunLock, check_file, check_folder, lock_output_dir
from kedge.records.errors import ConfigError
from kedge.trainers.base import TrainerShell, configure_process
from kedge.trainers.hf_callbacks import Callbacks

HOLD = "import sys, time; from kedge.output import RunLock; lock = RunLock(sys.argv[1]);"
HOLD += "lock.__enter__(); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of tmp_path/run."""
    made = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "held\n"
    yield made
    made.kill()
    made.wait()
    assert made.stdin is not None
    made.stdin.close()
    made.stdout.close()


# -- folders ----------------------------------------------------------------------------------


def test_folders_that_cannot_be_used_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    for folder in ("", " ", tmp_path / "file", below, "a\0b", "\ud800", "~nobody-x/y"):
        with pytest.raises(ConfigError, match=r"output_dir=.*name (a|one|ano)"):
            check_folder("output_dir", folder)
    with pytest.raises(ConfigError, match=r"output_dir='' must be a non-empty"):
        PPOConfig(output_dir="", use_cpu=True)
    check_folder("output_dir", tmp_path / "new" / "below")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_refuses_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(output.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"x=.*Read-only file system.*name another folder"):
        check_folder("x", tmp_path)


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for file in ("", tmp_path, tmp_path / "file" / "x.csv"):
        with pytest.raises(ConfigError, match="--output"):
            check_file("--output", file)
    check_file("--output", tmp_path / "new" / "x.csv")
    check_file("--output", tmp_path / "file")


def test_commands_find_it_before_they_load_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    below = str(tmp_path / "file" / "x")
    train = ["--model_name_or_path", str(tmp_path), "--dataset_name", str(prompts)]
    rl = [*train, "--use_cpu", "True", "--reward_funcs", "length"]
    for words, option in (
        (["ppo", *rl, "--output_dir", ""], "output_dir"),
        (["ppo", *rl, "--output_dir", below], "output_dir"),
        (["grpo", *rl, "--output_dir", str(tmp_path), "--save_rollouts", below], "save_rollouts"),
        (["generate", str(tmp_path), str(prompts), "--output", below], "--output"),
    ):
        assert main(words) == 2
        assert f"{option}=" in capsys.readouterr().err, words


def test_generated_answers_are_no_formulas_in_a_spreadsheet(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "=1+1", "=x": -2.5}, {"prompt": "+", "completion": "a"}]
    generate.write(tmp_path / "x.csv", rows)
    assert (tmp_path / "x.csv").read_text().splitlines() == [
        "prompt,completion,'=x",
        "p,'=1+1,-2.5",
        "'+,a,",
    ]
    generate.write(tmp_path / "x.jsonl", rows)
    assert [json.loads(x) for x in (tmp_path / "x.jsonl").read_text().splitlines()] == rows


# -- the lock ---------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_run_is_refused_until_the_first_ends(
    tmp_path: Path, other: subprocess.Popen[str], killed: bool
) -> None:
    said = f"in use by another run: process {other.pid} on {socket.gethostname()}"
    with pytest.raises(ConfigError, match=said), RunLock(tmp_path / "run"):
        raise AssertionError
    assert other.stdin is not None
    other.kill() if killed else other.stdin.close()
    other.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    with pytest.raises(KeyError), RunLock(tmp_path / "run"):
        raise KeyError
    with RunLock(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / LOCK).read_text()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_may_take_its_lock_again_but_another_thread_may_not(tmp_path: Path) -> None:
    refused: list[BaseException] = []

    def try_it() -> None:
        try:
            with RunLock(tmp_path):
                pass
        except ConfigError as error:
            refused.append(error)

    with RunLock(tmp_path):
        with RunLock(tmp_path / "x" / ".."):
            pass
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
        assert f"process {os.getpid()} " in str(refused[0])
    try_it()
    assert len(refused) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    ready, done = os.pipe(), os.pipe()
    lock = RunLock(tmp_path)
    lock.__enter__()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        lock.__exit__()  # as an exception on its way out of the child does
        os._exit(0)
    os.read(ready[0], 1)
    held = RunLock._held.pop(lock.file)
    os.close(held._handle)  # as if this process had been killed, and the child not
    with RunLock(tmp_path):
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        assert (tmp_path / LOCK).is_file()
    for end in (*ready, *done):
        os.close(end)


def test_without_locks_of_the_file_system_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output.fcntl, "flock", refuse)
    with RunLock(tmp_path / "run"):
        assert "a second run in the folder is not noticed" in caplog.text


def claim(folder: Path, *, rank: int = 0, ranks: int = 1) -> SimpleNamespace:
    return SimpleNamespace(output_dir=str(folder), process_index=rank, world_size=ranks)


def test_the_first_rank_holds_the_lock_and_all_hear_of_it(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    def broadcast(sent: list[str | None]) -> list[str | None]:
        told[:] = told or sent  # the first rank calls first
        return told

    monkeypatch.setattr("accelerate.utils.broadcast_object_list", broadcast)
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=f"process {other.pid}"):
            lock_output_dir(claim(tmp_path / "run", rank=rank, ranks=2)).__enter__()
    told.clear()
    with (
        lock_output_dir(claim(tmp_path / "free", ranks=2)),
        lock_output_dir(claim(tmp_path / "free", rank=1, ranks=2)),
    ):
        assert (tmp_path / "free" / LOCK).is_file()
    assert list((tmp_path / "free").iterdir()) == []


def test_no_run_starts_resumes_or_tidies_a_folder_in_use(
    tmp_path: Path, other: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any weight is loaded; the folders of a save in progress stay."""
    saving = tmp_path / "run" / ".saving-checkpoint-3"
    saving.mkdir()
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    words = ["--model_name_or_path", str(tmp_path), "--dataset_name", str(prompts)]
    words += ["--use_cpu", "True", "--output_dir", str(tmp_path / "run"), "--dummy_reward", "True"]
    for more in ([], ["--resume_from_checkpoint", "True"], ["--overwrite_output_dir", "True"]):
        assert main(["ppo", *words, *more]) == 2
        assert f"in use by another run: process {other.pid}" in capsys.readouterr().err
    shell = TrainerShell.__new__(TrainerShell)
    shell.args = PPOConfig(output_dir=str(tmp_path / "run"), use_cpu=True, max_steps=1)
    shell._run = SimpleNamespace(
        engine=SimpleNamespace(step=0, batch_sizes=SimpleNamespace(iterations=1)),
        checkpoints=SimpleNamespace(),
    )
    for resume in (None, True):
        with pytest.raises(ConfigError, match="in use by another run"):
            shell.train(resume_from_checkpoint=resume)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {LOCK, saving.name}


def test_a_folder_that_is_moved_away_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLock(tmp_path / "a"):
        (tmp_path / "a").rename(tmp_path / "b")
    assert f"{tmp_path / 'a'} was moved or deleted while the run wrote to it" in caplog.text


@pytest.fixture(autouse=True)
def _put_back():
    yield
    torch.use_deterministic_algorithms(False)


def config(tmp_path, **options):
    return PPOConfig(output_dir=str(tmp_path / "out"), **options)


def test_full_determinism_is_asked_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # set by it; put back afterwards
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    configure_process(config(tmp_path))
    assert not torch.are_deterministic_algorithms_enabled()
    configure_process(config(tmp_path, full_determinism=True))
    assert torch.are_deterministic_algorithms_enabled()


def test_each_process_has_its_log_level(tmp_path, monkeypatch):
    before = transformers_logging.get_verbosity()
    configure_process(config(tmp_path))
    assert transformers_logging.get_verbosity() == before
    configure_process(config(tmp_path, log_level="error"))
    assert transformers_logging.get_verbosity() == logging.ERROR
    assert logging.getLogger("kedge").level == logging.ERROR
    other = config(tmp_path, log_level="debug", log_level_replica="critical")
    monkeypatch.setattr(other.distributed_state, "local_process_index", 1)
    monkeypatch.setattr(other.distributed_state, "process_index", 1)
    configure_process(other)
    assert logging.getLogger("kedge").level == logging.CRITICAL


def test_tensorboard_writes_where_logging_dir_says(tmp_path):
    where = str(tmp_path / "curves")
    made = Callbacks(config(tmp_path, report_to="tensorboard", logging_dir=where))
    found = [c.logging_dir for c in made.handler.callbacks if hasattr(c, "logging_dir")]
    assert found == [where]


def test_an_experiment_that_has_a_name_names_the_run(tmp_path):
    assert config(tmp_path).run_name is None
    assert config(tmp_path, exp_name="mine").run_name == "mine"
    assert config(tmp_path, exp_name="mine", run_name="this").run_name == "this"


def test_a_signal_is_recorded_although_nobody_reads_the_screen():
    read, write = os.pipe()
    os.close(read)
    screen = os.dup(2)
    os.dup2(write, 2)
    wishes = GracefulShutdown()
    try:
        with wishes.install():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(write)
    assert wishes.requested


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_first_signal_is_a_wish_and_the_second_an_order(number, raised, capfd):
    wishes = GracefulShutdown()
    before = signal.getsignal(number)
    with wishes.install():
        assert not wishes.requested
        os.kill(os.getpid(), number)
        assert wishes.requested
        name = signal.Signals(number).name
        assert f"kedge: {name}: stopping after this iteration" in capfd.readouterr().err
        with pytest.raises(raised):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    with pytest.raises(raised):
        wishes.reraise()
    other = signal.SIGTERM if number == signal.SIGINT else signal.SIGINT
    wishes = GracefulShutdown()
    with wishes.install():  # what a launcher adds is not a second wish
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), other)
    with pytest.raises(raised):
        wishes.reraise()


def test_an_actor_ends_with_the_process_that_started_it() -> None:
    """Ray leaves an actor running whose raylet was killed."""
    actor = (
        "import os; from kedge.loop.shutdown import exit_with; parent = os.getppid();"
        "print(os.getpid(), flush=True); exit_with(parent, every=0.05)"
    )
    raylet = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
        "time.sleep(60)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", raylet, actor], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    started.kill()
    started.wait()
    begin = time.monotonic()
    while Path(f"/proc/{pid}").exists() and not zombie(pid):
        assert time.monotonic() - begin < 50
        time.sleep(0.05)
    started.stdout.close()


def zombie(pid: int) -> bool:
    """Whether a process has ended and nobody has waited for it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
