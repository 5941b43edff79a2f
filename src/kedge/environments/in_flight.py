"""Episodes that are being played, each at its own pace."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kedge.environments.calls import RunningCalls
from kedge.environments.episode import (
    ENDINGS,
    Episode,
    read_number,
    read_reset,
    read_step,
    stack_rows,
)
from kedge.environments.pool import EnvironmentPool
from kedge.environments.turn_tokens import TurnTokens, as_messages
from kedge.environments.turns import TurnLimits, turn_seed
from kedge.errors import ConfigError, LostRequestsError, RewardError, RolloutError
from kedge.protocols import Observation
from kedge.types import PromptBatch, Response, Rollout, Sampling

logger = logging.getLogger(__name__)
_SECONDS = 0.05  # to wait for environments while the engine has nothing to sample


class InFlightEpisodes:
    """Plays episodes: an engine samples their turns, environments answer them.

    Args:
        engine: samples the turns.
        environments: answer them.
        tokens: renders observations.
        limits: of the turns.
        pad_id: fills prompts.
        error_score: reward of the last turn of an episode whose environment failed.
        clock: seconds.
        together: sample turns with ``engine.generate``, of all episodes at once when all
            environments have answered, so that a batch depends on its seed to the last bit; else
            each turn is a request to the engine as soon as its environment has answered.
    """

    def __init__(
        self,
        engine: Any,
        *,
        environments: EnvironmentPool,
        tokens: TurnTokens,
        limits: TurnLimits,
        pad_id: int,
        error_score: float,
        clock: Callable[[], float],
        together: bool,
    ) -> None:
        self._engine, self._environments, self._tokens = engine, environments, tokens
        self._limits, self._pad, self._error_score = limits, pad_id, error_score
        self._clock, self._together = clock, together
        self._calls = RunningCalls(environments.calls)
        self._next = 0  # key
        self._running: dict[int, Episode] = {}  # by key
        self._groups: dict[int, list[Episode]] = {}  # that are not complete, by group id
        self._resetting: Counter[int] = Counter()  # episodes without their first observation
        self._ready: list[Episode] = []  # whose next turn is sampled together with all others
        self.seconds = (0.0, 0.0)  # in environments and in the model

    @property
    def unfinished(self) -> int:
        """Episodes that are being played."""
        return len(self._running)

    def submit(
        self, prompts: PromptBatch, seeds: Sequence[int], *, sampling: Sampling, seed: int
    ) -> None:
        """Begin an episode for each row, with the seed of its environment."""
        self._environments.check_errors(len(prompts))
        self._resetting += Counter(prompts.group.tolist())
        for i, group in enumerate(prompts.group.tolist()):
            episode = Episode(
                key=self._next,
                group=group,
                prompts=prompts.rows(slice(i, i + 1)),
                sampling=sampling,
                seed=seed,
            )
            self._next += 1
            self._running[episode.key] = episode
            self._groups.setdefault(group, []).append(episode)
            self._call(episode, self._environments.reset(episode, seeds[i]), self._on_reset)

    def advance(self) -> list[Episode]:
        """Play on; the episodes of complete groups.

        Raises:
            LostRequestsError: the engine was restarted, and all episodes are dropped.
            RolloutError: an environment failed, with ``on_env_error="raise"``.
        """
        begin = self._clock()
        samples = not self._together and self._engine.unfinished
        results = self._calls.wait(0.0 if samples else _SECONDS)
        answered: list[tuple[Callable[[Any], None], Any]] = []
        for key, result in sorted(results.items()):
            episode = self._running[key]
            assert episode.on_result is not None  # its environment was called
            answered.append((episode.on_result, result))
            episode.on_result = None
            episode.seconds += self._calls.seconds[key]
        for on_result, result in answered:
            on_result(result)
        ready = self._clock()
        if self._together:
            if self._ready and not self._calls:
                self._sample_together()
        elif self._engine.unfinished:
            self._sample()
        in_environments, in_model = self.seconds
        self.seconds = in_environments + ready - begin, in_model + self._clock() - ready
        done = [
            g for g, group in self._groups.items() if all(e.key not in self._running for e in group)
        ]
        return [episode for group in done for episode in self._groups.pop(group)]

    def _sample(self) -> None:
        try:
            sampled: Rollout | None = self._engine.advance()
        except LostRequestsError:
            self.drop()
            raise
        if sampled is not None:
            for i, key in enumerate(sampled.prompts.group.tolist()):
                self._take_turn(self._running[key], sampled, i)

    def _sample_together(self) -> None:
        ready, self._ready = sorted(self._ready, key=lambda e: e.key), []
        # An engine reads rows of a group with the same tokens once.
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        groups = [numbers.setdefault((e.group, tuple(e.history)), len(numbers)) for e in ready]
        prompts, sampling, seed = self._build_turns(ready, groups)
        sampled = self._engine.generate(prompts, sampling=sampling, seed=seed)
        for i, episode in enumerate(ready):
            self._take_turn(episode, sampled, i)

    def _next_turns(self, episodes: Sequence[Episode]) -> None:
        """Sample another turn of episodes of a group, or end them."""
        for episode in episodes:
            if episode.done:
                self._environments.release(episode)
                del self._running[episode.key]
        live = [episode for episode in episodes if not episode.done]
        if self._together:
            self._ready += live
        elif live:
            prompts, sampling, seed = self._build_turns(live, [episode.key for episode in live])
            self._engine.submit(prompts, sampling=sampling, seed=seed)

    def _build_turns(
        self, episodes: Sequence[Episode], groups: Sequence[int]
    ) -> tuple[PromptBatch, Sampling, int]:
        """Prompts, sampling and seed of the next turns of episodes with equal numbers of turns."""
        for episode in episodes:
            episode.limit = self._limits.turn(episode)
        limits, first = [episode.limit for episode in episodes], episodes[0]
        sampling, most = first.sampling, max(limits)
        if getattr(self._engine, "wait_for_other_ranks", None) is not None:  # equal on all ranks
            most = sampling.max_new_tokens
            most = min(self._limits.max_turn_tokens or most, most)
        minimum = 0 if first.turns else min(sampling.min_new_tokens, most)
        prompts = PromptBatch.cat([episode.prompts for episode in episodes])
        group = torch.tensor(groups).to(prompts.group)
        histories = [episode.history for episode in episodes]
        return (
            stack_rows(prompts, histories, group, self._pad, limits=limits),
            replace(sampling, max_new_tokens=most, min_new_tokens=minimum),
            turn_seed(first.seed, first.turns),
        )

    def _take_turn(self, episode: Episode, sampled: Rollout, i: int) -> None:
        """Give a sampled turn to the environment."""
        before = episode.history
        ids, terminated = episode.add_response(sampled, i)
        response = self._tokens.response(ids, terminated, episode.sampling, before)
        step = partial(episode.environment.step, response)
        self._call(episode, step, partial(self._on_step, response=response))

    def _call(self, episode: Episode, call: Callable[[], Any], on_result: Any) -> None:
        episode.on_result = partial(on_result, episode)
        self._calls.add(episode.key, call)

    def _on_reset(self, episode: Episode, result: Any) -> None:
        """Add the first observation to the prompt."""
        with self._failing(episode, "reset"):
            observation, info = read_reset(_unwrap(result))
            environment, context = episode.environment, self._limits.context

            def render(observation: Observation) -> list[int]:
                return self._tokens.prompt(
                    episode.prompt,
                    episode.prompt_ids,
                    observation,
                    tools=getattr(environment, "tools", None),
                    separator=getattr(environment, "separator", "\n\n"),
                    reads_calls=getattr(environment, "reads_calls", False),
                )

            ids, most = render(observation), self._limits.first_prompt(episode.sampling)
            if most is not None and len(ids) > most:
                cut = self._tokens.shorten(observation, render, most)
                episode.shortened = int(cut is not None)
                ids = ids if cut is None else cut[0]
            if context is not None and len(ids) + self._limits.reserve >= context:
                raise RolloutError(
                    f"the prompt with its first observation has {len(ids)} tokens, which leaves no"
                    f" room for a turn in the context of {context} tokens"
                )
            episode.prompt_ids = ids
            episode.measure(info)
        self._resetting[episode.group] -= 1
        if not self._resetting[episode.group]:  # together: an equal prompt is read once
            del self._resetting[episode.group]
            self._next_turns(self._groups[episode.group])

    def _on_step(self, episode: Episode, result: Any, response: Response) -> None:
        """Append the answer to a turn, or end the episode."""
        with self._failing(episode, "step"):
            self._add_step(episode, response, *read_step(_unwrap(result)))
        final_reward = getattr(episode.environment, "final_reward", None)
        if episode.cut_off and final_reward is not None:
            self._call(episode, final_reward, self._on_final_reward)
        else:
            self._next_turns([episode])

    def _add_step(
        self,
        episode: Episode,
        response: Response,
        observation: Observation,
        reward: float,
        terminated: bool,
        truncated: bool,
        info: object,
    ) -> None:
        episode.reward(reward)
        episode.measure(info)

        def render(observation: Observation) -> list[int]:
            return self._tokens.between(
                episode.prompt, observation, last=response.ids[-1], stopped=response.terminated
            )

        ids, limit = None, self._limits.reached(episode)
        if not (terminated or truncated or limit):
            ids = render(observation)
            most = self._limits.observation(episode, len(ids))
            if len(ids) > most:
                fits = len(ids) < self._limits.room(episode)
                cut = self._tokens.shorten(observation, render, most)
                episode.shortened += cut is not None
                ids, observation = cut or (ids if fits else None, observation)
        if ids is not None:
            episode.add_observation(ids)
            episode.observations.append(as_messages(observation))
            return
        ending = "done" if terminated else "truncated" if truncated else limit or "token_limit"
        if isinstance(info, Mapping) and info.get("ending") in ENDINGS:
            ending = info["ending"]
        episode.end(ending, terminated=terminated, cut_off=not (terminated or truncated))
        follows = episode.cut_off or observation is not None
        if self._limits.keeps_last and not terminated and follows:
            ids, most = render(observation), self._limits.last_observation(episode)
            if len(ids) > most:
                ids, _ = self._tokens.shorten(observation, render, most) or ([], None)
            episode.add_observation(ids)

    def _on_final_reward(self, episode: Episode, result: Any) -> None:
        with self._failing(episode, "final_reward"):
            episode.reward(read_number(_unwrap(result), "a reward"))
        self._next_turns([episode])

    @contextlib.contextmanager
    def _failing(self, episode: Episode, method: str) -> Iterator[None]:
        """Context in which an exception ends the episode, or with "raise" the run.

        Raises:
            ConfigError: the environment does, since it cannot work with its options.
            RolloutError: ``on_env_error`` is "raise".
        """
        try:
            yield
        except Exception as error:
            environment, on_error = episode.environment, self._environments.on_error
            episode.error = f"{type(error).__name__}: {error}"
            if isinstance(error, ConfigError):
                raise
            what, fix = f"making the environment of row {episode.row} failed", ""
            if environment is not None:
                what = f"{type(environment).__name__}.{method} failed in turn {episode.turns} of"
                what += f" row {episode.row}"
                fix = ", or set on_env_error='drop' or 'score' to train without such episodes"
            if on_error == "raise":
                raise RolloutError(f"{what}: {episode.error}; fix the environment{fix}") from error
            logger.warning("%s: %s", what, episode.error)
            # What is scored counts as an end, not as cut off: the policy learns from the penalty.
            grader = method == "final_reward" or isinstance(error, RewardError)
            ending = "grader_error" if grader else "environment_error"
            episode.end(ending, terminated=on_error == "score")
            episode.dropped = on_error == "drop"
            if not episode.dropped:
                episode.reward(self._error_score)

    def drop(self) -> None:
        """Drop the episodes; environments that are at work are reused when they have answered."""
        running = self._running
        for episode in running.values():
            if episode.on_result is None:
                self._environments.release(episode)

        def ended(key: int, error: BaseException | None) -> None:
            episode = running[key]
            episode.error = episode.error or ("" if error is None else repr(error))
            self._environments.release(episode)

        self._calls.abandon(ended)
        self._running, self._ready, self.seconds = {}, [], (0.0, 0.0)
        self._groups.clear()
        self._resetting.clear()


def _unwrap(result: Any) -> Any:
    """The result of a call; raises the exception of a failed one."""
    if isinstance(result, Exception):
        raise result
    if isinstance(result, BaseException):  # SystemExit in a thread of an environment
        raise RolloutError(f"{type(result).__name__}: {result}") from result
    return result
