"""Loads models and tokenizers from a folder or the hub; incomplete weights are an error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from kedge.models.compatibility import text_config
from kedge.models.peft import without_notices
from kedge.records.errors import ConfigError, install_command

logger = logging.getLogger(__name__)
_WITHOUT_WEIGHTS: ContextVar[bool] = ContextVar("without_weights", default=False)
_REFUSED = {
    "device_map": "accelerate places the models; leave it out",
    "use_safetensors": "loading pickled weights can run arbitrary code; leave it out",
    "output_loading_info": "it changes the return value; leave it out",
}
_HEADS = {
    *("score", "classifier", "pre_classifier", "classification_head", "pooler", "v_head"),
    *("sequence_summary", "logits_proj"),
}


@contextmanager
def without_weights(active: bool) -> Iterator[None]:
    """Context that loads models on ``meta``: this rank gets the weights from rank 0."""
    token = _WITHOUT_WEIGHTS.set(active)
    try:
        yield
    finally:
        _WITHOUT_WEIGHTS.reset(token)


def check_source(source: str, what: str, kind: str = "model") -> None:
    """Reject a name that is neither a folder nor on the hub at once, not after retries.

    ``kind`` is "model" or "dataset", ``what`` names it in messages.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return
    shown = f"{what} {source!r} cannot be loaded: "
    if path.exists():
        raise ConfigError(f"{shown}it is a file")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:  # no name of the hub
        raise ConfigError(f"{shown}there is no such folder")
    cached = Path(constants.HF_HUB_CACHE, f"{kind}s--{source.replace('/', '--')}", "snapshots")
    if cached.is_dir() and constants.HF_HUB_OFFLINE:
        return
    if (problem := _hub_problem()) and not cached.is_dir():
        raise ConfigError(
            f"{shown}there is no folder {source} here, and the hub cannot be reached ({problem});"
            f" pass a folder with the {kind}, or set HF_ENDPOINT to a mirror"
        )
    if problem:
        _note_retries(problem)


@cache
def _hub_problem() -> str:
    """Why there is no connection to the hub, asked once; "" if there is one."""
    try:
        get_session().head(constants.ENDPOINT, timeout=2)
    except Exception as error:  # classes of requests, httpx or others, by version
        if any("Connect" in each.__name__ for each in type(error).__mro__):
            return str(error)
    return ""


@cache
def _note_retries(problem: str) -> None:
    logger.warning(
        "the hub cannot be reached (%s): transformers retries for minutes before it reads"
        " the cache; stop, and set HF_HUB_OFFLINE=1 to read the cache at once",
        problem,
    )


def load_policy(
    source: str | nn.Module,
    *,
    dtype: torch.dtype | str = torch.float32,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantization: Any = None,
    more: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model from a hub name or folder, or a loaded one unchanged.

    A folder that holds only an adapter is loaded on top of the base model that it names, with the
    adapter trainable.  ``dtype`` is that of the weights (trainable ones must be float32),
    ``quantization`` a transformers config for frozen bases; ``more`` goes to ``from_pretrained``.
    """
    if isinstance(source, nn.Module):
        return source  # type: ignore[return-value]
    check_source(source, "the model")
    options = {
        "dtype": dtype,
        "use_safetensors": True,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
        "attn_implementation": attn_implementation,
        "quantization_config": quantization,
    }
    options = {k: v for k, v in options.items() if v is not None} | dict(more or {})
    what = f"the model {source!r}"
    with _name_errors(what):
        if find_adapter_config_file(source, revision=revision) is not None:
            return _load_adapter(source, options)
    return load_whole(AutoModelForCausalLM, what, source, **options)


def check_init_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``model_init_kwargs``, with ``torch_dtype`` renamed to ``dtype``."""
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"model_init_kwargs sets {name}={kwargs[name]!r}: {reason}")
        kwargs.pop(name, None)
    if "torch_dtype" in kwargs:
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    return kwargs


