"""Faults of runs on Ray: how each run ends or recovers, what is left running, and its resume.

    python -m benchmarks.ray_faults --times 4
    python -m benchmarks.ray_faults --kinds engine_killed vllm_killed --times 1 --at 5 --append
    python -m benchmarks.ray_faults --table

Each run is ``kedge async-ppo`` with stories-head32, two rollout engines and ``max_lag=1``, with a
checkpoint every two iterations.  A fault strikes a process of the run after some iterations; some
kinds wait until the process is sampling.  Timeouts are the defaults.  Recorded are the seconds
until the first line on the screen that names the fault (``found``), and until the command has ended
or two more iterations are logged (``seconds``).  A run that ends is resumed, and its rows are
compared with those of an undisturbed run.  Needs Ray; the kinds that begin with ``vllm`` need vLLM.
Prints each fault and writes results/ray_faults.json; ``--table`` prints the recorded ones, by kind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from .ray_nodes import two_nodes
from .ray_run import ITERATIONS, LIMIT, Run, line_of, rows, same

RESULTS = Path(__file__).parent / "records"
OTHER = re.compile("preflight|the trained model is in|the resumed run|Token authentication")
SUSPENDED = 70.0  # seconds
LONG = 600.0  # seconds of a long iteration
STRIKE_AT = 3  # iterations that are finished when the fault strikes, unless --at says otherwise


# -- faults --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What strikes, and whether the run is expected to continue."""

    strike: Callable[[Run], None]
    recovers: bool
    sampling: tuple[str, ...] = ()  # names of processes; the fault waits until one samples
    flags: tuple[str, ...] = ()
    cpus: tuple[int, int] | None = None  # of the nodes, if the run is on a cluster of two
    seconds: float = 0.0  # of the iteration in which it strikes
    role: str = "Learner"  # whose node is lost


def send(number: int, *names: str) -> Callable[[Run], None]:
    """Send a signal to the first process with one of the names."""

    def strike(run: Run) -> None:
        targets = run.named(*names)
        if "process_guard" not in names:  # its command line ends with that of the server
            targets = [x for x in targets if "process_guard" not in line_of(x)]
        if not targets:
            raise LookupError(f"no process is called {' or '.join(names)}")
        targets[0].send_signal(number)

    return strike


def computes(run: Run, *names: str) -> bool:
    """Whether a process with one of the names uses the CPU, alone or in its children."""

    def seconds() -> float:
        trees = [tree for p in run.named(*names) for tree in (p, *p.children(recursive=True))]
        times = [tree.cpu_times() for tree in trees]
        return sum(t.user + t.system for t in times)

    try:
        before = seconds()
        time.sleep(0.4)
        return seconds() - before > 0.05
    except psutil.NoSuchProcess:
        return False


def driver(number: int, *, group: bool = False) -> Callable[[Run], None]:
    """Send a signal to the command, or to its whole process group."""

    def strike(run: Run) -> None:
        (os.killpg if group else os.kill)(run.process.pid, number)

    return strike


def in_long_iteration(strike: Callable[[Run], None]) -> Fault:
    """A fault in the middle of an iteration of ten minutes."""

    def strike_later(run: Run) -> None:
        run.long.write_text(str(LONG))
        run.wait(lambda: not run.long.exists() or run.ended())
        time.sleep(2.0)
        strike(run)

    return Fault(strike=strike_later, recovers=False, seconds=LONG)


def suspend(run: Run) -> None:
    """Stop all processes of the run as a batch system does, for longer than the timeouts."""
    processes = [psutil.Process(run.process.pid), *run.children()]
    for number, seconds in ((signal.SIGSTOP, SUSPENDED), (signal.SIGCONT, 0.0)):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        time.sleep(seconds)


