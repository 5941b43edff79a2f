"""Self-description of a run: ``run.json``, for ``kedge report``, and the model card."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from kedge.records.errors import ConfigError, package_version
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


def write_run_info(origin: Mapping[str, Any], args: Any, *, device: str) -> None:
    """Write ``run.json`` into ``output_dir`` when training begins, without access tokens."""
    from kedge.config.declare import status  # `kedge report` needs no torch

    values = args.to_dict()
    acting = {f.name: f for f in fields(args) if isinstance(status(type(args), f.name), str)}
    options = {name: values[name] for name in acting if name in values}
    about = {
        **origin,
        "command": command(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "machine": f"{platform.system()}, Python {platform.python_version()}",
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": versions(),
        "changed": [n for n in getattr(args, "changed_options", ()) if n in options],
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


def model_card(
    about: Mapping[str, Any],
    *,
    model_name: str,
    args: Any = None,
    log_history: Sequence[Mapping[str, Any]] = (),
    tags: Iterable[str] = (),
    curves: str | None = None,
    hyperparameters: Iterable[str] = HYPERPARAMETERS,
    usage: str = "",
) -> str:
    """The text of a model card, titled ``model_name``.

    It shows how to load the model (``usage``), names with ``command`` and ``links`` of ``run.json``
    (``about``), ``hyperparameters`` of ``args``, the first and the last value of each main metric,
    and ``curves``, an image in the folder of the card.
    """
    from huggingface_hub import ModelCardData

    algorithm, base_model = about.get("algorithm", "PPO"), about.get("model")
    datasets, command = about.get("datasets", []), about.get("command")
    data = ModelCardData(
        library_name="transformers",
        model_name=model_name,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["kedge", algorithm.lower(), "reinforcement-learning", *tags])),
        # Hub names only, no local folders.
        base_model=base_model if base_model and _on_hub(base_model) else None,
        datasets=[name for name in datasets if _on_hub(name)] or None,
    )
    papers = files("kedge.reporting") / "papers" / f"{algorithm}.bib"
    citation = papers.read_text(encoding="utf-8") if papers.is_file() else ""
    links = about.get("links", {}).items()
    runs = ", ".join(f"[{name}]({url})" for name, url in links if name != "hub")
    results = [
        {"metric": label, "start": f"{values[0]:.4g}", "end": f"{values[-1]:.4g}"}
        for name, label in METRICS.items()
        if (values := [row[name] for row in log_history if row.get(name) is not None])
    ]
    options = [(name, getattr(args, name, None)) for name in hyperparameters]
    sections = {
        "Use": usage,
        "Results": markdown(results),
        "Curves": f"![curves of the run]({curves})" if curves else "",
        "Run": f"The run is on {runs}." if runs else "",
        "Command": f"```bash\n{command}\n```" if command else "",
        "Hyperparameters": markdown(
            [{"name": n, "value": getattr(x, "value", x)} for n, x in options if x is not None]
        ),
        "Versions": markdown([{"package": n, "version": v} for n, v in versions().items()]),
        "Citation": f"```bibtex\n{citation}```" if citation else "",
    }
    start = f"`{base_model}`" if base_model else "a language model"
    summary = f"Trained from {start} with {algorithm}, using Kedge."
    for title, names in (("Prompts", datasets), ("Reward", about.get("rewards"))):
        if names:
            summary += f" {title}: {', '.join(f'`{name}`' for name in names)}."
    text = [f"---\n{data.to_yaml()}\n---", f"# {model_name}", summary]
    text += [f"## {title}\n\n{body}" for title, body in sections.items() if body]
    return str(redact("\n\n".join(text) + "\n"))


def write_card(
    origin: Mapping[str, Any],
    args: Any,
    log_history: Sequence[dict[str, Any]],
    *,
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> None:
    """Write ``README.md`` into ``output_dir``, with facts from ``run.json`` there."""
    if not args.output_dir:
        raise ConfigError("output_dir must be set to write a model card")
    folder = Path(args.output_dir)
    about = read_run_info(folder) | dict(origin)
    text = model_card(
        about | ({"datasets": [dataset_name]} if dataset_name else {}),
        model_name=model_name or Path(args.hub_model_id or folder).name,
        args=args,
        log_history=log_history,
        curves="curves.png" if (folder / "curves.png").is_file() else None,
        tags=[tags] if isinstance(tags, str) else tags or (),
    )
    write_whole(folder / "README.md", text)


def reward_name(reward: Any) -> str:
    """The known name of a reward function or model."""
    if isinstance(reward, str):
        return reward
    name = getattr(getattr(reward, "config", None), "_name_or_path", "")
    return name or getattr(reward, "__name__", "") or type(reward).__name__


def versions() -> dict[str, str]:
    """Versions of Kedge and its main dependencies."""
    packages = {"kedge": package_version()}
    for name in ("torch", "transformers", "datasets", "peft"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return packages


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table; every cell is one line of plain text.  Without rows it is empty."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_cell(row[key]) for key in rows[0]] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(x: object) -> str:
    text = f"{x:.6g}" if isinstance(x, float) else str(x)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return escaped.replace("`", "&#96;").replace("\r", "").replace("\n", "<br>")


def _on_hub(name: str) -> bool:
    """Whether a name looks like a hub name rather than a folder."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not Path(name).exists()
