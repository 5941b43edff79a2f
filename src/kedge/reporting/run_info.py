"""What a run tells of itself: ``run.json``, for ``kedge report``, and the model card."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kedge import __version__
from kedge.errors import ConfigError
from kedge.redaction import redact, redact_words
from kedge.reporting.base import write_whole

FILE = "run.json"
HYPERPARAMETERS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "max_grad_norm", "seed"),
    *("total_episodes", "max_steps", "num_train_epochs", "batch_size", "num_mini_batches"),
    *("num_ppo_epochs", "num_generations", "response_length", "temperature", "top_k", "top_p"),
    *("min_p", "kl_coef", "kl_estimator", "adaptive_kl", "kl_target", "gamma", "lam", "cliprange"),
    *("cliprange_value", "vf_coef", "whiten_rewards", "whiten_advantages", "score_position"),
    *("normalize_reward", "reward_clip_range", "normalize_advantage", "token_level_kl"),
    *("epsilon", "epsilon_high", "delta", "beta", "loss_type", "scale_rewards"),
    *("importance_sampling_level", "mask_truncated_completions"),
    *("missing_eos_penalty", "non_eos_penalty", "penalty_reward_value", "bf16", "fp16"),
)
METRICS = {
    "objective/scores": "score",
    "objective/rlhf_reward": "score with KL penalty",
    "objective/kl": "KL to the reference (nats per response)",
    "objective/entropy": "entropy (nats per response)",
    "completions/mean_length": "response length (tokens)",
    "eval_objective/scores": "evaluation score",
    "eval_objective/kl": "evaluation KL (nats per response)",
}


def write_run_info(made_of: Provenance, args: Any, *, device: str) -> None:
    """Write ``run.json`` into ``output_dir`` when training begins.

    Args:
        made_of: algorithm, model, data, rewards.
        args: the config; access tokens are not written.
        device: the training device.
    """
    from kedge.config.declare import status  # imports torch, which `kedge report` can wait for

    values = args.to_dict()
    options = {
        f.name: values[f.name]
        for f in fields(args)
        if f.name in values and isinstance(status(type(args), f.name), str)
    }
    about = {
        "algorithm": made_of.algorithm,
        "model": made_of.base_model,
        "datasets": list(made_of.datasets),
        "rewards": list(made_of.rewards),
        "command": command(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "machine": f"{platform.system()}, Python {platform.python_version()}",
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": dict(versions()),
        "changed": [name for name in options if name in args.given],
        "options": options,
    }
    _write(args.output_dir, about)


def add_links(output_dir: str | Path, links: Mapping[str, str]) -> None:
    """Add links to ``run.json``: tracker or hub -> URL."""
    about = read_run_info(output_dir)
    if about:
        _write(output_dir, about | {"links": dict(links)})


def read_run_info(output_dir: str | Path | None) -> dict[str, Any]:
    """The content of ``run.json``; empty if it is missing or cannot be read."""
    file = Path(output_dir or ".") / FILE
    if not output_dir or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=str)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(output_dir: str | Path, about: Mapping[str, Any]) -> None:
    text = json.dumps(redact(about), indent=1, default=str)
    write_whole(Path(output_dir) / FILE, text + "\n")


def command() -> str:
    """The command line of this process, without the values of secrets."""
    words = redact_words(sys.argv)
    return shlex.join([Path(words[0]).name, *words[1:]]) if words and words[0] else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Algorithm, base model and data of a run, for the model card."""

    algorithm: str = "PPO"  # selects the cited papers
    base_model: str | None = None  # name or folder of the initial model
    datasets: tuple[str, ...] = ()  # of prompts
    rewards: tuple[str, ...] = ()  # names of reward models and functions


def provenance(algorithm: str, policy: Any, dataset: Any, rewards: Sequence[Any]) -> Provenance:
    """The names of a run's models and data, as far as they are known."""
    named = getattr(getattr(dataset, "info", None), "dataset_name", None)
    return Provenance(
        algorithm=algorithm,
        base_model=getattr(getattr(policy, "config", None), "_name_or_path", "") or None,
        datasets=(named,) if named else (),
        rewards=tuple(map(_reward_name, rewards)),
    )