def lost_node(role: str, cpus: tuple[int, int], *, engines: int, recovers: bool = False) -> Fault:
    """The second node is lost, on which a role runs; the driver is on the first."""
    flags = ("--vllm_num_engines", str(engines))
    return Fault(strike=lambda run: None, recovers=recovers, flags=flags, cpus=cpus, role=role)


VLLM = ("--ray_engine", "vllm", "--vllm_num_engines", "1", "--response_length", "200")
IN_FLIGHT = (
    *("--ray_engine", "embedded", "--response_length", "64", "--max_lag", "2"),
    *("--rollout_schedule", "as_completed", "--in_flight_weight_updates"),
)
SERVER = ("--rollout_engine", "vllm_server", "--vllm_num_engines", "1", "--response_length", "200")
LEARNERS = (
    *("--actor_num_gpus_per_node", "2", "--local_rollout_batch_size", "4"),
    *("--per_device_train_batch_size", "4"),
)
FAULTS = {
    "engine_killed": Fault(strike=send(9, "ray::Engine"), recovers=True),
    "engine_stopped": Fault(strike=send(19, "ray::Engine"), recovers=True),
    "mailbox_killed": Fault(strike=send(9, "ray::DriverMailbox"), recovers=True),
    "learner_killed": Fault(strike=send(9, "ray::Learner"), recovers=False),
    "learner_of_two_killed": Fault(strike=send(9, "ray::Learner"), recovers=False, flags=LEARNERS),
    "learner_stopped": Fault(strike=send(19, "ray::Learner"), recovers=False),
    "control_store_killed": Fault(strike=send(9, "gcs_server"), recovers=False),
    "raylet_killed": Fault(strike=send(9, "raylet/raylet"), recovers=False),
    "term_to_driver": Fault(strike=driver(15), recovers=False),
    "interrupt_to_driver": Fault(strike=driver(2), recovers=False),
    "term_to_group": Fault(strike=driver(15, group=True), recovers=False),
    "term_in_long_iteration": in_long_iteration(driver(15)),
    "interrupt_in_long_iteration": in_long_iteration(driver(2)),
    "term_to_group_in_long_iteration": in_long_iteration(driver(15, group=True)),
    "learner_killed_in_long_iteration": in_long_iteration(send(9, "ray::Learner")),
    "all_stopped": Fault(strike=suspend, recovers=True),
    "driver_killed": Fault(strike=driver(9), recovers=False),
    "engine_in_flight_killed": Fault(
        strike=send(9, "ray::Engine"), recovers=True, flags=IN_FLIGHT, sampling=("ray::Engine",)
    ),
    "vllm_killed": Fault(
        strike=send(9, "ray::Engine"), recovers=True, flags=VLLM, sampling=("ray::Engine",)
    ),
    "vllm_stopped": Fault(
        strike=send(19, "ray::Engine"), recovers=True, flags=VLLM, sampling=("ray::Engine",)
    ),
    "vllm_server_killed": Fault(
        strike=send(9, "api_server"), recovers=True, flags=SERVER, sampling=("EngineCore",)
    ),
    "vllm_core_killed": Fault(
        strike=send(9, "EngineCore"), recovers=True, flags=SERVER, sampling=("EngineCore",)
    ),
    "vllm_core_stopped": Fault(
        strike=send(19, "EngineCore"), recovers=True, flags=SERVER, sampling=("EngineCore",)
    ),
    "vllm_guard_killed": Fault(strike=send(9, "process_guard"), recovers=True, flags=SERVER),
    "node_lost": lost_node("Learner", (0, 2), engines=1),
    "engine_node_lost": lost_node("Engine", (2, 1), engines=2, recovers=True),
}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one fault did."""

    kind: str
    at: int  # iterations that were finished; 0: while the run started
    code: int | None  # exit code; None: given up
    found: float | None  # seconds until a line on stderr named the fault; None: none did
    seconds: float  # until two more iterations, or the end of the command
    said: list[str]  # lines on stderr after the fault
    load: float  # average load of the machine over a minute, at the fault
    left: list[str] = field(default_factory=list)
    exact: bool | None = None  # rows equal those of an undisturbed run; None: not compared


def wait_for_moment(run: Run, fault: Fault, at: int) -> None:
    """Wait until the fault is to strike; raises LookupError if the run ended before."""
    run.wait(lambda: run.steps >= at or run.ended())
    if at == 0:
        run.wait(lambda: bool(run.named("ray::Engine", "api_server")) or run.ended())
    elif fault.sampling:
        run.wait(lambda: computes(run, *fault.sampling) or run.ended())
    run.children()
    if run.ended():
        raise LookupError(f"the run ended before the fault: {run.said[-2000:]}")


class Listener:
    """Reads what a run writes on stderr after a fault."""

    def __init__(self, run: Run) -> None:
        self._run, self._before, self._begin = run, len(run.said), time.monotonic()
        self.found: float | None = None

    def lines(self) -> list[str]:
        """Complete lines about the fault, without addresses; notes when the first one appeared."""
        text = self._run.said[self._before :].rpartition("\n")[0]
        text = re.sub(r"\d+\.\d+\.\d+\.\d+", "HOST", text)
        lines = [line for line in text.splitlines() if line and not OTHER.search(line)]
        if lines and self.found is None:
            self.found = round(time.monotonic() - self._begin, 1)
        return lines

    def seconds(self) -> float:
        """Since the fault."""
        self.lines()
        return time.monotonic() - self._begin


def inject(
    kind: str, folder: Path, calm: list[dict[str, Any]], at: int, *, resume: bool = True
) -> Outcome:
    """Run the command, strike it, and resume it unless ``resume`` is False."""
    fault = FAULTS[kind]
    with contextlib.ExitStack() as stack:
        flags, strike, nodes = list(fault.flags), fault.strike, None
        if fault.cpus is not None:
            nodes = stack.enter_context(two_nodes(fault.cpus))
            flags += ["--ray_address", nodes.address]
            strike = partial(nodes.kill_node_of, fault.role)
        run, listener, seconds = Run(folder, *flags), None, LIMIT
        try:
            wait_for_moment(run, fault, at)
            load = os.getloadavg()[0]
            listener = heard = Listener(run)
            before = run.steps
            strike(run)
            enough = min(before + 2, ITERATIONS) if fault.recovers else ITERATIONS + 1
            limit = LIMIT + fault.seconds
            run.wait(lambda: heard.seconds() and (run.ended() or run.steps >= enough), limit)
            seconds = heard.seconds()
            while not run.ended() and heard.seconds() < 2 * limit:
                run.children()
                time.sleep(0.2)
        except TimeoutError:
            pass
        if not run.ended():
            os.killpg(run.process.pid, signal.SIGKILL)
        code, left = run.process.poll(), run.left()
        if listener is None:
            raise LookupError(f"the run did not get so far within {LIMIT:g} s")
        if nodes is not None:
            left += nodes.left()
        outcome = Outcome(
            kind=kind,
            at=at,
            code=code,
            found=listener.found,
            seconds=round(seconds, 1),
            said=[line[:400] for line in listener.lines()[:4]],
            load=round(load, 1),
            left=left,
        )
    if run.steps < ITERATIONS and resume:
        finish(folder, fault.flags)
    rounds = {"--ray_engine", "--rollout_engine"} & {*fault.flags}  # vLLM, as it batches
    resume &= bool(list(folder.glob("checkpoint-*")))
    if not rounds and (resume or run.steps == ITERATIONS):
        outcome.exact = same(rows(folder), calm)
    return outcome


def finish(folder: Path, flags: tuple[str, ...]) -> None:
    """Resume a run from its newest checkpoint, if it has one."""
    if list(folder.glob("checkpoint-*")):
        run = Run(folder, *flags, "--resume_from_checkpoint")
        with contextlib.suppress(TimeoutError):
            run.wait(run.ended)
        if not run.ended():
            os.killpg(run.process.pid, signal.SIGKILL)
        run.left()


def short(said: str) -> str:
    """The first clause of a message, without process ids."""
    said = re.sub(r"process \d+", "process ...", said.removeprefix("kedge async-ppo: error: "))
    for end in (";", ": {", "('", ", because"):
        said = said.partition(end)[0]
    return re.sub(r"HOST:\d+", "HOST", said)[:120].replace("|", "/")


def span(values: list[float]) -> str:
    """The smallest and the largest value."""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def table(faults: list[dict[str, Any]]) -> str:
    """Recorded faults by kind, as a table of docs/records/ray_faults.md."""
    lines = [
        "| fault | runs | exit code | reported after (s) | recovered or ended after (s) | load"
        " | message | left running | identical results |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in FAULTS:
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        if not of_kind:
            continue
        found = [fault["found"] for fault in of_kind if fault["found"] is not None]
        left = Counter(
            re.sub(r"-\w+$", "", name.split()[0]) for fault in of_kind for name in {*fault["left"]}
        )
        said = [short(fault["said"][0]) for fault in reversed(of_kind) if fault["said"]]
        exact = [fault["exact"] for fault in of_kind if fault["exact"] is not None]
        cells = [
            kind,
            str(len(of_kind)),
            ", ".join(dict.fromkeys(str(fault["code"]) for fault in of_kind)),
            span(found) if found else "never",
            span([fault["seconds"] for fault in of_kind]),
            span([round(fault["load"]) for fault in of_kind]),
            next(iter(said), "nothing"),
            "; ".join(f"{x} ({n} of {len(of_kind)})" for x, n in left.items()) or "nothing",
            f"{sum(exact)} of {len(exact)}" if exact else "not compared",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    kinds = {fault["kind"] for fault in faults}
    return "\n".join([*lines, "", f"{len(faults)} faults of {len(kinds)} kinds"])


def undisturbed(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run without a fault; those of an earlier call with ``--keep`` are reused."""
    expected = rows(folder)
    if len(expected) != ITERATIONS:
        calm = Run(folder)
        calm.wait(calm.ended)
        expected = rows(folder)
        if len(expected) != ITERATIONS:
            raise SystemExit(f"the undisturbed run failed: {calm.said[-3000:]}")
    return expected


