"""The table of ``benchmarks/dispatch.py`` from the rules alone: imports neither it nor Kedge."""

from __future__ import annotations

import heapq
import json
import math
import random
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SLOTS, GROUP, MEDIAN, LONGEST, PAUSE = 64, 8, 600, 8192, 0.02


class Run:
    """Engines that sample groups of eight, and a learner that needs the mean length per batch."""

    def __init__(self, engines: int, lag: int, sigma: float, load: float, in_flight: bool) -> None:
        self.rng = random.Random(engines + lag)
        self.sigma, self.lag, self.load, self.in_flight = sigma, lag, load, in_flight
        self.mean = sum(self.length() for _ in range(100_000)) / 100_000
        self.batch = engines * SLOTS // GROUP
        self.clock = self.stopped = 0.0  # engines do not see the time in which they are stopped
        self.newest = self.trained = self.next = 0  # version, batches taken, next group
        # by engine: token steps so far, when that was, version, and rows by their last step
        self.steps, self.seen, self.version = [0.0] * engines, [0.0] * engines, [0] * engines
        self.rows: list[list[tuple[float, int, float, int]]] = [[] for _ in range(engines)]
        self.arrivals = [[0.0] for _ in range(engines)]  # steps at which versions came
        # of groups that are not taken: unfinished rows, version of the start, and that of the end
        self.left: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.tokens: dict[int, list[tuple[int, int]]] = {}  # (version, number) of a group

    def length(self) -> int:
        return max(1, min(LONGEST, round(MEDIAN * math.exp(self.rng.gauss(0, self.sigma)))))

    def pace(self, e: int) -> float:
        return 1 - self.load + self.load * len(self.rows[e]) / SLOTS

    def catch_up(self, e: int) -> None:
        if self.rows[e]:
            self.steps[e] += (self.clock - self.seen[e]) / self.pace(e)
        self.seen[e] = self.clock

    def room(self) -> float:
        return (self.newest + self.lag + 1 - self.trained) * self.batch - len(self.done)

    def start(self, places: list[int]) -> None:
        for e in places:
            self.catch_up(e)
            if self.in_flight or not self.rows[e]:
                self.arrivals[e] += [self.steps[e]] * (self.newest - self.version[e])
                self.version[e] = self.newest
            old = self.newest - self.version[e] > self.lag // 2
            bound = 0 if old else (self.version[e] + self.lag + 1) * self.batch
            while len(self.rows[e]) + GROUP <= SLOTS:
                room = self.room() - sum(map(len, self.rows)) / GROUP
                if (room < 1) if self.in_flight else (self.next >= bound):
                    break
                for _ in range(GROUP):
                    n = self.length()
                    heapq.heappush(self.rows[e], (self.steps[e] + n, self.next, self.steps[e], n))
                self.left[self.next], self.since[self.next] = GROUP, self.version[e]
                self.tokens[self.next] = []
                self.next += 1

    def following(self) -> tuple[float, int]:
        """When the next row ends, and in which engine."""
        busy = [e for e, rows in enumerate(self.rows) if rows]
        waits = [max(0.0, self.rows[e][0][0] - self.steps[e]) * self.pace(e) for e in busy]
        ends = [(self.seen[e] + wait, e) for e, wait in zip(busy, waits, strict=True)]
        return min(ends, default=(math.inf, -1))

    def end_row(self) -> None:
        at, e = self.following()
        self.clock = max(self.clock, at)
        self.catch_up(e)
        end, group, begin, n = heapq.heappop(self.rows[e])
        self.steps[e] = max(self.steps[e], end)
        first = end
        for version in range(self.version[e], -1, -1) if self.in_flight else ():
            last, first = first, max(self.arrivals[e][version], begin)
            self.tokens[group].append((version, round(max(0.0, last - first))))
            if first == begin:
                break
        since = self.version[e] if self.in_flight else self.since[group]
        self.tokens[group] += [] if self.in_flight else [(since, n)]
        self.left[group] -= 1
        if not self.left[group]:
            self.done[group] = since
        self.start([e])

    def take(self) -> list[int]:
        """The next batch, or nothing."""
        if len(self.done) < self.batch:
            return []
        if self.in_flight:
            return sorted(self.done, key=self.done.__getitem__)[: self.batch]
        running = [self.since[g] for g, rows in self.left.items() if rows]
        chosen: dict[int, None] = {}
        for later in range(self.lag + 1):  # the later batches must have room for what is due
            due = self.trained + later - self.lag
            unfinished = sum(v <= due for v in running)
            if unfinished > later * self.batch:
                return []
            must = sum(v <= due for v in self.done.values()) + unfinished - later * self.batch
            for g in self.done:
                if len(chosen) < must and self.done[g] <= due:
                    chosen[g] = None
        return [*chosen, *(g for g in self.done if g not in chosen)][: self.batch]

    def run(self, batches: int, first: int) -> tuple[float, float]:
        """Share of the ideal, and the part of the tokens that is older than the lag."""
        counted, old, begin, places = 0, 0, 0.0, range(len(self.rows))
        for step in range(first + batches):
            begin = self.clock + self.stopped if step == first else begin
            self.start(self.rng.sample(places, len(places)))
            while not (taken := self.take()):
                self.end_row()
            self.trained += 1
            for g in taken:
                del self.done[g], self.left[g], self.since[g]
                for version, n in self.tokens.pop(g) if step >= first else ():
                    counted += n
                    old += n * (step - version > self.lag)
            end = self.clock + self.mean
            while self.following()[0] <= end and not (self.in_flight and self.room() <= 0):
                self.end_row()
            full = self.in_flight and self.room() <= 0
            self.stopped += (end - self.clock) * full
            self.clock = self.clock if full else end
            self.stopped += PAUSE * self.mean * self.in_flight
            self.newest += 1
        return batches * self.mean / (self.clock + self.stopped - begin), old / counted


def main() -> None:
    recorded = json.loads((RESULTS / "dispatch.json").read_text())["simulation"]
    names, results = ("engines", "max_lag", "sigma", "load", "in_flight"), []
    for row in recorded:
        if row["engines"] > 8:
            continue  # many minutes, since every event looks at all engines
        case = {name: row[name] for name in names}
        share, old = Run(*case.values()).run(60, 6 + 2 * row["max_lag"])
        results.append(case | {"trained": share, "trained_mask_old": share * (1 - old)})
        (RESULTS / "dispatch_check.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
