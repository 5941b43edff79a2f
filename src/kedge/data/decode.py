"""Text of responses, as reward functions and environments read it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

# Tokens that say how a text is stored, not what it says.
_HIDDEN = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


class Decoder:
    """Decodes responses without the tokens that begin, end and fill them.

    Other special tokens are a part of the response, such as ``<answer>`` added by the user.

    Args:
        tokenizer: tokenizer of the policy.
        ends: token ids that end responses.
        options: of ``tokenizer.batch_decode``.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int] = (), **options: Any) -> None:
        self._tokenizer, self._options = tokenizer, options
        hidden = (getattr(tokenizer, f"{name}_token_id", None) for name in _HIDDEN)
        self._hidden = {*ends, *(token for token in hidden if isinstance(token, int))}

    @cached_property
    def _shown(self) -> set[int]:
        """Special tokens that are shown."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {token for token, text in added.items() if getattr(text, "special", False)}
        return {*special, *getattr(self._tokenizer, "all_special_ids", ())} - self._hidden

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of rows of token ids."""
        decode, options = self._tokenizer.batch_decode, self._options
        texts: list[str] = decode(list(rows), skip_special_tokens=True, **options)
        for i, ids in enumerate(rows):
            if not self._shown.isdisjoint(ids):
                real = [token for token in ids if token not in self._hidden]
                texts[i] = decode([real], skip_special_tokens=False, **options)[0]
        return texts