def model_card(
    made_of: Provenance,
    *,
    model_name: str,
    args: Any = None,
    log_history: Sequence[Mapping[str, Any]] = (),
    tags: Iterable[str] = (),
    command: str = "",
    links: Mapping[str, str] = MappingProxyType({}),
    curves: str | None = None,
) -> str:
    """The text of a model card.

    Args:
        made_of: algorithm, base model and data.
        model_name: its title.
        args: the config; only the fields in ``HYPERPARAMETERS`` are shown.
        log_history: logged rows; the first and the last value of each main metric are shown.
        tags: additional tags.
        command: the command line that trained it.
        links: tracker -> URL of the run; the hub itself is left out.
        curves: image of the curves, in the folder of the card.
    """
    from huggingface_hub import ModelCardData

    algorithm, base_model, datasets = made_of.algorithm, made_of.base_model, made_of.datasets
    data = ModelCardData(
        library_name="transformers",
        model_name=model_name,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["kedge", algorithm.lower(), "reinforcement-learning", *tags])),
        # Only names on the hub, not local folders.
        base_model=base_model if base_model and _on_hub(base_model) else None,
        datasets=[name for name in datasets if _on_hub(name)] or None,
    )
    papers = files("kedge.reporting") / "assets" / f"{algorithm}.bib"
    citation = papers.read_text(encoding="utf-8") if papers.is_file() else ""
    runs = ", ".join(f"[{name}]({url})" for name, url in links.items() if name != "hub")
    results = [
        (label, f"{values[0]:.4g}", f"{values[-1]:.4g}")
        for name, label in METRICS.items()
        if (values := [row[name] for row in log_history if row.get(name) is not None])
    ]
    options = [(name, getattr(args, name, None)) for name in HYPERPARAMETERS]
    hyperparameters = [(n, f"`{getattr(x, 'value', x)}`") for n, x in options if x is not None]
    sections = {
        "Results": _table(("metric", "start", "end"), results),
        "Curves": f"![curves of the run]({curves})" if curves else "",
        "Run": f"The run is on {runs}." if runs else "",
        "Command": f"```bash\n{command}\n```" if command else "",
        "Hyperparameters": _table(("name", "value"), hyperparameters),
        "Versions": _table(("package", "version"), versions()),
        "Citation": f"```bibtex\n{citation}```" if citation else "",
    }
    start = f"`{base_model}`" if base_model else "a language model"
    summary = f"Trained from {start} with {algorithm}, using Kedge."
    for title, names in (("Prompts", datasets), ("Reward", made_of.rewards)):
        if names:
            summary += f" {title}: {', '.join(f'`{name}`' for name in names)}."
    text = [f"---\n{data.to_yaml()}\n---", f"# {model_name}", summary]
    text += [f"## {title}\n\n{body}" for title, body in sections.items() if body]
    return str(redact("\n\n".join(text) + "\n"))


def write_card(
    made_of: Provenance,
    args: Any,
    log_history: Sequence[dict[str, Any]],
    *,
    about: Mapping[str, Any],
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> None:
    """Write ``README.md`` into ``output_dir``; ``about`` is the content of ``run.json``."""
    if not args.output_dir:
        raise ConfigError("output_dir must be set to write a model card")
    folder = Path(args.output_dir)
    text = model_card(
        replace(made_of, datasets=(dataset_name,)) if dataset_name else made_of,
        model_name=model_name or Path(args.hub_model_id or folder).name,
        args=args,
        log_history=log_history,
        command=about.get("command", ""),
        links=about.get("links", {}),
        curves="curves.png" if (folder / "curves.png").is_file() else None,
        tags=[tags] if isinstance(tags, str) else tags or (),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _reward_name(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    name = getattr(getattr(reward, "config", None), "_name_or_path", "")
    return name or getattr(reward, "__name__", "") or type(reward).__name__


def versions() -> list[tuple[str, str]]:
    """(name, version) of Kedge and its main dependencies."""
    packages = [("kedge", __version__)]
    for name in ("torch", "transformers", "datasets", "peft"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages.append((name, metadata.version(name)))
    return packages


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in lines)


def _on_hub(name: str) -> bool:
    """Whether a name looks like a hub name and not like a folder."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not Path(name).exists()
