"""An actor that is watched, and made again when it dies or hangs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kedge.backends.ray.cluster import cause
from kedge.config.rollout import RolloutOptions
from kedge.errors import ConfigError, KedgeError, RolloutError

logger = logging.getLogger(__name__)
_IN_A_ROW = 3  # deaths without an answer in between
_PULSE = "pulse"  # a thread of its own inside the actor


class LostActorError(RolloutError):
    """The actor died or hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLimits:
    """How long to wait for an actor, in seconds."""

    start: float = 300.0  # until its process answers, and until its object is built
    heartbeat: float = 5.0  # between two signs of life
    patience: float = 60.0  # without one; then it counts as hung
    call: float = 3600.0  # for one call, however lively it is


def actor_limits(options: RolloutOptions) -> ActorLimits:
    """How long to wait for an actor."""
    return ActorLimits(
        start=options.start_timeout,
        heartbeat=options.heartbeat,
        patience=options.patience,
        call=options.timeout,
    )


class Actor:
    """An object in a process of Ray's, through any death of that process.

    If the process dies, gives no sign of life for ``limits.patience`` or takes longer than
    ``limits.call``, it is killed and made again, ``revive`` brings the new object to where the old
    one was, and the call is made once more.

    Args:
        name: for messages, e.g. "engine 0".
        build: called with the actor's handle; starts the building of the object.
        options: of the actor: resources, and where it may run.
        limits: how long to wait.
        revive: brings a new object up to date; called with this actor.

    Raises:
        ConfigError: it cannot be started, in time or at all.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[Any], Any],
        *,
        options: Mapping[str, Any],
        limits: ActorLimits,
        revive: Callable[[Actor], None] | None = None,
    ) -> None:
        self.name, self.restarts, self.pid = name, 0, 0
        self._build, self._options, self._limits = build, dict(options), limits
        self._revive = revive
        self._handle: Any = None
        self.up = False  # it runs, and holds what it shall
        self._start()
        self.up = True

    def call(self, method: str, *args: Any, within: float | None = None, **named: Any) -> Any:
        """``method`` of the object; called again where the process was lost.

        Args:
            method: of the object.
            args: a ``ray.ObjectRef`` among them becomes what it refers to.
            within: most seconds; unset: ``limits.call``.
            named: keyword arguments of the method.

        Raises:
            RolloutError: it died again and again.
            KedgeError: what the method raised.
        """
        tries = 0
        while True:
            try:
                return self.once(method, *args, within=within, **named)
            except LostActorError as error:  # noqa: PERF203
                tries = self._again(error, tries)

    def once(self, method: str, *args: Any, within: float | None = None, **named: Any) -> Any:
        """``method`` of the object, as it is now.

        Raises:
            LostActorError: the process was lost.
            KedgeError: what the method raised.
        """
        if self._handle is None:
            raise LostActorError(f"{self.name} is not running")
        limit = self._limits.call if within is None else within
        return self._answer(self._handle.call.remote(method, *args, **named), limit)

    def close(self) -> None:
        """End the process; calling it again does nothing."""
        self._kill()

    # -- below ----------------------------------------------------------------------------------

    def _again(self, error: LostActorError, tries: int) -> int:
        if tries >= _IN_A_ROW:
            raise RolloutError(
                f"{self.name} was lost {tries + 1} times in a row: {error}"
            ) from error
        logger.warning("%s; making it again", error)
        self.restarts += 1
        self._kill()
        try:
            self._start()
            if self._revive is not None:
                self._revive(self)
        except LostActorError as lost:
            logger.warning("%s", lost)
            self._kill()  # it may be alive, and must not be asked without what it shall hold
        else:
            self.up = True
        return tries + 1

    def _start(self) -> None:
        import ray

        groups = {_PULSE: 1}
        actor = ray.remote(concurrency_groups=groups)(ActorHost)
        self._handle = actor.options(**self._options).remote()
        pulse = self._pulse()
        if not self._ready([pulse], self._limits.start):
            self._kill()
            raise ConfigError(
                f"{self.name} did not start within {self._limits.start:g} s"
                f" (worker_start_timeout); it asked for {self._options_text()}"
            )
        self.pid = self._get(pulse)
        built = self._build(self._handle)
        # Without asking for signs of life: while it imports, a healthy process may give none.
        if not self._ready([built], self._limits.start):
            raise LostActorError(
                f"{self.name} was not ready within {self._limits.start:g} s (worker_start_timeout)"
            )
        self._get(built)

    def _options_text(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self._options.items() if k.startswith("num_"))

    def _pulse(self) -> Any:
        return self._handle.ping.options(concurrency_group=_PULSE).remote()

    def _answer(self, asked: Any, limit: float) -> Any:
        """The answer to a call, with a sign of life now and then while it is computed."""
        until = time.monotonic() + limit
        while not self._ready([asked], min(self._limits.heartbeat, until - time.monotonic())):
            if time.monotonic() >= until:
                raise LostActorError(f"{self.name} took longer than {limit:g} s")
            pulse = self._pulse()
            if not self._ready([asked, pulse], self._limits.patience):
                raise LostActorError(
                    f"{self.name} gave no sign of life for {self._limits.patience:g} s"
                )
            if not self._ready([asked], 0):
                self._get(pulse)
        return self._get(asked)

    def _ready(self, refs: list[Any], seconds: float) -> bool:
        import ray

        done, _ = ray.wait(refs, num_returns=1, timeout=max(seconds, 0))
        return bool(done)

    def _get(self, ref: Any) -> Any:
        """What a finished call returned."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, KedgeError):
                raise error.cause from None
            raise RolloutError(f"{self.name} failed: {error.cause!r}") from error
        except RayError as error:
            raise LostActorError(f"{self.name} is gone: {cause(error)}") from error

    def _kill(self) -> None:
        import ray

        self.up = False
        if self._handle is not None and ray.is_initialized():
            ray.kill(self._handle)
        self._handle = None


class ActorHost:
    """Holds one object and calls its methods; becomes an actor by ``ray.remote``."""

    def __init__(self) -> None:
        self._held: Any = None

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def build(self, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make the object, here rather than in the constructor so that errors keep their type."""
        self._held = factory(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """``method`` of the object."""
        return getattr(self._held, method)(*args, **kwargs)
