"""What model and environment said in an episode, as text and as tokens."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

PROMPT, SYSTEM, MODEL = "black on grey85", "black on cyan3", "black on deep_sky_blue1"
REWARD = "black on plum1"


class TextHistory:
    """An episode as a list of segments, each by the environment (system) or by the model.

    Args:
        text: the first segment, which is the query.
        tokens: its tokens, int64 [n].
        system: whether it is by the environment.
    """

    def __init__(self, text: str, tokens: Tensor, system: bool = True) -> None:
        self.system_spans: list[bool] = []
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.text = ""
        self.tokens = tokens.new_empty(0)
        self.token_masks = torch.empty(0, dtype=torch.long, device=tokens.device)
        self.completed = False
        self.truncated = False
        self.reward: Tensor | float = 0.0
        self.append_segment(text, tokens, system=system)

    def append_segment(self, text: str, tokens: Tensor, system: bool = True) -> None:
        """Add a segment; ``token_masks`` is 1 at the model's tokens.

        Raises:
            ValueError: text or tokens are empty.
        """
        if not text or not len(tokens):
            raise ValueError("a segment of a TextHistory must have text and tokens, got none")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        mask = torch.full_like(tokens, int(not system), dtype=torch.long)
        self.token_masks = torch.cat([self.token_masks, mask])

    def complete(self, truncated: bool = False) -> None:
        """End the episode; ``truncated``: by a limit."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        """The text of the last segment."""
        return self.text[slice(*self.text_spans[-1])]

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query int64 [P], everything after it int64 [R], and the mask of the latter [R]."""
        end = self.token_spans[0][1]
        return self.tokens[:end], self.tokens[end:], self.token_masks[end:]

    def show_text(self, show_legend: bool = False) -> None:
        """Print the episode; colors show who wrote what."""
        text = Text(self.text)
        for (start, end), style in zip(self.text_spans, self._styles(), strict=True):
            text.stylize(style, start, end)
        self._show(text, show_legend)

    def show_tokens(self, tokenizer: object, show_legend: bool = False) -> None:
        """Print the tokens of the episode; colors show who wrote what."""
        text = Text()
        for (start, end), style in zip(self.token_spans, self._styles(), strict=True):
            ids = self.tokens[start:end].tolist()
            for token in tokenizer.convert_ids_to_tokens(ids):  # type: ignore[attr-defined]
                text.append(token, style=style).append(" ")
        self._show(text, show_legend)

    def show_colour_legend(self) -> None:
        """Print what the colors mean."""
        legend = Text("\n\n(Color legend: ")
        styles = {"Prompt": PROMPT, "System": SYSTEM, "Model": MODEL, "Reward": REWARD}
        for i, (name, style) in enumerate(styles.items()):
            legend.append("|" if i else "").append(name, style=style)
        Console().print(legend.append(")"))

    def _styles(self) -> list[str]:
        return [PROMPT, *(SYSTEM if system else MODEL for system in self.system_spans[1:])]

    def _show(self, text: Text, show_legend: bool) -> None:
        Console().print(text.append(f"\n\nReward: {self.reward}", style=REWARD))
        if show_legend:
            self.show_colour_legend()
