"""The model card (README.md) of a trained model: setup, results, versions, citations."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from kedge import __version__

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
CITATIONS = {
    "PPO": (
        "@article{schulman2017proximal,\n"
        "  title   = {Proximal Policy Optimization Algorithms},\n"
        "  author  = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and "
        "Oleg Klimov},\n"
        "  journal = {arXiv preprint arXiv:1707.06347},\n"
        "  year    = {2017}\n}",
        "@article{huang2024implementation,\n"
        "  title   = {The N+ Implementation Details of RLHF with PPO: A Case Study on TL;DR "
        "Summarization},\n"
        "  author  = {Shengyi Huang and Michael Noukhovitch and Arian Hosseini and Kashif Rasul "
        "and Weixun Wang and Lewis Tunstall},\n"
        "  journal = {arXiv preprint arXiv:2403.17031},\n"
        "  year    = {2024}\n}",
    ),
    "RLOO": (
        "@article{ahmadian2024back,\n"
        "  title   = {Back to Basics: Revisiting REINFORCE Style Optimization for Learning from "
        "Human Feedback in LLMs},\n"
        "  author  = {Arash Ahmadian and Chris Cremer and Matthias Gall{\\'e} and Marzieh Fadaee "
        'and Julia Kreutzer and Olivier Pietquin and Ahmet {\\"U}st{\\"u}n and Sara Hooker},\n'
        "  journal = {arXiv preprint arXiv:2402.14740},\n"
        "  year    = {2024}\n}",
    ),
    "GRPO": (
        "@article{shao2024deepseekmath,\n"
        "  title   = {DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language "
        "Models},\n"
        "  author  = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and "
        "others},\n"
        "  journal = {arXiv preprint arXiv:2402.03300},\n"
        "  year    = {2024}\n}",
    ),
}
_PACKAGES = ("torch", "transformers", "datasets", "peft")


def model_card(
    *,
    model_name: str,
    algorithm: str = "PPO",
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    rewards: Sequence[str] = (),
    args: Any = None,
    log_history: Sequence[Mapping[str, Any]] = (),
    tags: Iterable[str] = (),
    command: str = "",
    links: Mapping[str, str] = MappingProxyType({}),
    curves: str | None = None,
) -> str:
    """The text of a model card.

    Args:
        model_name: its title.
        algorithm: "PPO", ...; selects the cited papers.
        base_model: name or folder of the initial model.
        datasets: names of the prompt datasets.
        rewards: names of the reward models and functions.
        args: the config; only the fields in ``HYPERPARAMETERS`` are shown.
        log_history: logged rows; the first and the last value of each main metric are shown.
        tags: additional tags.
        command: the command line that trained it.
        links: tracker -> URL of the run; the hub itself is left out.
        curves: image of the curves, in the folder of the card.
    """
    head = {
        "library_name": "transformers",
        "model_name": model_name,
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(["kedge", algorithm.lower(), "reinforcement-learning", *tags])),
        # Only names on the hub, not local folders.
        **({"base_model": base_model} if base_model and _on_hub(base_model) else {}),
        **({"datasets": named} if (named := [d for d in datasets if _on_hub(d)]) else {}),
    }
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    papers = "\n\n".join(f"```bibtex\n{paper}\n```" for paper in CITATIONS.get(algorithm, ()))
    seen = [f"[{name}]({url})" for name, url in links.items() if name != "hub"]
    sections = {
        "Results": _table(("metric", "start", "end"), _results(log_history)),
        "Curves": f"![curves of the run]({curves})" if curves else "",
        "Run": f"The run is on {', '.join(seen)}." if seen else "",
        "Command": f"```bash\n{command}\n```" if command else "",
        "Hyperparameters": _table(("name", "value"), _hyperparameters(args)),
        "Versions": _table(("package", "version"), versions()),
        "Citation": papers,
    }
    text = [f"---\n{front}---", f"# {model_name}"]
    text.append(_summary(algorithm, base_model, datasets, rewards))
    text += [f"## {title}\n\n{body}" for title, body in sections.items() if body]
    return "\n\n".join(text) + "\n"


def write_model_card(folder: str | Path, **kwargs: Any) -> Path:
    """Write ``model_card(**kwargs)`` to ``folder/README.md``."""
    file = Path(folder) / "README.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(model_card(**kwargs), encoding="utf-8")
    return file


def _summary(
    algorithm: str, base_model: str | None, datasets: Sequence[str], rewards: Sequence[str]
) -> str:
    start = f"`{base_model}`" if base_model else "a language model"
    text = f"Trained from {start} with {algorithm}, using Kedge."
    if datasets:
        text += f" Prompts: {_listed(datasets)}."
    if rewards:
        text += f" Reward: {_listed(rewards)}."
    return text


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _results(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    results = []
    for name, label in METRICS.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            results.append((label, f"{values[0]:.4g}", f"{values[-1]:.4g}"))
    return results


def _hyperparameters(args: Any) -> list[tuple[str, str]]:
    pairs = [(name, getattr(args, name, None)) for name in HYPERPARAMETERS]
    return [(name, f"`{getattr(x, 'value', x)}`") for name, x in pairs if x is not None]


def versions() -> list[tuple[str, str]]:
    """(name, version) of Kedge and its main dependencies."""
    packages = [("kedge", __version__)]
    for name in _PACKAGES:
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
