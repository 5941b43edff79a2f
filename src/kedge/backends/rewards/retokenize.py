"""Retokenizes rollouts for a reward model with a different vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedge.backends.data.encode import is_chat
from kedge.backends.rewards.texts import Texts
from kedge.errors import ConfigError


class Retokenizer:
    """Tokenizes decoded rows for a model with its own vocabulary.

    Text: prompt text + response text with the tokenizer's special tokens.  The EOS token ends
    exactly the terminated rows, except for encoders (``framed``, or a tokenizer with a sep token),
    which need the special tokens that their tokenizer adds around every text.  A row without text
    becomes one special token.

    Chats: the tokenizer's own chat template; the assistant's message is closed in terminated rows
    and left open in the others.

    Rows longer than ``max_length`` lose their first tokens.
    """

    def __init__(
        self, tokenizer: Any, *, max_length: int | None = None, framed: bool = False
    ) -> None:
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's tokenizer
        self._max_length = max_length
        self._framed = framed or self._tokenizer.sep_token_id is not None

    def rows(self, texts: Texts, finished: Sequence[bool]) -> list[list[int]]:
        """Token ids of every row, without padding."""
        chat_flags = [is_chat(prompt) for prompt in texts.prompts]
        text_rows = [i for i, chat in enumerate(chat_flags) if not chat]
        rows: list[list[int]] = [[] for _ in chat_flags]
        if text_rows:
            texts_to_encode = [texts.prompt_texts[i] + texts.completion_texts[i] for i in text_rows]
            for i, ids in zip(
                text_rows,
                self.whole(texts_to_encode, [finished[i] for i in text_rows]),
                strict=True,
            ):
                rows[i] = ids
        chat_rows = [i for i, chat in enumerate(chat_flags) if chat]
        if chat_rows:
            texts_to_encode = [self._render(texts, i, finished[i]) for i in chat_rows]
            for i, ids in zip(chat_rows, self._encode(texts_to_encode, special=False), strict=True):
                rows[i] = ids
        return rows

    def whole(self, texts: list[str], finished: Sequence[bool]) -> list[list[int]]:
        """Token ids of texts that hold prompt and response, without padding."""
        rows = self._encode(texts, special=True)
        return [self._with_eos(ids, ended) for ids, ended in zip(rows, finished, strict=True)]

    def _encode(self, texts: list[str], *, special: bool) -> list[list[int]]:
        options: dict[str, Any] = {}
        if self._max_length is not None:
            options = {"truncation": True, "max_length": self._max_length}
        side, self._tokenizer.truncation_side = self._tokenizer.truncation_side, "left"
        try:
            return self._tokenizer(texts, add_special_tokens=special, **options)["input_ids"]
        finally:
            self._tokenizer.truncation_side = side

    def _with_eos(self, ids: list[int], finished: bool) -> list[int]:
        eos = self._tokenizer.eos_token_id
        if eos is None or self._framed:
            return ids or [self._placeholder()]
        body = ids[:-1] if ids[-1:] == [eos] else ids
        if not finished:
            return body or [self._placeholder()]
        whole = [*body, eos]
        return whole if self._max_length is None else whole[-self._max_length :]

    def _placeholder(self) -> int:
        special = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        return next((token for token in special if token is not None), 0)

    def _render(self, texts: Texts, row: int, finished: bool) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "the prompts are chats, but the reward model's tokenizer has no chat template;"
                " set its chat_template, or pass the prompts as text"
            )
        messages = [*texts.prompts[row], *texts.completions[row]]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=not finished
        )
