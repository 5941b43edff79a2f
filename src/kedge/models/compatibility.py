"""Compatibility checks: vocabulary, context length, weights shared with frozen models, saving."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import PreTrainedModel, modeling_utils

from kedge.records.errors import ConfigError, DataError, RolloutError
from kedge.records.types import Rollout


def vocabulary(model: nn.Module) -> int | None:
    """Number of token ids in the model's embedding; None if unknown."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def cache_argument(model: Any) -> str | None:
    """Name of the cache argument of `model.forward`; None without one."""
    accepted = inspect.signature(model.forward).parameters
    names = ("cache", "past_key_values")  # name since transformers 5.24, and before
    return next((name for name in names if name in accepted), None)


def text_config(model: Any) -> Any:
    """The text part of a model's configuration, or of a configuration."""
    config: Any = getattr(model, "config", model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def positions(model: Any) -> int | None:
    """Maximum tokens per row of a model or configuration; None if it states no limit."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenizers share vocabulary, EOS token and chat template."""
    names = ("eos_token_id", "chat_template")
    alike = all(getattr(one, name) == getattr(other, name) for name in names)
    return one is other or (alike and one.get_vocab() == other.get_vocab())


def check_vocabulary(models: Mapping[str, nn.Module], *, tokens: int) -> None:
    """Reject models (by name) whose vocabulary is smaller than the policy's ``tokens``."""
    for name, model in models.items():
        rows = vocabulary(model)
        if rows is not None and rows < tokens:
            raise ConfigError(
                f"{name} ({type(model).__name__}) has a vocabulary of {rows} tokens, the policy of "
                f"{tokens}; it reads the policy's token ids, so it must have the same tokenizer"
            )


def check_length(
    models: Mapping[str, Any], *, prompt: int, response: int, option: str = "response_length"
) -> None:
    """Reject models whose context is too short for the longest prompt and a response, in tokens.

    ``models`` are models, configurations or numbers of positions, by the name used in messages.
    ``option`` sets the length of a response.
    """
    for name, model in models.items():
        number = isinstance(model, int)
        limit = model if number else positions(model)
        kind = "" if number else f" ({type(model).__name__})"
        if limit is not None and prompt + response > limit:
            ways = [f"{option}={limit - prompt} or less"] if limit > prompt else []
            if limit - response >= prompt / 2:  # otherwise little of the prompts remains
                ways.append(f"max_prompt_length={limit - response} or less")
            if not ways:
                ways.append(
                    f"max_prompt_length and {option} to at most {limit} together, such as "
                    f"max_prompt_length={limit // 2} and {option}={limit - limit // 2}"
                )
            raise ConfigError(
                f"the longest prompt of {prompt} tokens and {option}={response} need "
                f"{prompt + response} positions; {name}{kind} has {limit}. Set {', or '.join(ways)}"
            )


def check_no_shared_weights(
    trained: Mapping[str, nn.Module], frozen: Mapping[str, nn.Module]
) -> None:
    """Reject ``frozen`` models (reward models, reference) that share weights that train."""
    owner = {id(p): name for name, m in trained.items() for p in m.parameters() if p.requires_grad}
    for name, model in frozen.items():
        shared = next((owner[id(p)] for p in model.parameters() if id(p) in owner), None)
        if shared is not None:
            raise ConfigError(
                f"{name} and {shared} share weights, so {name} would change while {shared} trains;"
                f" load {name} a second time, or pass copy.deepcopy of it"
            )


def check_saving(objects: Mapping[str, Any]) -> None:
    """Refuse a model or tokenizer (by name) that the first checkpoint could not write.

    Everything but weights is saved to a temporary folder.
    """
    for name, each in objects.items():
        parts: list[Any] = [each]
        if isinstance(each, nn.Module):
            generates = getattr(each, "can_generate", bool)()
            parts = [each.config, *([each.generation_config] if generates else [])]
        if hasattr(each, "peft_config"):  # the adapter is saved without its base
            parts = list(each.peft_config.values())
        for part in (part for part in parts if hasattr(part, "save_pretrained")):
            what = name if part is each else f"the {type(part).__name__} of {name}"
            with _name_refusal(what), TemporaryDirectory() as folder:
                part.save_pretrained(folder)
        separate = getattr(modeling_utils, "remove_tied_weights_from_state_dict", None)
        whole = isinstance(each, PreTrainedModel) and not hasattr(each, "hf_quantizer")
        if whole and separate is not None:
            with _name_refusal(name):  # weights that are shared and not declared as tied
                separate(dict(each.state_dict()), each)


@contextmanager
def _name_refusal(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or "(os error " in str(error):  # of the temporary folder
            return
        raise ConfigError(
            f"{what} cannot be saved, so the first checkpoint would fail:"
            f" {' '.join(str(error).split())}. Correct what this names before training"
        ) from error


def check_rows(rollout: Rollout, models: Iterable[nn.Module]) -> None:
    """Reject rows that the models cannot read: an empty prompt, a token outside a vocabulary."""
    prompts = rollout.prompts
    empty = (~prompts.mask.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise DataError(f"the prompts of rows {empty} are empty; each needs at least one token")
    known = [(rows, type(m).__name__) for m in models if (rows := vocabulary(m)) is not None]
    if not known:
        return
    size, name = min(known)
    for ids, real in ((prompts.ids, prompts.mask), (rollout.ids, rollout.response_mask)):
        over = ((ids >= size) & real).nonzero()
        if len(over):
            row, column = over[0].tolist()
            raise RolloutError(
                f"row {row} holds token {int(ids[row, column])}, but {name} has a vocabulary of"
                f" {size} tokens; models that train together need the same vocabulary: resize the"
                " smaller one (model.resize_token_embeddings), or use one with the same tokenizer"
            )
