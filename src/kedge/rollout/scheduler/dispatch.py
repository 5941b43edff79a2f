"""Which groups of prompts are sampled when, and which are trained on: no threads, no tensors.

Groups are numbered over the run: ``number // K`` is the iteration whose prompts they have, with
``K`` groups per iteration.  Weights of version v have been trained for v iterations.  A group that
was started with version v must be trained on by step ``v + max_lag``.  Two rules guarantee it:

    start   number n starts with version v only if n < (v + max_lag + 1) K
    take    after step s, for every later t, at most (t - s) K groups due by step t may remain

(otherwise step t could not use them all).  A step waits for groups that the second rule requires;
none is dropped.  Compare the admission rule
of AReaL (arXiv:2505.24298, section 5.1).

With in-flight weight updates (PipelineRL, arXiv:2509.19128) tokens have versions, not groups.  What
counts is the version with which a group was completed: those of the oldest version are trained on
first, and sampling pauses while as many are done as the next steps can take in time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    """The groups of a run: waiting, being sampled, or done.

    Every call costs O(log n) per group that it moves, plus O(max_lag).
    """

    per_step: int
    max_lag: int
    in_flight: bool = False
    next: int = 0  # next number that never started
    end: int = 0  # first number that is not sampled
    step: int = 0  # next step to take groups
    running: dict[int, int] = field(default_factory=dict)  # number -> version it started with
    done: dict[int, int] = field(default_factory=dict)  # as above, in order of completion
    returned: list[int] = field(default_factory=list)  # heap of groups lost by an engine
    _running_since: Counter[int] = field(default_factory=Counter)
    _done_since: Counter[int] = field(default_factory=Counter)

    def room(self, version: int, unfinished: float = 0.0) -> float:
        """Number of further groups that can complete in time with in-flight weights of ``version``.

        ``unfinished`` responses are being sampled, in groups: one of a group of 8 is 1 / 8.
        """
        steps = version + self.max_lag + 1 - self.step
        return steps * self.per_step - len(self.done) - unfinished

    def may_start(self, version: int, newest: int) -> bool:
        """Whether an engine takes more groups before it loads newer weights.

        Without in-flight updates it must complete what it holds first, which leaves slots empty;
        it does so every ``max_lag / 2`` iterations.
        """
        return newest - version <= self.max_lag // 2

    def startable(self, version: int) -> int:
        """Number of groups that may start with weights of ``version``."""
        bound = self._bound(version)
        return max(0, bound - self.next) + sum(number < bound for number in self.returned)

    def start(self, version: int, limit: int) -> list[int]:
        """Start up to ``limit`` groups; returns their numbers, those that an engine lost first."""
        bound = self._bound(version)
        started: list[int] = []
        while self.returned and self.returned[0] < bound and len(started) < limit:
            started.append(heapq.heappop(self.returned))
        new = range(self.next, max(self.next, min(bound, self.next + limit - len(started))))
        self.next = new.stop
        started += new
        self.running.update(dict.fromkeys(started, version))
        self._running_since[version] += len(started)
        return started

    def complete(self, numbers: Iterable[int], version: int) -> None:
        """Record that these groups are done; the engine has weights of ``version``."""
        for number in numbers:
            since = self.running.pop(number)
            self._running_since[since] -= 1
            self._add_done(number, version)

    def reload(self, numbers: Iterable[int], version: int) -> None:
        """Record that the engine sampling these groups has new weights."""
        for number in numbers:
            self._running_since[self.running[number]] -= 1
            self._running_since[version] += 1
            self.running[number] = version

    def give_back(self, numbers: Iterable[int]) -> None:
        """Return groups that an engine lost; they start again before others."""
        for number in numbers:
            self._running_since[self.running.pop(number)] -= 1
            heapq.heappush(self.returned, number)

    def take(self, step: int) -> list[int] | None:
        """The groups to train on in ``step``, or None to wait."""
        if len(self.done) < self.per_step or not self._ready(step):
            return None
        taken: dict[int, None] = {}
        if self.in_flight:  # oldest version first
            taken = dict.fromkeys(sorted(self.done, key=self.done.__getitem__)[: self.per_step])
        else:
            for later in range(self.max_lag + 1):
                limit = step + later - self.max_lag
                required = self._due(limit) - later * self.per_step
                if required > len(taken):
                    self._take_first(taken, required, since=limit)
            self._take_first(taken, self.per_step, since=step)
        for number in taken:
            self._done_since[self.done.pop(number)] -= 1
        self.step = step + 1
        for counts in (self._running_since, self._done_since):
            counts += Counter()  # drops zeros: there are at most max_lag + 2 counts
        return list(taken)

    def restore(self, step: int, done: Mapping[int, int], lost: Iterable[int]) -> bool:
        """State before ``step``, as after a resume; False if groups are too old for ``max_lag``.

        ``done`` has number and version of groups that are done, ``lost`` those to start again.
        """
        self.clear(step)
        for number, version in done.items():
            self._add_done(number, version)
        self.returned = sorted(lost)
        self.next += len(self.done) + len(self.returned)
        return self.in_flight or all(
            self._due(step + later - self.max_lag) <= (later + 1) * self.per_step
            and all(version + self.max_lag >= step for version in done.values())
            for later in range(self.max_lag + 1)
        )

    def clear(self, step: int) -> None:
        """Forget all groups; ``step`` starts with its first prompts."""
        self.step = step
        self.next = step * self.per_step
        for state in (self.running, self.done, self.returned):
            state.clear()
        self._running_since.clear()
        self._done_since.clear()

    def _bound(self, version: int) -> int:
        if self.in_flight:
            return self.end
        return min(self.end, (version + self.max_lag + 1) * self.per_step)

    def _add_done(self, number: int, since: int) -> None:
        self.done[number] = since
        self._done_since[since] += 1

    def _ready(self, step: int) -> bool:
        """Whether the groups that ``step`` must take are done.

        With in-flight updates, engines whose weights are too old are waited for until they load
        those of ``step``.
        """
        oldest = step - self.max_lag
        return all(
            _up_to(self._running_since, oldest + later) <= later * self.per_step
            for later in range(self.max_lag + (not self.in_flight))
        )

    def _due(self, since: int) -> int:
        """Groups started no later than ``since``."""
        return _up_to(self._done_since, since) + _up_to(self._running_since, since)

    def _take_first(self, taken: dict[int, None], size: int, *, since: int) -> None:
        """Fill ``taken`` to ``size`` with the first completed groups that started no later."""
        for number, version in self.done.items():
            if len(taken) >= size:
                break
            if version <= since:
                taken[number] = None


def deal(tokens: Mapping[int, int], ranks: int) -> list[list[int]]:
    """Equally many groups for every rank, and about as many tokens.

    The group with the most tokens goes first, to the rank with the fewest so far.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    totals = [(0, rank) for rank in range(ranks)]  # a heap: of ranks that need more groups
    for number in sorted(tokens, key=tokens.__getitem__, reverse=True):
        total, rank = heapq.heappop(totals)
        dealt[rank].append(number)
        if len(dealt[rank]) * ranks < len(tokens):
            heapq.heappush(totals, (total + tokens[number], rank))
    return dealt


def _up_to(counts: Counter[int], version: int) -> int:
    return sum(count for v, count in counts.items() if v <= version)
