"""A rollout engine that plays episodes in environments."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

from torch import Tensor

from kedge.environments.calls import Calls
from kedge.environments.episode import Episode, build_rollout, episode_metrics
from kedge.environments.in_flight import InFlightEpisodes
from kedge.environments.pool import EnvironmentPool, MakeEnvironment, OnError
from kedge.environments.turn_tokens import TurnTokens
from kedge.environments.turns import TurnLimits, check_turn_tokens, environment_seed
from kedge.protocols import RolloutEngine
from kedge.types import PromptBatch, Receipt, Rollout, Sampling


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

    An environment may also have: ``tools``, JSON schemas that the chat template shows to the
    policy; ``final_reward()``, added to the last turn of an episode that a limit of this engine
    ends; ``separator``, between the prompt and the first observation; ``close()``.

    Args:
        engine: samples the turns.
        make_environment: makes an environment, which is reused for later episodes; or a mapping of
            names to such functions, chosen by the column ``environment`` of the prompts.
        tokenizer: the policy's; None if environments exchange token ids only.
        max_turns: turns per episode; None: as many as its tokens allow.
        max_turn_tokens: tokens per turn; None: as many as the episode has left.
        max_seconds: seconds that the environment of an episode may work, without sampling, before
            the episode is truncated.
        timeout: seconds that a call of an environment may take; None: no limit.
        on_env_error: what an exception, a timeout or an invalid answer of an environment does:
            "raise" RolloutError, "drop" the episode from training, or "score" its last turn with
            ``env_error_score``.
        env_error_score: reward of the last turn of an episode whose environment failed.
        max_concurrency: calls of environments that run at the same time.
        chat_template_kwargs: passed on to ``apply_chat_template``.
        pad_id: fills rows; None: the tokenizer's pad or EOS token, or 0.
        extra_slot: leave one slot after the longest row.
        context: tokens of prompt and episode together; None: what the engine has room for.
        keep_last_observation: append the observation that follows a truncated episode, untrained,
            so that a value can be read where values are trained.
        clock: seconds.
    """

    many_turns = True  # ranks may need different numbers of turns

    def __init__(  # noqa: PLR0913
        self,
        engine: RolloutEngine,
        make_environment: MakeEnvironment | Mapping[str, MakeEnvironment],
        tokenizer: Any = None,
        *,
        max_turns: int | None = None,
        max_turn_tokens: int | None = None,
        max_seconds: float | None = None,
        timeout: float | None = 60.0,
        on_env_error: OnError = "raise",
        env_error_score: float = 0.0,
        max_concurrency: int = 256,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        pad_id: int | None = None,
        extra_slot: bool = False,
        context: int | None = None,
        keep_last_observation: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._limits = TurnLimits(
            max_turns=max_turns,
            max_turn_tokens=max_turn_tokens,
            max_seconds=max_seconds,
            context=getattr(engine, "max_length", None) if context is None else context,
            keeps_last=keep_last_observation,
        )
        self._environments = EnvironmentPool(
            make_environment,
            Calls(timeout=timeout, most=max_concurrency),
            on_error=on_env_error,
        )
        self._pad = _pad_id(tokenizer) if pad_id is None else pad_id
        self._spare = int(extra_slot)
        self._play = partial(
            InFlightEpisodes,
            environments=self._environments,
            tokens=TurnTokens(tokenizer, chat_template_kwargs=chat_template_kwargs),
            limits=self._limits,
            pad_id=self._pad,
            error_score=env_error_score,
            clock=clock,
        )
        self._in_flight = self._play(engine, together=False)
        self.engines = tuple(self._around(part) for part in getattr(engine, "engines", ()))

    def _around(self, engine: RolloutEngine) -> EnvironmentRollouts:
        """The same with another engine; both share the environments."""
        part = copy.copy(self)
        part.engine, part.engines = engine, ()
        part._in_flight = self._play(engine, together=False)
        return part

    @property
    def shares_weights(self) -> bool:
        """Whether the engine samples from the learner's modules."""
        return self.engine.shares_weights

    @property
    def logprob_kind(self) -> Literal["sampled", "raw", "none"]:
        """What the engine's log-probabilities are of."""
        return self.engine.logprob_kind

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Load them into the engine."""
        return self.engine.load_weights(weights, version)

    def close(self) -> None:
        """Close the environments and the engine."""
        for part in (self, *self.engines):
            part._in_flight.drop()
        try:
            self._environments.close()
        finally:
            close = getattr(self.engine, "close", None)
            if close is not None:
                close()

    @property
    def wait_for_other_ranks(self) -> Callable[[], None] | None:
        """That of an engine which ranks share; they may need different numbers of turns."""
        return getattr(self.engine, "wait_for_other_ranks", None)

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """One episode per row; each depends on (weights, prompt, row, seed) and its environment.

        Raises:
            ConfigError: ``min_new_tokens`` is above ``max_turn_tokens``.
            RolloutError: the engine failed, an environment with ``on_env_error="raise"``, or with
                "drop" nearly all of them.
        """
        check_turn_tokens(sampling, self._limits.max_turn_tokens)
        play = self._play(self.engine, together=True)
        episodes: list[Episode] = []
        try:
            with getattr(self.engine, "keep_prefixes", nullcontext)():
                seeds = [environment_seed(seed, group) for group in prompts.group.tolist()]
                play.submit(prompts, seeds, sampling=sampling, seed=seed)
                while play.unfinished:
                    episodes += play.advance()
        except BaseException:
            play.drop()
            raise
        episodes.sort(key=lambda episode: episode.key)
        return self._build(prompts, episodes, play.seconds)

    def _build(
        self, prompts: PromptBatch, episodes: Sequence[Episode], seconds: tuple[float, float]
    ) -> Rollout:
        return build_rollout(
            prompts,
            episodes,
            pad_id=self._pad,
            spare=self._spare,
            metrics=episode_metrics(episodes, *seconds, self._environments.calls.hung),
        )

    @property
    def slots(self) -> int:
        """Responses that the engine samples at once; 0: only ``generate`` can be used."""
        return getattr(self.engine, "slots", 0)

    @property
    def updates_in_flight(self) -> bool:
        """Whether ``load_weights`` may be called while episodes are played."""
        return getattr(self.engine, "updates_in_flight", False)

    @property
    def unfinished(self) -> int:
        """Episodes that are being played."""
        return self._in_flight.unfinished

    def submit(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> None:
        """Play these rows as well; an episode continues as soon as its environment has answered."""
        check_turn_tokens(sampling, self._limits.max_turn_tokens)
        first: dict[int, int] = {}  # row of each group, whose ids are those of the dispatcher
        for group, row in zip(prompts.group.tolist(), prompts.row.tolist(), strict=True):
            first[group] = min(row, first.get(group, row))
        seeds = [environment_seed(seed, first[group]) for group in prompts.group.tolist()]
        self._in_flight.submit(prompts, seeds, sampling=sampling, seed=seed)

    def advance(self) -> Rollout | None:
        """Play on; the groups whose episodes are complete.

        Raises:
            LostRequestsError: the engine was restarted, and holds nothing.
            RolloutError: as for ``generate``.
        """
        episodes = self._in_flight.advance()
        if not episodes:
            return None
        seconds, self._in_flight.seconds = self._in_flight.seconds, (0.0, 0.0)
        prompts = PromptBatch.cat([episode.prompts for episode in episodes])
        return self._build(prompts, episodes, seconds)

    def cancel(self) -> None:
        """Drop all episodes."""
        self._in_flight.drop()
        engine: Any = self.engine  # with slots
        engine.cancel()


def _pad_id(tokenizer: Any) -> int:
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((int(i) for i in ids if i is not None), 0)
