"""Reward functions and reward models in actors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.backends.ray.actor import Actor, ActorLimits, actor_limits
from kedge.backends.ray.placement import PlacementPlan, plan_seats
from kedge.backends.ray.resources import ActorResources, allocate, from_launch
from kedge.backends.rewards import FunctionOptions, ModelOptions, RewardLog, reward_source
from kedge.backends.rollout import start_all
from kedge.config.rollout import RolloutOptions
from kedge.errors import ConfigError, RewardError, RolloutError
from kedge.types import Metrics, RewardOutput, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What ``reward_source`` takes, without what belongs to the learner's process."""

    reward_model: Any
    reward_funcs: Any
    models: Mapping[str, Any]  # keyword arguments of ModelOptions
    functions: Mapping[str, Any]  # keyword arguments of FunctionOptions
    mixture: Mapping[str, Any]  # the others of reward_source


class RewardActor:
    """A reward source inside an actor."""

    def __init__(self, recipe: Recipe) -> None:
        self._log, self._state = RewardLog(), None
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        functions = FunctionOptions(
            log=self._log, trainer_state=lambda: self._state, **recipe.functions
        )
        self._source = reward_source(
            recipe.reward_model,
            recipe.reward_funcs,
            models=ModelOptions(device=device, **recipe.models),
            functions=functions,
            **recipe.mixture,
        )

    def columns(self) -> frozenset[str] | None:
        """Dataset columns that are read; None if that cannot be said."""
        found: frozenset[str] | None = getattr(self._source, "columns", None)
        return found

    def score(self, rollout: Rollout, state: Any) -> RewardOutput:
        """The reward output, with what functions reported beside it."""
        self._state = state
        found = self._source.score(rollout)
        metrics, extras = self._log.drain()
        return replace(found, metrics=metrics.totals, columns=extras)


class RayRewards:
    """A reward source whose work is done in actors.

    The rows of a batch are cut between prompts, so that responses to one prompt stay together, and
    every worker scores a share.  A worker that dies or hangs is made again and scores its share
    once more.

    Args:
        recipe: what each worker builds.
        room: where they run; one seat per worker.
        limits: how long to wait for one.
        log: gets what functions report.
        trainer_state: called for what functions see as ``trainer_state``.

    Raises:
        ConfigError: a worker does not start, or the recipe cannot work.
    """

    def __init__(
        self,
        recipe: Recipe,
        room: ActorResources,
        *,
        limits: ActorLimits,
        log: RewardLog,
        trainer_state: Callable[[], object],
    ) -> None:
        import ray

        self._log, self._state, self._on_close = log, trainer_state, room.release
        try:
            sent = ray.put(recipe)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            room.release()
            raise ConfigError(
                f"a reward function or model cannot be sent to ray_reward_workers: {error}; define"
                " it in a module, or set ray_reward_workers=0"
            ) from error
        makers = [
            partial(
                Actor,
                f"reward worker {seat.index}",
                lambda handle: handle.build.remote(RewardActor, sent),
                options=room.placement.options(seat),
                limits=limits,
            )
            for seat in room.seats
        ]
        self.workers = start_all(makers, undo=room.release)
        self._threads = ThreadPoolExecutor(len(self.workers), thread_name_prefix="reward")
        self.columns: frozenset[str] | None = self.workers[0].call("columns")

    def score(self, rollout: Rollout) -> RewardOutput:
        """One reward output for all rows.

        Raises:
            RewardError: a function or model failed, or its worker died again and again.
        """
        shares = between_groups(rollout.prompts.group, len(self.workers))
        state = self._state()
        running = [
            self._threads.submit(worker.call, "score", rows_of(rollout, rows), state)
            for worker, rows in zip(self.workers, shares, strict=False)
        ]
        wait(running)
        try:
            found = [each.result() for each in running]
        except RolloutError as error:
            raise RewardError(str(error)) from error
        reward_output = RewardOutput.cat(found).to(rollout.ids.device)
        self._log.merge(Metrics(reward_output.metrics))
        for column, values in reward_output.columns.items():
            self._log.extra(column, values)
        return reward_output

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=True)
        self._on_close()


def ray_rewards(
    recipe: Recipe,
    options: RolloutOptions,
    *,
    log: RewardLog,
    trainer_state: Callable[[], object],
) -> RayRewards:
    """Reward workers in the room that a launch holds for this rank, or in room of their own.

    Args:
        recipe: what each worker builds.
        options: how many, and how long to wait.
        log: gets what functions report.
        trainer_state: called for what functions see as ``trainer_state``.

    Raises:
        ConfigError: the cluster has no room, or a worker does not start.
    """
    asked = options.ray
    room = from_launch("reward", count=asked.reward_workers, option="ray_reward_workers")
    if room is None:

        def plan(_: bool) -> PlacementPlan:
            return plan_seats(rewards=asked.reward_workers, gpus_per_reward=asked.reward_gpus)

        room = allocate("reward", options, plan)
    return RayRewards(
        recipe, room, limits=actor_limits(options), log=log, trainer_state=trainer_state
    )


def between_groups(group: Tensor, parts: int) -> list[slice]:
    """Consecutive rows, as even as they go without parting rows of one group.

    Args:
        group: int64 [B]; where rows of a group are not neighbors, nothing is parted.
        parts: most shares.
    """
    rows = len(group)
    starts = [0, *(int(i) + 1 for i in (group[1:] != group[:-1]).nonzero()[:, 0])]
    if len(starts) > len(group.unique()):
        return [slice(0, rows)]
    wanted = [rows * i // parts for i in range(parts)]
    begins = sorted({min(starts, key=lambda start: abs(start - ideal)) for ideal in wanted})
    return [slice(a, b) for a, b in zip(begins, [*begins[1:], rows], strict=True)]


def rows_of(rollout: Rollout, rows: slice) -> Rollout:
    """Some of the rows, on the CPU, as wide as all, with what a reward may read of them."""
    return replace(rollout, allowed_tokens=None).rows(rows).to("cpu")
