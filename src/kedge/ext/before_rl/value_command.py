"""``kedge value``: trains a value model on recorded rollouts, and checks it before PPO uses it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.cli.flags import Flags
from kedge.config.rollout_engines import installed
from kedge.output import check_model_folder, check_picture, share_weights
from kedge.records.errors import ConfigError, install_command

EPILOG = """\
ROLLOUTS are folders written by --save_rollouts, or .jsonl files of any library with prompt,
completion and score.  fit writes a value model for `kedge ppo --value_model_path`, and checks it on
the responses that it held out.
example: kedge ppo ... --save_rollouts runs/a/rollouts
         kedge value fit runs/a/rollouts --model runs/sft --output_dir runs/critic
         kedge value check runs/b/rollouts --value_model runs/critic --plot critic.png"""
FEWEST = 100  # tokens in a tenth of the responses, below which its explained variance is noise
_BLUE, _RED = "#3b6ea5", "#b5483a"


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = Flags("kedge value", "Train and check a value model on recorded rollouts.", EPILOG)
    add = parser.add_argument
    add("action", choices=("fit", "check"), help="train a value model, or check one")
    add("rollouts", nargs="+", help="folders of save_rollouts, or .jsonl files")
    add("--model", help="policy that fit starts from; in check, the policy under a value head")
    add("--value_model", help="folder of the value model to check, or to train further with fit")
    add("--tokenizer", help="folder or hub name of the tokenizer (default: the model's)")
    add("--output_dir", help="folder to which fit writes the value model")
    add("--epochs", type=int, default=2, help="number of passes over the responses")
    add("--batch_size", type=int, default=32, help="number of responses per optimizer step")
    add("--learning_rate", type=float, default=1e-5, help="learning rate of fit; it decays to 0")
    add("--freeze_attention", action="store_true", help="do not train the attention layers")
    add("--held_out", type=float, default=0.2, help="share of prompts held out to check the fit")
    add("--gamma", type=float, default=1.0, help="discount factor, as in PPO")
    add("--credit", choices=("token", "turn"), default="token", help="what an action is, as in PPO")
    add("--scale_rewards", action="store_true", help="divide scores by their standard deviation")
    add("--plot", help=".png or .svg file for a picture of the check")
    add("--seed", type=int, default=0, help="seed for fit's split and order (default: 0)")
    flags = parser.parse_args(list(argv))
    fits = flags.action == "fit"
    if fits and not ((flags.value_model or flags.model) and flags.output_dir):
        raise ConfigError("kedge value fit needs --model (or --value_model) and --output_dir")
    if not fits and not flags.value_model:
        raise ConfigError("kedge value check needs --value_model, a folder that fit or ppo wrote")
    limits = {"held_out": (0.01, 0.99), "gamma": (0, 1), "learning_rate": (0, 1)}
    for name, (low, high) in (limits | dict.fromkeys(("epochs", "batch_size"), (1, 10**9))).items():
        if not low <= getattr(flags, name) <= high:
            raise ConfigError(f"--{name}={getattr(flags, name)} must be from {low} to {high:g}")
    if flags.output_dir:
        check_model_folder("--output_dir", flags.output_dir, scalar=True)
    if flags.plot:
        check_picture("--plot", flags.plot)
        if not installed("matplotlib"):
            raise ConfigError(f"--plot needs matplotlib: {install_command('plots')}")
    return flags


def main(argv: Sequence[str]) -> None:
    """Train a value model on recorded rollouts, and check it before PPO relies on it."""
    flags = read_flags(argv)
    from kedge.ext.before_rl.value import check_value, fit_value, read_episodes, split_prompts
    from kedge.models.compatibility import check_rows, positions
    from kedge.models.load import load_tokenizer

    start, say = flags.value_model or flags.model, sys.stdout.write
    homes = (start, Path(start).parent)  # ppo writes the tokenizer next to value_model/
    own = [str(x) for x in homes if Path(x, "tokenizer_config.json").is_file()]
    tokenizer = load_tokenizer(flags.tokenizer or [*own, start][0])
    if not len(tokenizer):
        raise ConfigError(f"{start!r} has no tokenizer; give that of the policy with --tokenizer")
    model = _load(flags)
    how = {n: getattr(flags, n) for n in ("gamma", "credit", "scale_rewards")}
    episodes = read_episodes(flags.rollouts, tokenizer, longest=positions(model.model), **how)
    check_rows(episodes.rollout, [model.model])
    index, folder = list(range(len(episodes))), Path(start)
    if flags.action == "fit":
        train, index = split_prompts(episodes, flags.held_out, flags.seed)
        say(f"kedge: {len(train)} responses to train on, {len(index)} held out\n")
        before = _number(check_value(model, episodes, index)["explained_variance"])
        how = {n: getattr(flags, n) for n in ("epochs", "batch_size", "learning_rate", "seed")}
        steps = flags.epochs * -(-len(train) // flags.batch_size)
        for number, loss in enumerate(fit_value(model, episodes, train, **how), 1):
            if number % max(1, steps // 10) == 0:
                say(f"step {number}/{steps}  value loss {loss:.4g}\n")
        folder = Path(flags.output_dir)
        model.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        share_weights(folder)
        say(f"kedge: the value model is in {folder}; explained variance before {before}\n")
    check = check_value(model, episodes, index)
    say("\n".join(describe(check)) + "\n")
    if folder.is_dir():
        (folder / "value_check.json").write_text(json.dumps(check, indent=1), encoding="utf-8")
    if flags.plot:
        plot(check, flags.plot)
        say(f"kedge: {flags.plot} shows it\n")


def _load(flags: argparse.Namespace) -> Any:
    import torch

    from kedge.models import value_head
    from kedge.models.freezing import freeze_attention
    from kedge.models.load import load_policy
    from kedge.models.model import causal_parts, no_dropout

    folder = flags.value_model
    files = (value_head.HEAD_FILE, "adapter_config.json")
    if flags.action == "fit" and folder and any(Path(folder, name).is_file() for name in files):
        raise ConfigError(
            f"--value_model={folder} is a head or an adapter, but fit trains whole models; start"
            " from the policy with --model"
        )
    if flags.action == "check" and folder and Path(folder, value_head.HEAD_FILE).is_file():
        policy: Any = load_policy(flags.model or str(Path(folder).parent)).float()
        parts = causal_parts(policy)
        policy.value_head = value_head.load_value_head(folder, parts)  # of the policy next to it
        model = value_head.ScalarModel(policy, parts.backbone, policy.value_head)
    elif folder:
        model = value_head.load_value(folder)
    else:
        policy = load_policy(flags.model)
        if hasattr(policy, "peft_config"):
            policy = policy.merge_and_unload()
        model = value_head.copy_as_value(policy, causal_parts(policy))
    if flags.freeze_attention:
        freeze_attention(model.backbone, what="the value model")
    no_dropout(model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def describe(measures: dict[str, Any]) -> list[str]:
    """The check as lines of a table, with a verdict."""
    explained, turns = measures["explained_variance"], measures["by_turn"]
    rows = [("", "explained", "tokens"), ("all tokens", _number(explained), measures["tokens"])]
    for i, (share, tokens) in enumerate(measures["by_position"]):
        shown = _number(share if tokens >= FEWEST else None)
        rows.append((f"{10 * i} to {10 * (i + 1)}% of the response", shown, tokens))
    rows += [(f"turn {i}", _number(x), n) for i, (x, n) in enumerate(turns, 1) if len(turns) > 1]
    rows.append(("baseline: mean return", "0", ""))
    rows.append(("baseline: response length", _number(measures["by_length"]), ""))
    lines = [f"{name:<28}{share:>12}{tokens:>10}" for name, share, tokens in rows]
    lines += [
        f"{kind} responses: mean error of V: {measures[f'{kind}_bias']:+.3f}"
        for kind in ("truncated", "terminated")
        if measures[f"{kind}_bias"] is not None
    ]
    if explained is None:
        lines.append("all returns are equal: there is nothing to learn from these responses")
    elif explained <= 0:
        lines.append("the critic is worse than the mean return: advantages from it would be noise")
    return lines


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"


def plot(check: dict[str, Any], file: str) -> None:
    """Explained variance by position and turn, and calibration, as a picture."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [("by_position", "tenth of the response"), ("by_turn", "turn")]
    panels = panels[: 1 + (len(check["by_turn"]) > 1)]
    figure = Figure(figsize=(4 + 4 * len(panels), 3.8), layout="constrained")
    over = f"{check['tokens']:,} tokens of {check['responses']:,} responses"
    figure.suptitle(f"explained variance {_number(check['explained_variance'])} over {over}")
    known = [share for name, _ in panels for share, _ in check[name] if share is not None]
    low = max(-1.0, min([-0.1, *known]))
    *axes_by, calibration = figure.subplots(1, 1 + len(panels))
    for axes, (name, label) in zip(axes_by, panels, strict=True):
        for i, (share, _) in enumerate(check[name], 1):
            if share is not None:
                axes.bar(i, max(share, low), color=_BLUE if share > 0 else _RED)
            if share is not None and share < low:  # clip the bar at the edge
                axes.text(i, low, f" {share:.2g}", ha="center", va="bottom", c="white", rotation=90)
        axes.axhline(0, color="black", linewidth=0.8, label="mean return (0)")
        if check["by_length"] is not None:
            axes.axhline(check["by_length"], color="gray", ls=":", label="length, known afterwards")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=label, ylabel="explained variance", ylim=(low, 1))
        axes.set_xlim(0.4, len(check[name]) + 0.6)
        axes.legend(frameon=False, fontsize="small")
    means = [(v, g) for v, g, _ in check["calibration"]]
    calibration.plot([v for v, _ in means], [g for _, g in means], "o-", color=_BLUE)
    ends = [pick(x for pair in means for x in pair) for pick in (min, max)]
    calibration.plot(ends, ends, color="gray", ls=":", label="right on average")
    calibration.set(xlabel="predicted value, tenths of the tokens", ylabel="mean return")
    calibration.legend(frameon=False, fontsize="small")
    figure.savefig(file, dpi=130)