def policy_loading(
    model: str | nn.Module,
    kwargs: Mapping[str, Any],
    *,
    quantization: Any,
    adapts: bool,
    bf16: bool,
) -> dict[str, Any]:
    """Arguments of ``load_policy`` for the policy and a reference by name.

    ``kwargs`` are those of ``from_pretrained``; ``adapts``: a new adapter trains, not the model.
    """
    options = dict(kwargs)
    if quantization is not None:
        options["quantization_config"] = quantization
    given = [name for name in options if name != "trust_remote_code"]
    if given and not isinstance(model, str):
        raise ConfigError(
            f"{', '.join(given)} cannot be set (model_init_kwargs, quantization_config): the model"
            " is already loaded; pass them when you load it"
        )
    if "quantization_config" in options and not adapts:
        raise ConfigError(
            "quantization_config freezes the weights; pass a peft_config to train an adapter"
        )
    if bf16 and adapts and isinstance(model, str):
        options.setdefault("dtype", "bfloat16")  # the base under the adapter is frozen
    return to_load_kwargs(options)


def to_load_kwargs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of ``from_pretrained`` to those of ``load_policy``."""
    names = {"dtype", "revision", "attn_implementation", "trust_remote_code"}
    arguments = {name: x for name, x in options.items() if name in names}
    arguments["quantization"] = options.get("quantization_config")
    rest = {n: x for n, x in options.items() if n not in names and n != "quantization_config"}
    return arguments | {"more": rest}


def find_tokenizer(processing_class: Any, model: Any, loading: Mapping[str, Any]) -> Any:
    """Find the tokenizer: given as object, name or folder, in a processor, or with the model.

    ``loading``: arguments of ``from_pretrained`` for the model.
    """
    if model is None or model == "" or not isinstance(model, str | nn.Module):
        raise ConfigError(f"model={model!r} must be the policy: a model, a folder or a hub name")
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    name = processing_class if isinstance(processing_class, str) else name
    if isinstance(name, str) and name and isinstance(processing_class, str | None):
        revision = None if processing_class else loading.get("revision")  # of the model
        trust = loading.get("trust_remote_code", False)
        return load_tokenizer(name, trust_remote_code=trust, revision=revision)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(
            f"processing_class={processing_class!r} must be a tokenizer, for example"
            " AutoTokenizer.from_pretrained(...)"
        )
    return tokenizer


def pick_tokenizer(processing_class: Any, tokenizer: Any) -> Any:
    """The given object (perhaps a processor), or for None or a name the loaded tokenizer."""
    return tokenizer if isinstance(processing_class, str | None) else processing_class


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """Load a tokenizer from a folder or the hub; pads on the left."""
    check_source(name, "the tokenizer")
    with _name_errors(f"the tokenizer {name!r}"):
        kwargs = {} if revision is None else {"revision": revision}
        return AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=trust_remote_code, **kwargs
        )


def tokenizer_beside(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model's folder or repository; None if the folder has none."""
    files, folder = ("tokenizer.*", "tokenizer_config.json", "vocab.*"), Path(name)
    if folder.is_dir() and not any(any(folder.glob(file)) for file in files):
        return None
    return load_tokenizer(name, trust_remote_code=trust_remote_code)


@contextmanager
def _name_errors(what: str) -> Iterator[None]:
    """Context that adds the name of the model or tokenizer to any error."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # readers of damaged files may raise anything
        raise ConfigError(f"{what} cannot be loaded: {error}") from error


def configuration_source(source: str, revision: str | None = None) -> tuple[str, str | None]:
    """Location and revision of a model's ``config.json``; for an adapter, of its base."""
    if find_adapter_config_file(source, revision=revision) is None:
        return source, revision
    from peft import PeftConfig

    return PeftConfig.from_pretrained(source, revision=revision).base_model_name_or_path, None


