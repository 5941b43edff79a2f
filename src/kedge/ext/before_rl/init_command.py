"""``kedge init``: writes a commented configuration for a task and a model size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kedge.cli.flags import Flags
from kedge.records.errors import ConfigError

EPILOG = """\
tasks:
  preference     PPO against a reward model that was trained on preferences
  verifier       GRPO, or --algorithm ppo, on answers that can be checked, such as mathematics
  environment    PPO on multi-turn episodes; also writes an example environment
Set the names of models, data and reward in the file, then run the commands at its top.
example: kedge init verifier --model_size 1b --output run.yaml"""
LAUNCH = "accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml"


Recipe = Mapping[str, Any]  # an entry of recipes.yaml

_DATA = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8"))
SIZES: tuple[str, ...] = tuple(_DATA["sizes"])
SOURCES: Mapping[str, str] = _DATA["sources"]
RECIPES: Mapping[tuple[str, str], Recipe] = {
    (r["task"], r["algorithm"]): r for r in _DATA["recipes"]
}


def main(argv: Sequence[str]) -> None:
    """Write a commented configuration for a task and a model size."""
    flags = Flags("kedge init", "Write a commented configuration.", EPILOG)
    tasks = tuple(dict.fromkeys(task for task, _ in RECIPES))
    add = flags.add_argument
    add("task", choices=tasks, help="kind of task to train on")
    add("--algorithm", choices=("ppo", "grpo"), help="algorithm (default: depends on the task)")
    add("--model_size", choices=SIZES, default="0.5b", help="size of the model; 135m is for a CPU")
    add("--num_processes", type=int, default=1, help="number of GPUs to train on")
    add("--output", help="file to write (default: TASK.yaml)")
    add("--force", action="store_true", help="overwrite existing files")
    chosen = flags.parse_args(list(argv))
    file = Path(chosen.output or f"{chosen.task}.yaml")
    offered = [algorithm for task, algorithm in RECIPES if task == chosen.task]
    if chosen.algorithm not in (None, *offered):
        raise ConfigError(
            f"kedge init {chosen.task} --algorithm {chosen.algorithm} must be"
            f" {' or '.join(offered)}"
        )
    recipe = RECIPES[chosen.task, chosen.algorithm or offered[0]]
    files = {file: render(recipe, chosen.model_size, chosen.num_processes, file)}
    for suffix, text in recipe.get("files", {}).items():
        files[file.with_suffix(suffix)] = text.replace("CONFIG", file.name)
    for path in files:
        if path.exists() and not chosen.force:
            raise ConfigError(f"{path} exists; choose another --output, or overwrite with --force")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"kedge: wrote {' and '.join(map(str, files))}; set the names in it, then run")
    print("\n".join(f"    {command}" for command in commands(recipe, chosen.num_processes, file)))


def settings(recipe: Recipe, size: str) -> dict[str, dict[str, tuple[Any, str]]]:
    """Value and comment of each option, by section, for a model size, one of ``SIZES``."""
    at = SIZES.index(size)
    return {
        title: {
            name: (v[at] if isinstance(v, list) else v, text) for name, (v, text) in rows.items()
        }
        for title, rows in recipe["sections"].items()
    }


def render(recipe: Recipe, size: str, processes: int, file: Path) -> str:
    """The YAML: one option per line, with the source of its value."""
    small, batch = size == SIZES[0], recipe["batches"][SIZES.index(size)]
    sections: dict[str, dict[str, tuple[Any, str]]] = {}
    for title, rows in settings(recipe, size).items():
        sections[title] = {}
        for name, (value, text) in rows.items():
            large, _, own = text.partition(f"; {SIZES[0].upper()}: ")
            sections[title][name] = value, own if small and own else large
    if small and _slow_bf16():
        del sections["Memory"]["bf16"]  # several times slower on a CPU; a GPU has it by default
    comments = " ".join(text for rows in sections.values() for _, text in rows.values())
    head = [f"{recipe['title']}, {size} weights", *commands(recipe, processes, file)]
    head += [f"{name}: {text}" for name, text in SOURCES.items() if name in comments]
    lines = [f"# {line}" for line in head]
    for title, rows in sections.items():
        lines += ["", f"# {title}"]
        for name, (given, comment) in rows.items():
            value = given
            if name == "gradient_accumulation_steps":
                each = rows["per_device_train_batch_size"][0]
                if processes < 1 or batch % (each * processes):
                    raise ConfigError(
                        f"--num_processes must divide {batch // each} ({batch} responses per"
                        f" iteration, {each} at a time on each process), got {processes}"
                    )
                value = batch // (each * processes)
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            if isinstance(value, float) and 0 < value < 1e-3:  # YAML reads 1e-6 as a string
                shown = f"{value:.1e}".replace("e-0", "e-")
            text = f"{name}: {shown.replace('STEM', str(file.with_suffix('')))}"
            lines.append(f"{text:<40}  # {comment}" if comment else text)
    return "\n".join(lines) + "\n"


def _slow_bf16() -> str:
    from kedge.ops.products import backend  # imports torch

    return backend().slow_bf16


def commands(recipe: Recipe, processes: int, file: Path) -> list[str]:
    """Commands that check and start the run."""
    plan = f"kedge plan {recipe['command']} --config {file}"
    start = f"kedge {recipe['command']} --config {file}"
    if processes == 1:
        return [plan, start]
    several = f"--num_processes {processes}"
    return [f"{plan} {several}", f"{LAUNCH} {several} -m {start}"]