def main() -> None:
    """Inject every kind of fault and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--at", type=int, nargs="+", default=[STRIKE_AT], help="iterations")
    parser.add_argument("--no_resume", action="store_true", help="do not resume runs that ended")
    parser.add_argument("--append", action="store_true", help="keep the recorded faults")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    parser.add_argument("--keep", type=Path, help="folder for the runs; not deleted")
    parser.add_argument("--out", type=Path, default=RESULTS / "ray_faults.json")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())["faults"]))
        return
    root = options.keep or Path(tempfile.mkdtemp(prefix="kedge-faults-"))
    expected = undisturbed(root / "calm")
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    recorded = before.get("faults", []) if options.append else []
    outcomes: list[Outcome] = []
    print("| fault | exit | found | seconds | load | left running | rows exact | said |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        for i, at in enumerate(options.at * options.times):
            try:
                resume = not options.no_resume
                found = inject(kind, root / f"{kind}-{i}", expected, at, resume=resume)
            except LookupError as error:
                print(f"{kind} was not injected: {error}", flush=True)
                continue
            outcomes.append(found)
            print(
                f"| {kind} | {found.code} | {found.found} | {found.seconds} | {found.load}"
                f" | {'; '.join(found.left) or 'nothing'} | {found.exact} | {found.said[:1]} |",
                flush=True,
            )
            report = {
                "processor": platform.processor() or platform.machine(),
                "iterations": ITERATIONS,
                "faults": [*recorded, *(asdict(x) for x in outcomes)],
                "earlier": before.get("earlier", []),
            }
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.keep is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
