"""``BestOfNSampler`` and ``setup_chat_format`` of TRL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.classic.core import set_seed
from kedge.classic.models.wrapper import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from kedge.errors import ConfigError

SUPPORTED_ARCHITECTURES = (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead)
_START, _END = "<|im_start|>", "<|im_end|>"
_CHATML = (
    f"{{% for message in messages %}}{{{{'{_START}' + message['role'] + '\n' + message['content']"
    f" + '{_END}' + '\n'}}}}{{% endfor %}}{{% if add_generation_prompt %}}"
    f"{{{{ '{_START}assistant\n' }}}}{{% endif %}}"
)

SIMPLE_CHAT_TEMPLATE = (  # from trl.trainer.utils, for models without a template
    "{% for message in messages %}{{message['role'].capitalize() + ': ' + message['content']"
    " + '\n\n'}}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class BestOfNSampler:
    """Samples several responses to each query and returns those with the best scores.

    Args:
        model: a model of ``kedge.classic``.
        tokenizer: of the model.
        queries_to_scores: gives one number per generated text.
        length_sampler: draws ``max_new_tokens``, once per query.
        sample_size: responses to sample per query.
        seed: seed of sampling; None: use the global random state.
        n_candidates: responses to return per query.
        generation_config: passed to ``generate``.

    Raises:
        ConfigError: an unsupported model, or more candidates than samples.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        queries_to_scores: Callable[[list[str]], Sequence[float]],
        length_sampler: Callable[[], int],
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: Any = None,
    ) -> None:
        if not isinstance(model, SUPPORTED_ARCHITECTURES):
            kinds = " or ".join(kind.__name__ for kind in SUPPORTED_ARCHITECTURES)
            raise ConfigError(f"model must be an {kinds}, got {type(model).__name__}")
        if not 1 <= n_candidates <= sample_size:
            raise ConfigError(f"n_candidates={n_candidates} must be 1 to sample_size={sample_size}")
        if seed is not None:
            set_seed(seed)
        self.model, self.tokenizer = model, tokenizer
        self.queries_to_scores, self.length_sampler = queries_to_scores, length_sampler
        self.sample_size, self.n_candidates = sample_size, n_candidates
        self.gen_config = generation_config

    @torch.no_grad()
    def generate(
        self,
        tokenized_query: Sequence[int] | Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
        skip_special_tokens: bool = True,
        device: torch.device | str | None = None,
        **generation_kwargs: Any,
    ) -> list[list[str]]:
        """The ``n_candidates`` best texts (query and response) per query, best first.

        Args:
            tokenized_query: one query of token ids [P], or a list of them.
            skip_special_tokens: whether texts leave special tokens out.
            device: device of the inputs; None: the model's.
            **generation_kwargs: passed to ``generate``.
        """
        single = isinstance(tokenized_query[0], int) or torch.as_tensor(tokenized_query[0]).ndim < 1
        best = []
        for query in [tokenized_query] if single else tokenized_query:
            ids = torch.as_tensor(query).reshape(1, -1).repeat(self.sample_size, 1)
            ids = ids.to(device or next(self.model.parameters()).device)
            rows = self.model.generate(
                ids,
                max_new_tokens=self.length_sampler(),
                generation_config=self.gen_config,
                **generation_kwargs | {"attention_mask": torch.ones_like(ids)},
            )
            texts = self.tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens)
            scores = torch.as_tensor(self.queries_to_scores(texts), dtype=torch.float32)
            best.append([texts[i] for i in scores.topk(self.n_candidates).indices])
        return best


def setup_chat_format(
    model: Any, tokenizer: Any, format: str = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Give a model and its tokenizer the ChatML format: special tokens, template, embeddings.

    Args:
        model: a transformers model, changed in place.
        tokenizer: its tokenizer, changed in place.
        format: "chatml".
        resize_to_multiple_of: round the size of the embeddings up to a multiple of this.

    Raises:
        ConfigError: an unknown format.
    """
    if format != "chatml":
        raise ConfigError(f'format={format!r} must be "chatml"')
    tokenizer.add_special_tokens({"bos_token": _START, "eos_token": _END, "pad_token": _END})
    tokenizer.chat_template = _CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer
