"""Loads reward models and reward functions by name."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedge.backends.hf.load import check_folder, configuration_source, load_whole
from kedge.errors import ConfigError

logger = logging.getLogger(__name__)


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``"package.module:function"`` or ``"file.py:function"`` names.

    Raises:
        ConfigError: no such module, file or function.
    """
    where, _, name = spec.rpartition(":")
    try:
        module = load_module(where, "kedge_rewards")
    except Exception as error:
        raise ConfigError(
            f"reward function {spec!r}: cannot import {where!r}"
            f" ({type(error).__name__}: {error}); pass package.module:function or file.py:function"
        ) from error
    function = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        defined = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"reward function {spec!r}: {where!r} has no function {name!r}; it has"
            f" {', '.join(defined) or 'none'}"
        )
    return function


def load_module(where: str, prefix: str) -> Any:
    """A module by its dotted name, or a Python file as the module ``prefix_stem``.

    Raises:
        ImportError, OSError, SyntaxError: from the import.
    """
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"file not found: {path}")
    name = f"{prefix}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that what it defines can be pickled
    spec.loader.exec_module(module)
    return module


def names_function(spec: str) -> bool:
    """Whether ``spec`` is ``module:function`` and not the name or path of a model."""
    where, colon, name = spec.rpartition(":")
    return (
        bool(colon)
        and all(part.isidentifier() for part in name.split("."))
        and (where.endswith(".py") or all(part.isidentifier() for part in where.split(".")))
    )


def load_model(name: str, *, trust_remote_code: bool = False) -> Any:
    """A sequence-classification model from a folder or the hub, in float32.

    A checkpoint without such a head gets a randomly initialized one with a single label, and a
    warning.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    check_folder(name, "reward model")
    try:
        base, _ = configuration_source(name)
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        architectures = getattr(config, "architectures", None) or []
        options: dict[str, Any] = {}
        if not any("SequenceClassification" in kind for kind in architectures):
            options = {"num_labels": 1}
            if base != name:
                _check_scores(name)
            else:
                logger.warning(
                    "reward model %s has no sequence-classification head (it is %s): adding a"
                    " randomly initialized one",
                    name,
                    ", ".join(architectures) or "of unknown type",
                )
        return load_whole(
            AutoModelForSequenceClassification,
            f"reward model {name!r}",
            name,
            new_head=True,
            dtype="float32",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **options,
        )
    except ConfigError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ConfigError(
            f"reward model {name!r} cannot be loaded: {error}; pass the folder or hub name of a"
            " sequence-classification model, or module:function for a Python function"
        ) from error


def _check_scores(adapter: str) -> None:
    from peft import PeftConfig

    if PeftConfig.from_pretrained(adapter).task_type != "SEQ_CLS":
        raise ConfigError(
            f"reward model {adapter!r} is an adapter without a score head; train it with task_type"
            " SEQ_CLS, as kedge reward --use_peft does"
        )


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model's folder or repository; None if the folder has none."""
    from transformers import AutoTokenizer

    files = (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    )
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).exists() for file in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ConfigError(
            f"the tokenizer of reward model {name!r} cannot be loaded: {error}"
        ) from error