@contextmanager
def without_loading_report() -> Iterator[None]:
    """Context without transformers' table of weights, for loaders that check them themselves.

    In a log, without its bar, too.
    """
    theirs = logging.getLogger("transformers.modeling_utils")
    # leave the level: transformers reads it, and warns of layers that are not sharded
    theirs.addFilter(_is_error)
    hides = transformers_logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hides:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        theirs.removeFilter(_is_error)
        if hides:
            transformers_logging.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def load_whole(kind: Any, what: str, source: str, *, new_head: bool = False, **options: Any) -> Any:
    """``kind.from_pretrained``, rejecting files that lack weights, which would be random.

    ``kind`` is an auto class, ``what`` the name of the model in messages.  With ``new_head`` a
    classification head may be missing, as on a language model.
    """
    if _WITHOUT_WEIGHTS.get():
        options["device_map"] = "meta"
    with _name_errors(what), without_loading_report():
        model, loading_info = kind.from_pretrained(source, output_loading_info=True, **options)
    architectures = getattr(model.config, "architectures", None) or []
    scores = any("SequenceClassification" in name for name in architectures)
    heads = set() if scores or not new_head else _HEADS
    if getattr(model, "_hf_peft_config_loaded", False):
        from kedge.models.score_head import SHIFT, adapter_shift

        setattr(model.config, SHIFT, adapter_shift(source))
    missing = sorted(
        name for name in loading_info["missing_keys"] if not heads & set(name.split("."))
    )
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        if all(_HEADS & set(name.split(".")) for name in missing):
            raise ConfigError(
                f"{what} has no score head (its files are of {', '.join(architectures)}, without"
                f" {shown}); give a model that was trained to score, for example by `kedge reward`"
            )
        raise ConfigError(
            f"{what} lacks {len(missing)} of its weights ({shown}), which would start at random; "
            "its files are incomplete, or belong to another kind of model"
        )
    return model


def _load_adapter(source: str, options: dict[str, Any]) -> Any:
    if find_spec("peft") is None:
        raise ConfigError(f"{source!r} is an adapter, which needs peft: {install_command('peft')}")
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(source).base_model_name_or_path
    if not base:
        raise ConfigError(
            f"{source!r} is an adapter without base_model_name_or_path; load the base model, add "
            "the adapter (peft.PeftModel.from_pretrained(model, folder, is_trainable=True)), and "
            "pass the result as model"
        )
    check_source(base, f"the base model of the adapter {source!r},")
    options = options | {"revision": None}  # revisions belong to the adapter, not the base
    model = load_whole(AutoModelForCausalLM, f"the model {base!r}", base, **options)
    with without_notices():
        return PeftModel.from_pretrained(model, source, is_trainable=True)


def eos_token_ids(
    model: str | nn.Module,
    tokenizer: Any,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[int, ...]:
    """The tokenizer's EOS token and every ``eos_token_id`` of the model's generation_config.

    Chat models often name several: the end of the text and the end of a turn. Ids beyond the
    model's vocabulary, which it cannot sample, are left out. No weights are loaded.
    """
    if isinstance(model, str):
        config, generation = _configs(model, revision, trust_remote_code)
    else:
        config = getattr(model, "config", None)
        generation = getattr(model, "generation_config", None)
    ids = [tokenizer.eos_token_id, *as_list(getattr(generation, "eos_token_id", None))]
    size = getattr(text_config(config), "vocab_size", None) or float("inf")
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None and 0 <= i < size))


def as_list(eos_token_id: int | list[int] | None) -> list[int]:
    """Convert ``eos_token_id`` (None, an id or a list) to a list."""
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def _configs(source: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """Configuration and generation_config, as ``from_pretrained`` would give them to the model."""
    from transformers import AutoConfig, GenerationConfig

    try:
        source, revision = configuration_source(source, revision)
        options: dict[str, Any] = {} if revision is None else {"revision": revision}
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
        try:
            return config, GenerationConfig.from_pretrained(source, **options)
        except OSError:
            return config, GenerationConfig.from_model_config(config)
    except Exception:  # loading the model reports errors in its files
        return None, None
