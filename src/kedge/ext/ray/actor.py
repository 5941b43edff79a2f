"""An actor that is monitored, and restarted if it dies or hangs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kedge.background import check_stop
from kedge.ext.ray.cluster import HEALTH, ActorProcess, ControlStore, cause
from kedge.loop.shutdown import exit_with
from kedge.records.errors import ConfigError, KedgeError, LostNodeError, RolloutError
from kedge.rollout.liveness import WARN_AFTER, RunningTime, WorkerLimits, silence, starting

logger = logging.getLogger(__name__)
_MAX_RESTARTS = 3  # in a row, without a finished call in between
_POLL = 1.0  # seconds between checks of a call
_NODE_PATIENCE = 5.0  # seconds without a node for a restart
_NOT_STARTED = ActorProcess(pid=0, address="", node="")


class LostActorError(RolloutError):
    """The actor died or hangs."""


class Actor:
    """An object in a Ray actor that is restarted if its process is lost.

    If the process dies, does not respond for ``limits.patience`` or takes longer than
    ``limits.call``, it is killed and restarted, ``revive`` restores the state of the object, and
    the call is repeated.  ``build`` is called with the actor's handle and starts to build the
    object; ``options`` are the actor's: resources and placement.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[Any], Any],
        *,
        options: Mapping[str, Any],
        limits: WorkerLimits,
        revive: Callable[[Actor], None] | None = None,
    ) -> None:
        self.name, self.restarts = name, 0
        self.process = _NOT_STARTED
        self._build, self._options, self._limits = build, dict(options), limits
        self._revive = revive
        self._control_store = ControlStore(2 * limits.heartbeat)
        self.handle: Any = None
        self._start()

    def call(self, method: str, *args: Any, within: float | None = None, **named: Any) -> Any:
        """Call ``method`` of the object; repeated if the process is lost.

        Each call may take ``within`` seconds, or ``limits.call``.

        Raises:
            LostNodeError: the actor's node was lost, and no other has room.
            RolloutError: the process was lost several times in a row.
        """
        tries = 0
        while True:
            try:
                return self.once(method, *args, within=within, **named)
            except LostActorError as error:  # noqa: PERF203
                tries = self._restart(error, tries)

    def once(self, method: str, *args: Any, within: float | None = None, **named: Any) -> Any:
        """Call ``method`` of the object once; LostActorError if the process is lost."""
        if self.handle is None:
            raise LostActorError(f"{self.name} is not running")
        limit = self._limits.call if within is None else within
        return self._wait(self.handle.call.remote(method, *args, **named), limit)

    def interrupt(self, method: str) -> None:
        """Call ``method`` of the object now, during a running call, and do not wait for it."""
        self.handle.call.options(concurrency_group=HEALTH).remote(method)

    def close(self) -> None:
        """Kill the process; may be called again."""
        import ray

        if self.handle is not None and ray.is_initialized():
            ray.kill(self.handle)
        self.handle = None

    def _restart(self, error: LostActorError, tries: int) -> int:
        if tries >= _MAX_RESTARTS:
            raise RolloutError(
                f"{self.name} was lost {tries + 1} times in a row: {error}"
            ) from error
        logger.warning("%s; restarting it", error)
        self.restarts += 1
        self.close()
        try:
            self._start()
            if self._revive is not None:
                self._revive(self)
        except LostActorError as lost:
            logger.warning("%s", lost)
            self.close()  # it may be alive, but must not be called without its state
        return tries + 1

    def _start(self) -> None:
        import ray

        # The process is named by its role: ray::Engine, ray::Learner, ...
        role = type(self.name.split()[0].capitalize(), (ActorHost,), {})
        actor = ray.remote(concurrency_groups={HEALTH: 1})(role)
        self.handle = actor.options(**self._options).remote()
        ping = self._ping()
        with starting(f"{self.name} waits for its process"):
            self._wait_for_process(ping)
        self.process = self._get(ping)
        built = self._build(self.handle)
        # Without health checks: a healthy process may not respond while it imports.
        clock = RunningTime()
        with starting(f"{self._where} imports and loads"):
            while not self._ready([built], 1.0):
                if clock.seconds() > self._limits.start:
                    raise LostActorError(
                        f"{self._where} was not ready within {self._limits.start:g} s"
                        " (worker_start_timeout)"
                    )
        self._get(built)

    def _wait_for_process(self, ping: Any) -> None:
        clock, with_node = RunningTime(), 0.0
        while not self._ready([ping], 1.0):
            now = clock.seconds()
            if not self.restarts or self._has_node():
                with_node = now
            if now - with_node > _NODE_PATIENCE:
                self.close()
                raise LostNodeError(
                    f"{self.name} cannot be restarted: its node is lost, and no other node has"
                    f" room for it ({self._options_text()})"
                )
            if now > self._limits.start:
                self.close()
                raise ConfigError(
                    f"{self.name} did not start within {self._limits.start:g} s"
                    f" (worker_start_timeout); it needs {self._options_text()}"
                )

    def _has_node(self) -> bool:
        from ray.util import placement_group_table

        group = getattr(self._options.get("scheduling_strategy"), "placement_group", None)
        return group is None or bool(placement_group_table(group)["state"] != "RESCHEDULING")

    @property
    def _where(self) -> str:
        return f"{self.name} ({self.process})" if self.process.pid else self.name

    def _options_text(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self._options.items() if k.startswith("num_"))

    def _ping(self) -> Any:
        return self.handle.ping.options(concurrency_group=HEALTH).remote()

    def _wait(self, call: Any, limit: float) -> Any:
        """The result of a call, with health checks while it is computed."""
        clock, next_ping = RunningTime(), self._limits.heartbeat
        self._check_cluster()
        now = clock.seconds()
        while not self._ready([call], min(_POLL, limit - now, next_ping - now)):
            check_stop()
            now = clock.seconds()
            if now >= limit:
                raise LostActorError(f"{self._where} took longer than {limit:g} s")
            self._check_cluster()
            if now >= next_ping:
                self._check_health(call, clock)
                next_ping = clock.seconds() + self._limits.heartbeat
        return self._get(call)

    def _check_health(self, call: Any, clock: RunningTime) -> None:
        """Wait until the call has ended, or its process responds."""
        ping, silent, warned = self._ping(), RunningTime(), False
        patience = self._limits.patience
        while not self._ready([call, ping], 0.5):
            clock.seconds()  # reads it often enough
            if (seconds := silent.seconds()) > patience:
                raise LostActorError(
                    f"{self._where} did not respond for {patience:g} s (worker_timeout)"
                )
            if seconds > WARN_AFTER and not warned:
                warned = True
                logger.warning("%s", silence(self._where, patience))
        if not self._ready([call], 0):
            self._get(ping)

    def _check_cluster(self) -> None:
        if self._control_store.lost():
            raise RolloutError(self._control_store.cause)

    def _ready(self, refs: list[Any], seconds: float) -> bool:
        import ray

        done, _ = ray.wait(refs, num_returns=1, timeout=max(seconds, 0))
        return bool(done)

    def _get(self, ref: Any) -> Any:
        """The result of a finished call."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, KedgeError):
                raise error.cause from None
            raise RolloutError(f"{self.name} failed: {error.cause!r}") from error
        except RayError as error:
            reason = cause(error, self.process.node or None)
            raise LostActorError(f"{self._where} is gone: {reason}") from error


class ActorHost:
    """The process side of ``Actor``: holds one object and calls its methods."""

    def __init__(self) -> None:
        self._object: Any = None
        threading.Thread(target=exit_with, args=(os.getppid(),), daemon=True).start()

    def ping(self) -> ActorProcess:
        """The node and process id of this process."""
        return ActorProcess.current()

    def build(self, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Build the object; not in the constructor, so that errors keep their type."""
        self._object = factory(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` of the object."""
        return getattr(self._object, method)(*args, **kwargs)


class SharedArgument:
    """An argument of several actors, kept in the object store until all ``readers`` have read it.

    An actor that is restarted gets it again, from ``make``.
    """

    def __init__(self, make: Callable[[], Any], readers: int) -> None:
        import ray

        self._make, self._left = make, readers
        self._reference: Any = ray.put(make())
        self._lock = threading.Lock()

    def reference(self) -> Any:
        """A ``ray.ObjectRef`` for one actor."""
        import ray

        with self._lock:
            self._left -= 1
            reference = self._reference if self._left >= 0 else ray.put(self._make())
            if self._left <= 0:
                self._reference = None
            return reference
