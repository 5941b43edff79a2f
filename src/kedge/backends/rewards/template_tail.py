"""The end of a chat as its template renders it, after a response as it was sampled.

Reward models are trained on rendered conversations.  A template closes the assistant's message with
more than the stop token (``<|im_end|>`` and a line break in Qwen's), and the score is read there.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kedge.backends.data.encode import is_chat
from kedge.types import Rollout

_ANSWER = "KEDGE0ANSWER"  # stands for the response in a rendered conversation


class TemplateTail:
    """Appends what a chat template renders after the last answer.

    Args:
        tokenizer: tokenizer and chat template of policy and reward model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def ids(self) -> list[int]:
        """Token ids after the content of the last assistant message."""
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        _, found, tail = text.rpartition(_ANSWER)
        return list(self._tokenizer(tail, add_special_tokens=False)["input_ids"]) if found else []

    @cached_property
    def _special(self) -> Tensor:
        added = self._tokenizer.added_tokens_decoder
        listed = [i for i, token in added.items() if token.special]
        return torch.tensor([*self._tokenizer.all_special_ids, *listed], dtype=torch.int64)

    def append(self, ids: Tensor, lengths: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Close the assistant's message of terminated chats; other rows stay as they are.

        The tail replaces a special token at the end of a row, which is the stop token.

        Args:
            ids: int64 [B, L]; prompt and response, right-padded.
            lengths: int64 [B]; real tokens.
            rollout: for the rows that terminated, and the prompts that are chats.
        """
        chats = [is_chat(prompt) for prompt in rollout.prompts.columns.get("prompt", ())]
        if not any(chats) or not getattr(self._tokenizer, "chat_template", None):
            return ids, lengths
        closed = torch.tensor(chats, device=ids.device) & rollout.terminated.to(ids.device)
        tail = torch.tensor(self.ids, dtype=ids.dtype, device=ids.device)
        last = ids.gather(1, lengths[:, None] - 1)[:, 0]
        start = lengths - torch.isin(last, self._special.to(ids.device)).long()
        wide = nn.functional.pad(ids, (0, len(tail)))
        places = start[:, None] + torch.arange(len(tail), device=ids.device)
        written = wide.scatter(1, places, tail.expand(len(ids), -1))
        lengths = torch.where(closed, start + len(tail), lengths)
        wide = torch.where(closed[:, None], written, wide)
        return wide[:, : int(lengths.max())], lengths
