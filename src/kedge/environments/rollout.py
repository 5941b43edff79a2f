"""Multi-turn rollout engines: environments, each at its own pace, and the user's function."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.background import check_stop
from kedge.chat_template import TOOLS, template_options
from kedge.data.encode import is_chat
from kedge.environments.episode import (
    ENDINGS,
    Episode,
    EpisodeLimits,
    build_rollout,
    check_turn_tokens,
    describe,
    environment_seed,
    episode_totals,
    pad_rows,
    read_number,
    read_step,
    read_token_ids,
    stack_rows,
    turn_seed,
)
from kedge.environments.pool import (
    Calls,
    EnvironmentPool,
    Lease,
    MakeEnvironment,
    RunningCalls,
)
from kedge.environments.turn_tokens import TurnTokens, as_messages
from kedge.records.errors import ConfigError, RewardError, RolloutError, describe_error
from kedge.records.protocols import (
    Closable,
    EngineInfo,
    EnvironmentInfo,
    NewContext,
    Observation,
    RolloutEngine,
    Step,
    read_info,
)
from kedge.records.types import LEASES, PromptBatch, Receipt, Response, Rollout, Sampling

logger = logging.getLogger(__name__)
RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]  # TRL's rollout_func
_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_SECONDS = 0.05  # wait for environments when the engine is idle


class EnvironmentRollouts:
    """Samples episodes: turns of another engine, answered by environments.

    A row is one episode: the tokens of the policy's turns, which are trained on, and between them
    those of the environment, which are not (loss mask False).  With ``submit`` and ``advance``,
    around an engine with slots, an episode continues as soon as its environment has answered.
    ``generate`` plays in the same way, but samples the turns of all live episodes together, so that
    a batch depends on its seed to the last bit.

    ``sampling.max_new_tokens`` limits the tokens of a whole episode after its prompt, those of the
    environment included.  An episode that reaches a limit, or the end of the context, is truncated.
    The middle of an observation that leaves no room for another turn is cut.

    Args:
        engine: samples the turns.
        make_environment: makes an environment, which is reused for later episodes; or a mapping of
            names to such functions, chosen by the column ``environment`` of the prompts.
        tokenizer: the policy's; None if environments exchange token ids only.
        limits: of episodes and of calls.
        chat_template_kwargs: passed on to ``apply_chat_template``.
        pad_id: token id that pads rows; None: the tokenizer's pad or EOS token, or 0.
        extra_column: leave one slot after the longest row.
        drop_reasoning: if the chat template renders earlier turns without reasoning that the policy
            has read, the next turn begins a new context: the conversation as the template renders
            it.
        vocabulary: number of token ids that the models know; None: those of the tokenizer.
        keep_environments: reuse an environment only once the rewards of its rollout are computed;
            reward functions get it among ``environments``.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        make_environment: MakeEnvironment | Mapping[str, MakeEnvironment],
        tokenizer: Any = None,
        limits: EpisodeLimits | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        pad_id: int | None = None,
        extra_column: bool = False,
        drop_reasoning: bool = False,
        vocabulary: int | None = None,
        keep_environments: bool = False,
    ) -> None:
        self.engine: Any = engine  # untyped: it may be a ContinuousEngine
        inner = read_info(engine, EngineInfo)
        self._ranks_wait = inner.wait_for_other_ranks is not None
        limits = limits or EpisodeLimits()
        if limits.context is None:
            limits = replace(limits, context=inner.max_length)
        self._limits = limits
        calls = Calls(timeout=limits.timeout, most=limits.max_concurrency)
        self._environments = EnvironmentPool(make_environment, calls, on_error=limits.on_env_error)
        self._tokens = TurnTokens(
            tokenizer, chat_template_kwargs=chat_template_kwargs, vocabulary=vocabulary
        )
        self._drop_reasoning = drop_reasoning
        if drop_reasoning:
            self._tokens.check_drops_reasoning()
        ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        self._pad = next((int(i) for i in (pad_id, *ids) if i is not None), 0)
        self._spare = int(extra_column)
        self._keep = keep_environments
        # Sample a turn for all live episodes at once, when all environments have answered.
        self._together = False
        self._forget()
        self.engines = tuple(self._wrap(part) for part in inner.engines)

    @property
    def shares_weights(self) -> bool:
        """That of the engine."""
        return bool(self.engine.shares_weights)

    @property
    def logprob_kind(self) -> Literal["sampled", "raw", "none"]:
        """That of the engine."""
        kind: Literal["sampled", "raw", "none"] = self.engine.logprob_kind
        return kind

    @property
    def info(self) -> EngineInfo:
        """What the engine can do, for episodes."""
        return replace(
            read_info(self.engine, EngineInfo),
            many_turns=True,
            engines=self.engines,
            close_environments=self.close_environments,
        )

    def _wrap(self, engine: RolloutEngine) -> EnvironmentRollouts:
        """A copy with another engine and no episodes, which shares the environments."""
        part = copy.copy(self)
        part.engine, part.engines = engine, ()
        part._ranks_wait = read_info(engine, EngineInfo).wait_for_other_ranks is not None
        part._forget()
        return part

    def _forget(self) -> None:
        """Forget all episodes."""
        self._keys = itertools.count()
        self._calls = RunningCalls(self._environments.calls)
        self._running: dict[int, Episode] = {}  # live episodes by key
        self._groups: dict[int, list[Episode]] = {}  # incomplete groups, by group id
        self._resetting: Counter[int] = Counter()  # episodes without a first observation, by group
        self._ready: list[Episode] = []  # episodes whose next turns are sampled together
        self._seconds = (0.0, 0.0)  # seconds in environments, and in the model

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Load the weights into the engine."""
        return self.engine.load_weights(weights, version)

    def close_environments(self) -> None:
        """Drop all episodes and close each environment once; later episodes make others."""
        for part in (self, *self.engines):
            part._drop()
        self._environments.close()

    def close(self) -> None:
        """Close the environments and the engine."""
        try:
            self.close_environments()
        finally:
            if isinstance(self.engine, Closable):
                self.engine.close()

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One episode per row; each depends on (weights, prompt, row, seed) and its environment.

        Raises:
            ConfigError: ``min_new_tokens`` is above ``max_turn_tokens``.
            RolloutError: the engine failed, an environment with ``on_env_error="raise"``, or with
                "drop" nearly all of them.
        """
        play = self._wrap(self.engine)
        play._together = True
        episodes: list[Episode] = []
        try:
            with read_info(self.engine, EngineInfo).keep_prefixes():
                play._begin(prompts, prompts.group.tolist(), sampling, seed)
                while play.unfinished:
                    episodes += play._play_on()
        except BaseException:
            play._drop()
            raise
        return play._build(prompts, sorted(episodes, key=lambda episode: episode.key))

    def _build(self, prompts: PromptBatch, episodes: Sequence[Episode]) -> Rollout:
        seconds, self._seconds = self._seconds, (0.0, 0.0)
        leases = [Lease(self._environments, episode) for episode in episodes if self._keep]
        return build_rollout(
            prompts,
            episodes,
            pad_id=self._pad,
            spare=self._spare,
            totals=episode_totals(episodes, *seconds, self._environments.calls.hung),
            columns={LEASES: leases} if leases else {},
        )

    @property
    def unfinished(self) -> int:
        """Episodes that are being played."""
        return len(self._running)

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Add rows to play; an episode continues as soon as its environment has answered."""
        first: dict[int, int] = {}  # first row of each group; the dispatcher chose the ids
        for group, row in zip(prompts.group.tolist(), prompts.row.tolist(), strict=True):
            first[group] = min(row, first.get(group, row))
        numbers = [first[group] for group in prompts.group.tolist()]
        self._begin(prompts, numbers, sampling, seed)

    def advance(self) -> Rollout | None:
        """Continue playing; returns the groups whose episodes are complete.

        Raises:
            RolloutError: as for ``generate``.
        """
        episodes = self._play_on()
        if not episodes:
            return None
        return self._build(PromptBatch.cat([episode.prompts for episode in episodes]), episodes)

    def cancel(self) -> None:
        """Drop all episodes."""
        self._drop()
        self.engine.cancel()

    def _begin(
        self, prompts: PromptBatch, groups: Sequence[int], sampling: Sampling, seed: int
    ) -> None:
        """Begin an episode for each row; environments are seeded by the numbers of ``groups``."""
        check_turn_tokens(sampling, self._limits.max_turn_tokens)
        self._environments.check_errors(len(prompts))
        self._resetting += Counter(prompts.group.tolist())
        for i, group in enumerate(prompts.group.tolist()):
            episode = Episode(
                key=next(self._keys),
                group=group,
                prompts=prompts.rows(slice(i, i + 1)),
                sampling=sampling,
                seed=seed,
            )
            template = template_options(episode.options) if is_chat(episode.prompt) else {}
            episode.tools = template.pop(TOOLS, None)
            episode.tokens = self._tokens.variant(template)
            self._running[episode.key] = episode
            self._groups.setdefault(group, []).append(episode)
            reset = self._environments.reset(episode, environment_seed(seed, groups[i]))
            self._call(episode, reset, self._on_reset)

    def _play_on(self) -> list[Episode]:
        """Continue playing; returns the episodes of complete groups."""
        check_stop()
        begin = time.perf_counter()
        samples = not self._together and self.engine.unfinished
        results = self._calls.wait(0.0 if samples else _SECONDS)
        answered: list[tuple[Callable[[Any], None], Any]] = []
        for key, result in sorted(results.items()):
            episode = self._running[key]
            assert episode.on_result is not None  # set when its environment was called
            answered.append((episode.on_result, result))
            episode.on_result = None
            episode.seconds += self._calls.seconds[key]
        for on_result, result in answered:
            on_result(result)
        ready = time.perf_counter()
        if self._together:
            if self._ready and not self._calls:
                self._sample_together()
        elif self.engine.unfinished:
            sampled = self.engine.advance()
            for i, key in enumerate([] if sampled is None else sampled.prompts.group.tolist()):
                self._take_turn(self._running[key], sampled, i)
        in_environments, in_model = self._seconds
        self._seconds = in_environments + ready - begin, in_model + time.perf_counter() - ready
        done = [
            g for g, group in self._groups.items() if all(e.key not in self._running for e in group)
        ]
        return [episode for group in done for episode in self._groups.pop(group)]

    def _sample_together(self) -> None:
        ready, self._ready = sorted(self._ready, key=lambda e: e.key), []
        # The engine encodes a prompt shared by rows of a group once.
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        groups = [numbers.setdefault((e.group, tuple(e.history)), len(numbers)) for e in ready]
        prompts, sampling, seed = self._build_turns(ready, groups)
        sampled = self.engine.generate(prompts, sampling=sampling, seed=seed)
        for i, episode in enumerate(ready):
            self._take_turn(episode, sampled, i)

    def _next_turns(self, episodes: Sequence[Episode]) -> None:
        """Sample another turn of episodes of a group, or end them."""
        for episode in episodes:
            if episode.done:
                if not self._keep:
                    self._environments.release(episode)
                del self._running[episode.key]
        live = [episode for episode in episodes if not episode.done]
        if self._together:
            self._ready += live
        elif live:
            prompts, sampling, seed = self._build_turns(live, [episode.key for episode in live])
            self.engine.submit(prompts, sampling=sampling, seed=seed)

    def _build_turns(
        self, episodes: Sequence[Episode], groups: Sequence[int]
    ) -> tuple[PromptBatch, Sampling, int]:
        """Prompts, sampling and seed for the next turns of episodes at the same turn number."""
        for episode in episodes:
            episode.limit = self._limits.turn_limit(episode)
        limits, first = [episode.limit for episode in episodes], episodes[0]
        sampling, most = first.sampling, max(limits)
        if self._ranks_wait:  # then sampling is equal on all of them
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

    def _take_turn(self, episode: Episode, sampled: Any, i: int) -> None:
        """Give a sampled turn to the environment."""
        before = episode.history
        ids, terminated = episode.add_response(sampled, i)
        response = episode.tokens.response(ids, terminated, episode.sampling, before)
        step = partial(episode.environment.step, response)
        self._call(episode, step, partial(self._on_step, response=response))

    def _call(self, episode: Episode, call: Callable[[], Any], on_result: Any) -> None:
        episode.on_result = partial(on_result, episode)
        self._calls.add(episode.key, call, episode.thread)

    def _on_reset(self, episode: Episode, result: Any) -> None:
        """Add the first observation to the prompt."""
        with self._failing(episode, "reset"):
            result = _unwrap(result)
            if not isinstance(result, tuple) or len(result) != 2:
                raise RolloutError(f"reset must return (observation, info), got {describe(result)}")
            most = self._limits.prompt_limit(episode.sampling)
            observation = episode.tokens.read(result[0], most)
            context, info = self._limits.context, read_info(episode.environment, EnvironmentInfo)
            tools = info.tools or episode.tools

            def render(observation: Observation) -> list[int]:
                return episode.tokens.prompt(
                    episode.prompt,
                    episode.prompt_ids,
                    observation,
                    tools=tools,
                    separator=info.separator,
                    reads_calls=info.reads_calls,
                )

            ids = render(observation)
            if most is not None and len(ids) > most:
                cut = episode.tokens.shorten(observation, render, most)
                episode.shortened = int(cut is not None)
                ids, observation = cut or (ids, observation)
            if context is not None and len(ids) + self._limits.reserve >= context:
                raise RolloutError(
                    f"the prompt with its first observation has {len(ids)} tokens, which leaves no"
                    f" room for a turn in the context of {context} tokens"
                )
            if self._drop_reasoning:
                episode.messages = episode.tokens.conversation(
                    episode.prompt, ids, observation, tools=tools, separator=info.separator
                )
            episode.prompt_ids = ids
            episode.add_metrics({"metrics": {"tool_calls": 0}} if info.reads_calls else None)
            episode.add_metrics(result[1])
        self._resetting[episode.group] -= 1
        if not self._resetting[episode.group]:  # together: equal prompts are encoded once
            del self._resetting[episode.group]
            self._next_turns(self._groups[episode.group])

    def _on_step(self, episode: Episode, result: Any, response: Response) -> None:
        """Append the answer to a turn, or end the episode."""
        with self._failing(episode, "step"):
            self._add_step(episode, response, read_step(_unwrap(result)))
        if episode.cut_off and read_info(episode.environment, EnvironmentInfo).final_reward:
            self._call(episode, episode.environment.final_reward, self._on_final_reward)
        else:
            self._next_turns([episode])

    def _add_step(self, episode: Episode, response: Response, step: Step) -> None:
        observation, reward, terminated, truncated, info = step
        episode.add_reward(reward)
        episode.add_metrics(info)
        ids, limit = None, self._limits.reached_limit(episode)
        goes_on = not (terminated or truncated or limit)
        reads = goes_on or (self._limits.keeps_last and not terminated)
        if reads:
            largest = self._limits.largest_observation(episode)
            observation = episode.tokens.read(observation, largest)
        render, before = self._renderer(episode, response, observation, reads=reads)
        if goes_on:
            ids = render(observation)
            most = self._limits.observation_limit(episode, len(ids), before=before)
            if len(ids) > most:
                fits = len(ids) < self._limits.tokens_left(episode)
                cut = episode.tokens.shorten(observation, render, most)
                episode.shortened += cut is not None
                ids, observation = cut or (ids if fits else None, observation)
        if ids is not None:
            episode.add_observation(ids)
            episode.observations.append(as_messages(observation))
            episode.messages += episode.observations[-1]
            return
        ending = "done" if terminated else "truncated" if truncated else limit or "token_limit"
        if isinstance(info, Mapping) and info.get("ending") in ENDINGS:
            ending = info["ending"]
        episode.end(ending, terminated=terminated, cut_off=not (terminated or truncated))
        follows = episode.cut_off or observation is not None
        if self._limits.keeps_last and not terminated and follows:
            ids, most = render(observation), self._limits.last_observation_limit(episode)
            if len(ids) > most:
                ids, _ = episode.tokens.shorten(observation, render, most) or ([], None)
            episode.add_observation(ids)

    def _renderer(
        self, episode: Episode, response: Response, observation: Observation, *, reads: bool
    ) -> tuple[Callable[[Observation], list[int]], int]:
        """How to render the answer to a turn, and how many tokens of the conversation it repeats.

        Begins a new context if the observation is one, or if the policy ``reads`` the answer and
        the template drops reasoning that it has read before.
        """
        tokens = episode.tokens
        tools = read_info(episode.environment, EnvironmentInfo).tools or episode.tools

        def render(observation: Observation, *, earlier: Sequence[Any] = ()) -> list[int]:
            if earlier:
                observation = NewContext([*earlier, *as_messages(observation)])
            if isinstance(observation, NewContext):
                return tokens.context(episode.prompt, observation, tools=tools)
            return tokens.between(
                episode.prompt, observation, last=response.ids[-1], stopped=response.terminated
            )

        drops = self._drop_reasoning and reads
        messages = as_messages(observation) if drops else []
        if drops and not messages:
            raise ConfigError(
                "drop_reasoning renders the conversation again, so an environment must answer"
                " with text or chat messages, not with token ids; change it, or leave the"
                " option out"
            )
        if isinstance(observation, NewContext):
            episode.starts.append(len(episode.ids))
            episode.messages = []
        elif drops:
            between = render(observation)
            episode.messages.append(tokens.answer(response, messages))
            before = [*episode.history, *between]
            if tokens.drops_reasoning(before, [*episode.messages, *messages], tools=tools):
                episode.starts.append(len(episode.ids))
                again = partial(render, earlier=episode.messages.copy())
                return again, len(again(observation)) - len(between)
        return render, 0

    def _on_final_reward(self, episode: Episode, result: Any) -> None:
        with self._failing(episode, "final_reward"):
            episode.add_reward(read_number(_unwrap(result), "a reward"))
        self._next_turns([episode])

    @contextlib.contextmanager
    def _failing(self, episode: Episode, method: str) -> Iterator[None]:
        """Context in which an exception ends the episode, or the run: with "raise", or if it is the
        ConfigError of an environment that cannot work with its options.
        """
        try:
            yield
        except Exception as error:
            environment, on_error = episode.environment, self._limits.on_env_error
            episode.error = describe_error(error)
            if isinstance(error, ConfigError):
                raise
            what, fix = f"making the environment of row {episode.row} failed", ""
            if environment is not None:
                if read_info(environment, EnvironmentInfo).grading:
                    method = "final_reward"
                what = f"{type(environment).__name__}.{method} failed in turn {episode.turns} of"
                what += f" row {episode.row}"
                fix = (
                    ", or set on_env_error: 'drop' leaves out such episodes, 'score' penalizes them"
                )
            if on_error == "raise":
                cause = str(error) if isinstance(error, RolloutError) else episode.error
                # A context manager would take an error from StopIteration for that error itself.
                chained = None if isinstance(error, StopIteration) else error
                raise RolloutError(f"{what}: {cause}; fix the environment{fix}") from chained
            logger.warning("%s: %s", what, episode.error)
            # A scored failure is an end, not a truncation: the policy learns from the penalty.
            grader = method == "final_reward" or isinstance(error, RewardError)
            ending = "grader_error" if grader else "environment_error"
            episode.end(ending, terminated=on_error == "score")
            episode.dropped = on_error == "drop"
            if not episode.dropped:
                episode.add_reward(self._limits.env_error_score)

    def _drop(self) -> None:
        """Drop the episodes; busy environments are reused once they have answered."""
        running = self._running
        kept = [e for group in self._groups.values() for e in group if self._keep and e.done]
        for episode in (*running.values(), *kept):
            if episode.on_result is None:
                self._environments.release(episode)

        def ended(key: int, error: BaseException | None) -> None:
            episode = running[key]
            episode.error = episode.error or ("" if error is None else describe_error(error))
            self._environments.release(episode)

        self._calls.abandon(ended)
        self._forget()


def _unwrap(result: Any) -> Any:
    """The result of a call; raises the exception of a failed one."""
    if isinstance(result, Exception):
        raise result
    if isinstance(result, BaseException):  # SystemExit in an environment's thread
        raise RolloutError(describe_error(result)) from result
    return result


class FunctionRollouts:
    """Calls ``rollout_func(prompts, trainer)``, which samples by itself.

    The function gets the raw prompts of this process, one per row (a prompt with several responses
    is repeated), and returns a dict with one entry per row in each of:

        prompt_ids, completion_ids   token ids
        logprobs                     of the completion tokens as sampled; None: not recorded
        env_mask (optional)          1 for tokens of the policy, 0 for those of an environment
        others                       columns for reward functions

    Args:
        function: the function.
        trainer: returns the function's second argument.
        pad_id: token id that pads rows.
        vocabulary: returns the number of token ids that the policy knows; None: unknown.
    """

    shares_weights = True  # the function reads the weights from the trainer
    logprob_kind: Literal["sampled", "raw", "none"] = "sampled"
    info = EngineInfo(more_columns=True)

    def __init__(
        self,
        function: RolloutFunc,
        trainer: Callable[[], Any],
        *,
        pad_id: int,
        vocabulary: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._function, self._trainer, self._pad = function, trainer, pad_id
        self._vocabulary = vocabulary
        self._version = 0

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Record the version; the function reads the weights itself."""
        self._version = version
        return None

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """Call the function and build a rollout from its completions.

        Raises:
            RolloutError: a field is missing, or has the wrong number of rows or tokens.
        """
        raw = list(prompts.columns.get("prompt", []))
        output = dict(self._function(raw, self._trainer()))
        _check(output, len(prompts))
        known = self._vocabulary()
        before, completions = (
            [read_token_ids(ids, known, f"{name} of rollout_func") for ids in output.pop(name)]
            for name in ("prompt_ids", "completion_ids")
        )
        masks, logprobs = output.pop("env_mask", None), output.pop("logprobs")
        batch = stack_rows(
            prompts,
            before,
            prompts.group,
            self._pad,
        )
        device, width = prompts.ids.device, max(map(len, completions))
        mask = pad_rows([[True] * len(ids) for ids in completions], width, torch.bool, False)
        behavior = None
        if logprobs is not None:
            behavior = pad_rows(logprobs, width, torch.float32, 0.0).to(device)
        trained = mask if masks is None else pad_rows(masks, width, torch.bool, False)
        ended = [ids[-1] in sampling.stop_ids for ids in completions]
        return Rollout(
            prompts=replace(batch, columns={**prompts.columns, **output}),
            ids=pad_rows(completions, width, torch.int64, self._pad).to(device),
            loss_mask=trained.to(device),
            response_mask=mask.to(device),
            terminated=torch.tensor(ended, device=device),
            policy_version=torch.full((len(prompts),), self._version, device=device),
            behavior_logprobs=behavior,
        )


def _check(output: Mapping[str, Any], rows: int) -> None:
    missing = [name for name in _REQUIRED if name not in output]
    if missing:
        raise RolloutError(
            f"rollout_func must return {', '.join(_REQUIRED)}; missing: {', '.join(missing)}"
        )
    for name, values in output.items():
        if values is not None and len(values) != rows:
            raise RolloutError(
                f"rollout_func returned {len(values)} entries of {name!r} for {rows} prompts; it"
                " must return one per prompt that it gets"
            )
    for i, ids in enumerate(output["completion_ids"]):
        if not len(ids):
            raise RolloutError(f"rollout_func returned no token for prompt {i}")
        for name in ("env_mask", "logprobs"):
            values = output.get(name)
            if values is not None and len(values[i]) != len(ids):
                raise RolloutError(
                    f"rollout_func returned {len(values[i])} entries of {name!r} for the"
                    f" {len(ids)} tokens of completion {i}"
                )
