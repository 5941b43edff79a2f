"""Rows of a rollout in another model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedge.backends.rewards.texts import Texts, is_chat
from kedge.errors import ConfigError


class Retokenizer:
    """Tokenizes decoded rows for a model with its own vocabulary.

    Text: prompt text + response text with the tokenizer's special tokens.  The eos token ends
    exactly the finished rows, except for encoders (``framed``, or a tokenizer with a sep token),
    which need every text in the frame that their tokenizer gives it.  A row without any text is
    one special token.

    Chats: the tokenizer's own chat template; the assistant's message is closed in finished rows and
    left open in the others.

    Rows longer than ``max_length`` lose their first tokens.
    """

    def __init__(
        self, tokenizer: Any, *, max_length: int | None = None, framed: bool = False
    ) -> None:
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor: its own
        self._max_length = max_length
        self._framed = framed or self._tokenizer.sep_token_id is not None

    def rows(self, texts: Texts, finished: Sequence[bool]) -> list[list[int]]:
        """Token ids of every row, without padding."""
        chats = [is_chat(prompt) for prompt in texts.prompts]
        plain = [i for i, chat in enumerate(chats) if not chat]
        rows: list[list[int]] = [[] for _ in chats]
        if plain:
            whole = [texts.prompt_texts[i] + texts.completion_texts[i] for i in plain]
            for i, ids in zip(plain, self.whole(whole, [finished[i] for i in plain]), strict=True):
                rows[i] = ids
        talked = [i for i, chat in enumerate(chats) if chat]
        if talked:
            whole = [self._render(texts, i, finished[i]) for i in talked]
            for i, ids in zip(talked, self._encode(whole, special=False), strict=True):
                rows[i] = ids
        return rows

    def whole(self, texts: list[str], finished: Sequence[bool]) -> list[list[int]]:
        """Token ids of texts that hold prompt and response, without padding."""
        rows = self._encode(texts, special=True)
        return [self._ended(ids, ended) for ids, ended in zip(rows, finished, strict=True)]

    def _encode(self, texts: list[str], *, special: bool) -> list[list[int]]:
        options: dict[str, Any] = {}
        if self._max_length is not None:
            options = {"truncation": True, "max_length": self._max_length}
        side, self._tokenizer.truncation_side = self._tokenizer.truncation_side, "left"
        try:
            return self._tokenizer(texts, add_special_tokens=special, **options)["input_ids"]
        finally:
            self._tokenizer.truncation_side = side

    def _ended(self, ids: list[int], finished: bool) -> list[int]:
        eos = self._tokenizer.eos_token_id
        if eos is None or self._framed:
            return ids or [self._blank()]
        body = ids[:-1] if ids[-1:] == [eos] else ids
        if not finished:
            return body or [self._blank()]
        whole = [*body, eos]
        return whole if self._max_length is None else whole[-self._max_length :]

    def _blank(self) -> int:
        special = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        return next((token for token in special if token is not None), 0)

    def _render(self, texts: Texts, row: int, finished: bool) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "the prompts are chats, but the reward model's tokenizer has no chat template;"
                " set its chat_template, or give the prompts as text"
            )
        messages = [*texts.prompts[row], *texts.completions[row]]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=not finished
        )
