"""Whether models can read what they are given, and stand still when they must."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from kedge.errors import ConfigError, DataError, RolloutError
from kedge.types import Rollout


def vocabulary(model: nn.Module) -> int | None:
    """Token ids that the model's embedding holds, or None where that cannot be said."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def positions(model: Any) -> int | None:
    """The most tokens of a row that a model, or one of this configuration, is made for.

    None where it names no limit.
    """
    config: Any = getattr(model, "config", model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def check_vocabulary(models: Mapping[str, nn.Module], *, tokens: int) -> None:
    """Refuse models that do not know every token the policy means to write.

    Args:
        models: by the name that messages call them.
        tokens: ids of the policy's vocabulary are below it.

    Raises:
        ConfigError: naming the model, and what it lacks.
    """
    for name, model in models.items():
        rows = vocabulary(model)
        if rows is not None and rows < tokens:
            raise ConfigError(
                f"{name} ({type(model).__name__}) knows {rows} tokens and the policy writes "
                f"{tokens}: it reads the policy's token ids, so it must come from a model with "
                "the same tokenizer"
            )


def check_length(
    models: Mapping[str, Any], *, prompt: int, response: int, option: str = "response_length"
) -> None:
    """Refuse models that cannot hold the longest prompt and a response.

    Args:
        models: or their configurations, by the name that messages call them.
        prompt: tokens of the longest prompt.
        response: most tokens of a response.
        option: what the config calls ``response``.

    Raises:
        ConfigError: naming the model, what is needed, and the way out.
    """
    for name, model in models.items():
        most = positions(model)
        if most is not None and prompt + response > most:
            raise ConfigError(
                f"the longest prompt of {prompt} tokens and {option}={response} need "
                f"{prompt + response} positions; {name} ({type(model).__name__}) has {most}. "
                + _shorter(prompt, response, most, option)
            )


def _shorter(prompt: int, response: int, most: int, option: str) -> str:
    """Which lengths would fit."""
    ways = [f"{option}={most - prompt} or less"] if most > prompt else []
    if most - response >= prompt / 2:  # or hardly anything would be left of the prompts
        ways.append(f"max_prompt_length={most - response} or less")
    if ways:
        return f"Set {', or '.join(ways)}"
    return (
        f"Set max_prompt_length and {option} to at most {most} together, such as "
        f"max_prompt_length={most // 2} and {option}={most - most // 2}"
    )


def check_apart(trained: Mapping[str, nn.Module], still: Mapping[str, nn.Module]) -> None:
    """Refuse a model that must not change and holds weights of one that trains.

    Args:
        trained: models whose weights with ``requires_grad`` will change, by name.
        still: models that judge or anchor, by name.

    Raises:
        ConfigError: naming both.
    """
    owner = {id(p): name for name, m in trained.items() for p in m.parameters() if p.requires_grad}
    for name, model in still.items():
        shared = next((owner[id(p)] for p in model.parameters() if id(p) in owner), None)
        if shared is not None:
            raise ConfigError(
                f"{name} and {shared} share weights, so {name} would change while {shared} trains;"
                f" load {name} a second time, or pass copy.deepcopy of it"
            )


def check_rows(rollout: Rollout, models: Iterable[nn.Module]) -> None:
    """Refuse rows that the models cannot read.

    Raises:
        DataError: prompts without a token: no state precedes their first response token.
        RolloutError: a token beyond a model's vocabulary.
    """
    prompts = rollout.prompts
    empty = (~prompts.mask.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise DataError(f"the prompts of rows {empty} have no token; give each at least one")
    known = [(rows, type(m).__name__) for m in models if (rows := vocabulary(m)) is not None]
    for ids, real in ((prompts.ids, prompts.mask), (rollout.ids, rollout.response_mask)):
        if known:
            _check_ids(ids, real, *min(known))


def _check_ids(ids: Tensor, real: Tensor, rows: int, name: str) -> None:
    over = (ids >= rows) & real
    if bool(over.any()):
        row, slot = (int(i) for i in over.nonzero()[0])
        raise RolloutError(
            f"row {row} holds token {int(ids[row, slot])}, and {name} knows {rows} tokens; models "
            "that train together need one vocabulary: resize the smaller one "
            "(model.resize_token_embeddings), or take one with the same tokenizer"
        )
