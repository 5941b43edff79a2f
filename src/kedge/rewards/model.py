"""Reward source that runs a sequence-classification model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kedge.chat_template import render_chat
from kedge.data.encode import is_chat
from kedge.models.backbone import pack_sequences, run_packed, supports_packing
from kedge.models.compatibility import same_tokens
from kedge.models.score_head import SHIFT, float32_head
from kedge.ops.kernels import Kernels
from kedge.records.errors import ConfigError, RewardError
from kedge.records.protocols import RewardInfo
from kedge.records.types import RewardOutput, Rollout
from kedge.rewards.texts import TextCache, Texts, row_name

Head = Callable[[Tensor, Tensor], Tensor]  # ids [b, L], lengths [b] -> logits [b, labels]
_ANSWER = "KEDGE0ANSWER"  # placeholder for the response in a rendered conversation


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
        policy_vocab_size: upper bound of the policy's token ids.
        equal_vocabulary: size of the policy's embedding, which a model without ``tokenizer`` must
            have, too; None: a larger one is accepted.
        chunk_rows: most rows scored at a time.
        max_length: tokens; longer rows lose their first tokens.  None: a row longer than the model
            supports is an error.
        reward_label: label (index or name) that is the reward, if the model has several.
        check_labels: require ``reward_label`` for several labels here, not when it first scores.
        autocast: dtype to run in, such as ``torch.bfloat16``; None runs in the weights' dtype.
        name: key of the component in the reward output; default: the model's class.

    Raises:
        ConfigError: the vocabulary is too small, or ``reward_label`` is missing for several labels.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        texts: TextCache | None = None,
        policy_vocab_size: int | None = None,
        equal_vocabulary: int | None = None,
        chunk_rows: int = 64,
        max_length: int | None = None,
        reward_label: int | str | None = None,
        check_labels: bool = True,
        autocast: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        self.model = model.eval()
        base = getattr(model, "get_base_model", lambda: model)()
        self.name = name or type(base).__name__
        self._head = find_head(base)
        self._config = getattr(base, "config", None)
        self._shift = float(getattr(self._config, SHIFT, 0.0))
        limit = getattr(self._config, "max_position_embeddings", None)  # -1: none
        self._limit = limit if isinstance(limit, int) and limit > 0 else sys.maxsize
        self._label = None
        if check_labels or reward_label is not None:
            self._label = _label(self._config, reward_label, self.name)
        embeddings = getattr(base, "get_input_embeddings", lambda: None)()
        self._vocab: int | None = getattr(embeddings, "num_embeddings", None)
        pad = getattr(self._config, "pad_token_id", None)  # only encoder-decoders read it
        self._pad = pad if isinstance(pad, int) and 0 <= pad < (self._vocab or pad + 1) else 0
        self._texts = texts
        self._tail = None if texts is None else TemplateTail(texts.tokenizer)
        self._own: Retokenizer | None = None
        if tokenizer is not None and not (texts and same_tokens(tokenizer, texts.tokenizer)):
            self._own = self._retokenizer(tokenizer, max_length)
        unequal = None not in (equal_vocabulary, self._vocab) and equal_vocabulary != self._vocab
        if tokenizer is None and unequal:
            raise ConfigError(
                f"reward model {self.name} has {self._vocab} tokens and the policy"
                f" {equal_vocabulary}, but the reward model gets the policy's token ids; pass its"
                " tokenizer (reward_processing_class), or a model with the same vocabulary"
            )
        known = self._vocab if self._own is None else None  # None: the model reads all tokens
        if known is not None and known < (policy_vocab_size or 0):
            raise ConfigError(
                f"reward model {self.name} has {self._vocab} tokens, but the policy's tokenizer has"
                f" {policy_vocab_size}: it cannot read the policy's tokens. Pass the tokenizer it"
                " was trained with (reward_processing_class), or a model with the same vocabulary"
            )
        self._chunk, self._max_length, self._autocast = chunk_rows, max_length, autocast

    @property
    def info(self) -> RewardInfo:
        """No dataset column is read."""
        return RewardInfo(name=self.name, columns=frozenset(), only_models=True)

    def score(self, rollout: Rollout) -> RewardOutput:
        """One score per row.

        Raises:
            RewardError: a score is not finite, or a row is too long or holds unknown tokens.
        """
        if self._own is not None:
            assert self._texts is not None  # set together with the tokenizer
            terminated = rollout.terminated.tolist()
            rows = self._own.rows(self._texts.of(rollout), terminated)
            ids, lengths = pad_rows(rows, self._pad)
        else:
            ids, lengths = join_responses(rollout)
            if self._tail is not None:
                ids, lengths = self._tail.append(ids, lengths, rollout)
            ids, lengths = self._cut(ids, lengths)
            ids = torch.where(_mask(ids, lengths).bool(), ids, self._pad)
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
        rows = self._retokenizer(tokenizer, None).tokenize_texts(texts, [True] * len(texts))
        longest, text = max(zip(map(len, rows), texts, strict=True), default=(0, ""))
        if longest > self._limit:
            raise RewardError(
                f"a text has {longest} tokens, more than the {self._limit} that reward model"
                f" {self.name} supports: {text[:80]!r}..."
            )
        return self.score_ids(rows)

    def score_ids(self, rows: list[list[int]]) -> Tensor:
        """Scores of rows of token ids, float32 [len(rows)], each at its last token."""
        return self._scores(*pad_rows(rows, self._pad))

    def _retokenizer(self, tokenizer: Any, max_length: int | None) -> Retokenizer:
        framed = bool(getattr(self._config, "is_encoder_decoder", False))
        return Retokenizer(tokenizer, max_length=max_length, framed=framed)

    @torch.no_grad()
    def _scores(self, ids: Tensor, lengths: Tensor) -> Tensor:
        self.model.eval()
        device = next((p.device for p in self.model.parameters()), ids.device)
        groups, scores = split_rows(lengths, rows=self._chunk), []
        autocast: AbstractContextManager[Any] = nullcontext()
        if self._autocast is not None:
            autocast = torch.autocast(device.type, dtype=self._autocast)
        with autocast, Kernels([self.model]).active():
            for rows in groups:
                width = int(lengths[rows[0]])  # both are on the host
                logits = self._head(ids[rows, :width].to(device), lengths[rows].to(device))
                if self._label is None and logits.shape[1] != 1:
                    raise RewardError(
                        f"reward model {self.name} returned {logits.shape[1]} numbers per row;"
                        " select the reward with reward_label"
                    )
                scores.append((logits[:, self._label or 0] + self._shift).float())
        out = torch.empty(len(ids), dtype=torch.float32, device=ids.device)
        out[torch.cat(groups)] = torch.cat(scores).to(ids.device)
        return out

    def _cut(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        if self._max_length is None or ids.shape[1] <= self._max_length:
            return ids, lengths
        skip = (lengths - self._max_length).clamp(min=0)
        at = torch.arange(self._max_length, device=ids.device) + skip[:, None]
        return ids.gather(1, at.clamp(max=ids.shape[1] - 1)), lengths - skip

    def _check_rows(self, rollout: Rollout, ids: Tensor, lengths: Tensor) -> None:
        if ids.shape[1] > self._limit:
            row = int(lengths.argmax())
            raise RewardError(
                f"{self._name_row(rollout, row)} has {int(lengths[row])} tokens, more than the"
                f" {self._limit} that reward model {self.name} supports; shorten prompts or"
                f" responses, or set max_length={self._limit} to score the end of such rows"
            )
        over = ids >= (self._vocab or sys.maxsize)
        if bool(over.any()):
            row, column = (int(i) for i in over.nonzero()[0])
            raise RewardError(
                f"token {int(ids[row, column])} of {self._name_row(rollout, row)} is outside the"
                f" vocabulary of reward model {self.name} ({self._vocab} tokens); pass the model's"
                " own tokenizer, so that rows are retokenized for it"
            )

    def _name_row(self, rollout: Rollout, row: int) -> str:
        ids = rollout.prompts.ids[row][rollout.prompts.mask[row]].tolist()
        return row_name(rollout, row, rollout.prompts.columns.get("prompt", {row: ids})[row])


def _label(config: Any, wanted: int | str | None, name: str) -> int | None:
    count = getattr(config, "num_labels", None)
    names: dict[int, str] = getattr(config, "id2label", None) or {}
    if wanted is None:
        if isinstance(count, int) and count != 1:
            raise ConfigError(
                f"reward model {name} has {count} labels ({', '.join(names.values())}); select the"
                " reward with reward_label, or load the model with num_labels=1"
            )
        return None
    index = wanted if isinstance(wanted, int) else {v: k for k, v in names.items()}.get(wanted)
    if index is None or (isinstance(count, int) and not 0 <= index < count):
        raise ConfigError(
            f"reward_label={wanted!r} is not a label of reward model {name}; its labels are"
            f" {', '.join(f'{k} ({v})' for k, v in names.items()) or count}"
        )
    return index


class TemplateTail:
    """Appends the text that a chat template renders after the last answer.

    Reward models are trained on rendered conversations.  A template closes the assistant's message
    with more than the stop token (``<|im_end|>`` and a line break in Qwen's), and the score is read
    there.  Policy and reward model share ``tokenizer``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def ids(self) -> list[int]:
        """Token ids after the content of the last assistant message."""
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
        text = render_chat(self._tokenizer, messages)
        _, found, tail = text.rpartition(_ANSWER)
        return list(self._tokenizer(tail, add_special_tokens=False)["input_ids"]) if found else []

    @cached_property
    def _special(self) -> Tensor:
        added = self._tokenizer.added_tokens_decoder
        listed = [i for i, token in added.items() if token.special]
        return torch.tensor([*self._tokenizer.all_special_ids, *listed], dtype=torch.int64)

    def append(self, ids: Tensor, lengths: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Close the assistant's message of terminated chats in right-padded rows int64 [B, L].

        The tail replaces a special token at the end of a row, which is the stop token.
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
        chats = [i for i, prompt in enumerate(texts.prompts) if is_chat(prompt)]
        plain = [i for i in range(len(texts.prompts)) if i not in set(chats)]
        ids = self.tokenize_texts(
            [texts.prompt_texts[i] + texts.episode_texts[i] for i in plain],
            [finished[i] for i in plain],
        )
        ids += self._encode([self._render(texts, i, finished[i]) for i in chats], special=False)
        rows = dict(zip([*plain, *chats], ids, strict=True))
        return [rows[i] for i in range(len(rows))]

    def tokenize_texts(self, texts: list[str], finished: Sequence[bool]) -> list[list[int]]:
        """Tokenize texts of prompt and response, without padding."""
        rows = self._encode(texts, special=True)
        return [self._with_eos(ids, ended) for ids, ended in zip(rows, finished, strict=True)]

    def _encode(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if not texts:
            return []
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
        return [*body, eos][-(self._max_length or 0) :]

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
        where = f"row {row} for the reward model"
        return render_chat(
            self._tokenizer, messages, where=where, continue_final_message=not finished
        )


def join_responses(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Prompt and response of every row without padding: ids int64 [B, L], lengths int64 [B]."""
    device, prompts = rollout.ids.device, rollout.prompts
    ids = torch.cat([prompts.ids.to(device), rollout.ids], 1)
    real = torch.cat([prompts.mask.to(device), rollout.response_mask], 1)
    lengths = real.sum(1)
    order = (~real).long().argsort(dim=1, stable=True)
    return ids.gather(1, order)[:, : int(lengths.max())], lengths


def split_rows(lengths: Tensor, *, rows: int, tokens: int = 1024) -> list[Tensor]:
    """Groups of row numbers to run together, from ``lengths`` int64 [B]: longest first.

    A group ends at ``rows`` rows, or when it holds ``tokens`` tokens (fewer do not justify a
    forward pass) and the next row is more than 10% shorter than its first.
    """
    order = lengths.argsort(descending=True, stable=True)
    groups: list[list[int]] = []
    longest = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        full = bool(groups) and (
            len(groups[-1]) == rows
            or (len(groups[-1]) * longest >= tokens and length < 0.9 * longest)
        )
        if full or not groups:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [torch.tensor(group, device=lengths.device) for group in groups]


def pad_rows(rows: list[list[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Token lists, right-padded: ids int64 [B, L], lengths int64 [B]."""
    tensors = [torch.tensor(row) for row in rows]
    ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
    return ids, torch.tensor([len(row) for row in rows])


def find_head(model: nn.Module) -> Head:
    """A function that scores right-padded rows with ``model``.

    A model with a backbone (named by ``base_model_prefix``) and a ``score`` layer is scored at the
    last real token, found by length.  If they are functions of a module without ``forward``,
    they are called as TRL does.  Any other model is called with an attention mask and returns
    logits (encoders with a ``classifier``), one number per row, or one per token.
    """
    backbone = getattr(model, getattr(model, "base_model_prefix", None) or "-", None)
    score = getattr(model, "score", None)
    if isinstance(backbone, nn.Module) and isinstance(score, nn.Module):
        return _last_token_head(backbone, score)
    if callable(backbone) and callable(score) and type(model).forward is nn.Module.forward:
        return _function_head(backbone, score)
    return _model_head(model)


def _last_token_head(backbone: nn.Module, score: nn.Module) -> Head:
    """A score layer on the hidden state of the last real token."""
    wanted = {"use_cache": False, "return_dict": True}
    if not hasattr(backbone, "config"):
        wanted["output_hidden_states"] = True
    options = _accepted(backbone, wanted)
    # evaluated at the first call, when the model is on its device
    joins = functools.cache(lambda: supports_packing(backbone))

    def head(ids: Tensor, lengths: Tensor) -> Tensor:
        if joins():
            groups = [(n,) for n in lengths.tolist()]
            joined = run_packed(backbone, pack_sequences(ids, lengths), groups)
            return float32_head(score, joined[0, lengths.cumsum(0) - 1])
        out = backbone(input_ids=ids, attention_mask=_mask(ids, lengths), **options)
        hidden = getattr(out, "last_hidden_state", None)
        if hidden is None and getattr(out, "hidden_states", None) is not None:
            hidden = out.hidden_states[-1]
        if hidden is None:
            hidden = out[0] if isinstance(out, tuple) else out
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise RewardError(
                f"the reward model's backbone returned {_shape(hidden)}; expected last_hidden_state"
                " of shape [rows, tokens, width]"
            )
        last = hidden[torch.arange(len(ids), device=ids.device), lengths - 1]
        return float32_head(score, last[:, None])[:, 0]

    return head


def _function_head(backbone: Callable[..., Any], score: Callable[[Any], Tensor]) -> Head:
    """Call a reward module as TRL does: its backbone, then ``score`` on the last hidden states."""

    def head(ids: Tensor, lengths: Tensor) -> Tensor:
        mask = _mask(ids, lengths)
        out = backbone(
            input_ids=ids * mask,
            attention_mask=mask,
            position_ids=mask.cumsum(1) - mask,
            return_dict=True,
            output_hidden_states=True,
            use_cache=False,
        )
        scores = score(out.hidden_states[-1])
        if scores.shape[:2] != ids.shape:
            raise RewardError(
                f"the reward model's score returned {_shape(scores)}; expected [rows, tokens, 1] of"
                f" {len(ids)} rows and {ids.shape[1]} tokens"
            )
        return scores.reshape(*ids.shape, -1)[torch.arange(len(ids)), lengths - 1]

    return head


def _model_head(model: nn.Module) -> Head:
    """The logits of a whole model: per row, or those of the last real token."""
    masked = bool(_accepted(model, {"attention_mask": True}))
    named = bool(_accepted(model, {"input_ids": True}))

    def head(ids: Tensor, lengths: Tensor) -> Tensor:
        options: dict[str, Any] = {"attention_mask": _mask(ids, lengths)} if masked else {}
        out = model(input_ids=ids, **options) if named else model(ids, **options)
        logits = getattr(out, "logits", out)
        logits = logits[0] if isinstance(logits, tuple) else logits
        if not isinstance(logits, Tensor) or logits.shape[:1] != ids.shape[:1]:
            raise RewardError(
                f"reward model {type(model).__name__} returned {_shape(logits)} for {len(ids)}"
                " rows; expected logits [rows, labels], [rows] or [rows, tokens, 1]"
            )
        if logits.dim() == 1:
            return logits[:, None]
        if logits.dim() == 3:
            return logits[torch.arange(len(ids), device=ids.device), lengths - 1]
        return logits

    return head


def _mask(ids: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()


def _shape(x: object) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _accepted(module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(module.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in known}
