"""Reward source that runs a sequence-classification model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kedge.backends.rewards.batching import chunks, filled, packed, padded
from kedge.backends.rewards.heads import SHIFT, find_head
from kedge.backends.rewards.retokenize import Retokenizer
from kedge.backends.rewards.template_tail import TemplateTail
from kedge.backends.rewards.texts import TextCache, row_name
from kedge.errors import ConfigError, RewardError
from kedge.ops.cpu.patch import Kernels
from kedge.types import RewardOutput, Rollout


class RewardModel:
    """Scores each response with a sequence-classification model.

    Models with a backbone and a ``score`` layer are scored at the last real token, found by
    length, never by token id.  Others (``classifier`` encoders, plain modules) are called with an
    attention mask.  The model runs in evaluation mode without gradient, longest rows first, at
    most ``chunk_rows`` at a time.  Terminated chats are closed as the chat template closes them.

    Args:
        model: the module that scores.
        tokenizer: the model's tokenizer; rows are decoded and retokenized with it.  None (or one
            with the policy's vocabulary) passes the policy's token ids on.
        texts: the decoded rollout, shared with other sources; required with ``tokenizer``.
        policy_vocab_size: token ids the policy can produce are below it.
        chunk_rows: most rows scored at a time.
        max_length: tokens; longer rows lose their first tokens.  None: a row longer than the model
            supports is an error.
        reward_label: label (index or name) that is the reward, if the model has several.
        autocast: dtype to run in, such as ``torch.bfloat16``; None runs in the weights' dtype.
        name: key of the component in the reward output; default: the model's class.

    Raises:
        ConfigError: the vocabulary is too small, or ``reward_label`` is missing for several labels.
    """

    columns: frozenset[str] | None = frozenset()  # reads no dataset columns

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        texts: TextCache | None = None,
        policy_vocab_size: int | None = None,
        chunk_rows: int = 64,
        max_length: int | None = None,
        reward_label: int | str | None = None,
        autocast: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows={chunk_rows} must be at least 1")
        self.model = model.eval()
        base = getattr(model, "get_base_model", lambda: model)()
        self.name = name or type(base).__name__
        self._head = find_head(base)
        self._config = getattr(base, "config", None)
        self._shift = float(getattr(self._config, SHIFT, 0.0))
        self._label = _label(self._config, reward_label, self.name)
        self._vocab = _vocab(base)
        self._pad = _pad(self._config, self._vocab)
        self._texts = texts
        self._tail = None if texts is None else TemplateTail(texts.tokenizer)
        self._own: Retokenizer | None = None
        if tokenizer is not None and not (texts and same_tokens(tokenizer, texts.tokenizer)):
            if texts is None:
                raise ConfigError(
                    f"reward model {self.name} has its own tokenizer, so rows must be decoded with"
                    " the policy's: pass texts=TextCache(policy_tokenizer)"
                )
            self._own = self._retokenizer(tokenizer, max_length)
        self._check_vocabulary(policy_vocab_size)
        self._chunk, self._max_length, self._autocast = chunk_rows, max_length, autocast

    def score(self, rollout: Rollout) -> RewardOutput:
        """One score per row.

        Raises:
            RewardError: a score is not finite, or a row is too long or holds unknown tokens.
        """
        if self._own is not None and self._texts is not None:
            terminated = rollout.terminated.tolist()
            ids, lengths = padded(self._own.rows(self._texts.of(rollout), terminated))
        else:
            ids, lengths = packed(rollout)
            if self._tail is not None:
                ids, lengths = self._tail.append(ids, lengths, rollout)
            ids, lengths = self._cut(ids, lengths)
        ids = filled(ids, lengths, self._pad)
        self._check_rows(rollout, ids, lengths)
        scores = self._scores(ids, lengths).to(rollout.ids.device)
        finite = scores.isfinite()
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise RewardError(
                f"reward model {self.name} returned the score {float(scores[row])} for"
                f" {self._name_row(rollout, row)}; check its weights for NaN or infinite values, or"
                " run it in float32"
            )
        return RewardOutput(
            scores=scores, valid=torch.ones_like(finite), components={self.name: scores}
        )

    def score_texts(self, texts: list[str], tokenizer: Any) -> Tensor:
        """Scores of whole texts, each ended with the end-of-text token.

        This matches how terminated responses are scored in PPO and how preferences are read when
        a reward model is trained.

        Args:
            texts: prompt and answer concatenated.
            tokenizer: tokenizer of the reward model.

        Returns:
            float32 [len(texts)].

        Raises:
            RewardError: a text is longer than the model supports.
        """
        rows = self._retokenizer(tokenizer, None).whole(texts, [True] * len(texts))
        ids, lengths = padded(rows)
        limit = getattr(self._config, "max_position_embeddings", None)
        if isinstance(limit, int) and ids.shape[1] > limit > 0:
            text = texts[int(lengths.argmax())]
            raise RewardError(
                f"a text has {ids.shape[1]} tokens, more than the {limit} that reward model"
                f" {self.name} supports: {text[:80]!r}..."
            )
        return self._scores(filled(ids, lengths, self._pad), lengths)

    def _retokenizer(self, tokenizer: Any, max_length: int | None) -> Retokenizer:
        framed = bool(getattr(self._config, "is_encoder_decoder", False))
        return Retokenizer(tokenizer, max_length=max_length, framed=framed)

    @torch.no_grad()
    def _scores(self, ids: Tensor, lengths: Tensor) -> Tensor:
        self.model.eval()
        device = next((p.device for p in self.model.parameters()), ids.device)
        groups, scores = chunks(lengths, rows=self._chunk), []
        with self._precision(device), Kernels([self.model]).active():
            for rows in groups:
                width = int(lengths[rows[0]])  # on the host, as the row numbers are
                logits = self._head(ids[rows, :width].to(device), lengths[rows].to(device))
                scores.append(self._pick(logits).float())
        out = torch.empty(len(ids), dtype=torch.float32, device=ids.device)
        out[torch.cat(groups)] = torch.cat(scores).to(ids.device)
        return out

    def _pick(self, logits: Tensor) -> Tensor:
        if self._label is None and logits.shape[1] != 1:
            raise RewardError(
                f"reward model {self.name} returned {logits.shape[1]} numbers per row; select the"
                " reward with reward_label"
            )
        return logits[:, self._label or 0] + self._shift

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self._autocast)

    def _cut(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if self._max_length is None or ids.shape[1] <= self._max_length:
            return ids, lengths
        skip = (lengths - self._max_length).clamp(min=0)
        at = torch.arange(self._max_length, device=ids.device) + skip[:, None]
        return ids.gather(1, at.clamp(max=ids.shape[1] - 1)), lengths - skip

    def _check_rows(self, rollout: Rollout, ids: Tensor, lengths: Tensor) -> None:
        limit = getattr(self._config, "max_position_embeddings", None)
        if isinstance(limit, int) and ids.shape[1] > limit > 0:
            row = int(lengths.argmax())
            raise RewardError(
                f"{self._name_row(rollout, row)} has {int(lengths[row])} tokens, more than the"
                f" {limit} that reward model {self.name} supports; shorten prompts or responses,"
                f" or set max_length={limit} to score the end of such rows"
            )
        if self._vocab is None:
            return
        over = ids >= self._vocab
        if bool(over.any()):
            row, column = (int(i) for i in over.nonzero()[0])
            raise RewardError(
                f"token {int(ids[row, column])} of {self._name_row(rollout, row)} is outside the"
                f" vocabulary of reward model {self.name} ({self._vocab} tokens); pass the model's"
                " own tokenizer, so that rows are retokenized for it"
            )

    def _check_vocabulary(self, policy_vocab_size: int | None) -> None:
        if self._own is not None or self._vocab is None or policy_vocab_size is None:
            return
        if self._vocab < policy_vocab_size:
            raise ConfigError(
                f"reward model {self.name} has {self._vocab} tokens, but the policy's tokenizer has"
                f" {policy_vocab_size}: it cannot read the policy's tokens. Pass the tokenizer it"
                " was trained with (reward_processing_class), or a model with the same vocabulary"
            )

    def _name_row(self, rollout: Rollout, row: int) -> str:
        if self._texts is not None:
            prompt = self._texts.of(rollout).prompts[row]
        else:
            ids = rollout.prompts.ids[row][rollout.prompts.mask[row]].tolist()
            prompt = rollout.prompts.columns.get("prompt", {row: ids})[row]
        return row_name(rollout, row, prompt)


def same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenizers share vocabulary, EOS token and chat template."""
    if one is other:
        return True
    return (
        one.get_vocab() == other.get_vocab()
        and one.eos_token_id == other.eos_token_id
        and one.chat_template == other.chat_template
    )


def _vocab(model: nn.Module) -> int | None:
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embeddings, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def _pad(config: Any, vocab: int | None) -> int:
    """Padding token; only encoder-decoders, which count EOS tokens, read padding."""
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < (vocab or pad + 1) else 0


def _label(config: Any, wanted: int | str | None, name: str) -> int | None:
    count = getattr(config, "num_labels", None)
    names: dict[int, str] = getattr(config, "id2label", None) or {}
    if wanted is None:
        if isinstance(count, int) and count != 1 and config is not None:
            listed = ", ".join(names.values()) or f"{count} of them"
            raise ConfigError(
                f"reward model {name} has {count} labels ({listed}); select the reward with"
                " reward_label, or load the model with num_labels=1"
            )
        return None
    index = wanted if isinstance(wanted, int) else {v: k for k, v in names.items()}.get(wanted)
    if index is None or (isinstance(count, int) and not 0 <= index < count):
        raise ConfigError(
            f"reward_label={wanted!r} is not a label of reward model {name}; its labels are"
            f" {', '.join(f'{k} ({v})' for k, v in names.items()) or count}"
        )
    return index
