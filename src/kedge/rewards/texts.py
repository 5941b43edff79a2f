"""Prompts and responses of a rollout as text, decoded once per rollout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

from torch import Tensor

from kedge.data.decode import Decoder
from kedge.data.encode import is_chat
from kedge.math.turns import number_turns
from kedge.records.types import Rollout

CONTEXT = 4  # prompt tokens decoded before each response


class Texts:
    """Texts and token lists of a rollout, each computed at most once.

    A response is decoded after the last tokens of its prompt, so that prompt text + response text
    is the text of the whole row: Llama-style decoders strip the space before a first word.
    """

    def __init__(self, rollout: Rollout, tokenizer: Any, *, ends: Collection[int] = ()) -> None:
        self.rollout = rollout
        self._tokenizer = tokenizer
        self._decode = Decoder(tokenizer, ends, clean_up_tokenization_spaces=False)

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """Token ids of every prompt, without padding."""
        prompts = self.rollout.prompts
        return [ids[real].tolist() for ids, real in zip(prompts.ids, prompts.mask, strict=True)]

    @cached_property
    def completion_ids(self) -> list[list[int]]:
        """Token ids of every response, with its stop token, without an environment's tokens."""
        return [ids[own].tolist() for ids, own in self._rows(self.rollout.loss_mask)]

    @cached_property
    def episode_ids(self) -> list[list[int]]:
        """Token ids of every response, with the observations between its turns."""
        return [ids[real].tolist() for ids, real in self._rows(self.rollout.response_mask)]

    def _rows(self, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.rollout.ids.cpu(), mask.cpu(), strict=True)

    @cached_property
    def prompt_texts(self) -> list[str]:
        """The decoded prompts, as the policy saw them."""
        return self._tokenizer.batch_decode(
            self.prompt_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    @cached_property
    def episode_texts(self) -> list[str]:
        """Response texts with observations; prompt text + response text is the text of the row."""
        before = [ids[-CONTEXT:] for ids in self.prompt_ids]
        heads = self._decode(before)
        rows = [a + b for a, b in zip(before, self.episode_ids, strict=True)]
        return [
            text[len(head) :] if text.startswith(head) else self._decode([ids])[0]
            for head, text, ids in zip(heads, self._decode(rows), self.episode_ids, strict=True)
        ]

    @cached_property
    def completion_texts(self) -> list[str]:
        """The responses; several turns are joined by a newline."""
        if self.rollout.episodes is None and self.completion_ids == self.episode_ids:
            return self.episode_texts
        return [
            text if turns == [ids] else "\n".join(self._decode(turns))
            for text, turns, ids in zip(
                self.episode_texts, self._turns, self.episode_ids, strict=True
            )
        ]

    @cached_property
    def _turns(self) -> list[list[list[int]]]:
        """Token ids of each turn of every row."""
        rollout = self.rollout
        episodes = rollout.episodes
        turn = number_turns(rollout.loss_mask) if episodes is None else episodes.turn
        return [
            [ids[row == k].tolist() for k in row[row >= 0].unique()]
            for ids, row in self._rows(turn)
        ]

    @cached_property
    def prompts(self) -> Sequence[Any]:
        """The prompts as in the dataset: text or chat messages."""
        raw = self.rollout.prompts.columns.get("prompt")
        return self.prompt_texts if raw is None else raw

    @cached_property
    def completions(self) -> Sequence[Any]:
        """The responses: text, or chat messages if the prompt is a chat.

        A chat response is one assistant message, or the turns of an episode and the observations
        between them.
        """
        raw = self.rollout.prompts.columns.get("prompt", ())
        if not any(is_chat(prompt) for prompt in raw):
            return self.completion_texts
        replies = self._decode(self.completion_ids)  # chat templates end where the answer starts
        return [
            self._messages(row, reply) if is_chat(prompt) else text
            for row, (prompt, reply, text) in enumerate(
                zip(raw, replies, self.completion_texts, strict=True)
            )
        ]

    def _messages(self, row: int, reply: str) -> list[dict[str, Any]]:
        episodes = self.rollout.episodes
        if episodes is None:
            return [{"role": "assistant", "content": reply}]
        observations: Any = episodes.columns["observations"][row]
        messages = []
        for text, between in zip_longest(
            self._decode(self._turns[row]), observations, fillvalue=()
        ):
            messages += [{"role": "assistant", "content": text}, *between]
        return messages


class TextCache:
    """The texts of the latest rollout, shared by every reward source that reads text.

    Args:
        tokenizer: tokenizer of the policy.
        ends: token ids that end responses, which texts leave out.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int] = ()) -> None:
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's tokenizer
        self._ends = ends
        self._latest: Texts | None = None

    def of(self, rollout: Rollout) -> Texts:
        """The texts of ``rollout``."""
        latest = self._latest
        if latest is None or latest.rollout is not rollout:
            latest = self._latest = Texts(rollout, self.tokenizer, ends=self._ends)
        return latest


def row_name(rollout: Rollout, row: int, prompt: object) -> str:
    """Name a row in error messages: its number in the batch of all ranks, and its prompt."""
    text = repr(prompt)
    text = text if len(text) <= 200 else text[:200] + "..."
    return f"row {int(rollout.prompts.row[row])} (prompt {text})"
