"""``kedge plan``: batch sizes and estimated memory of a run, without loading weights."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from kedge.cli.arguments import Options, parse, parser
from kedge.cli.data import load_prompts
from kedge.cli.flags import Flags
from kedge.cli.planning.memory import (
    Estimate,
    ModelMemory,
    peaks,
    process_bytes,
    read_config,
)
from kedge.cli.planning.sharding import verdict
from kedge.cli.planning.sizes import human, short, size_rows, sync_rows
from kedge.cli.train.async_data import load_mixed
from kedge.cli.train.async_ppo import load_chat_tokenizer, parse_options
from kedge.cli.train.ppo import load_algorithm, load_tokenizer, model_names
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import elsewhere
from kedge.config.sampling import build_sampling
from kedge.errors import ConfigError
from kedge.loop.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.models.compatibility import check_length
from kedge.models.end_tokens import eos_token_ids
from kedge.rewards.build import load_function
from kedge.rewards.function import Signature, function_name
from kedge.trainers import TRAINERS, find_trainer, load_trainer
from kedge.trainers.assembly.setup import build_prompts
from kedge.trainers.run.files import check_targets
from kedge.trainers.spec import shared_kwargs

USAGE = f"""\
usage: kedge plan {"|".join(TRAINERS)} [--num_processes N] [--measure] [flags of that command]

Show batch sizes and estimated memory of a run, and check its flags, without loading weights.

  --num_processes N   ranks that train; by default those of this launch
  --measure           also load the models, train on one micro-batch with responses of full
                      length, and print the peak of this process's memory

`kedge plan ppo --help` lists the flags of `kedge ppo`.
example: kedge plan ppo --model_name_or_path MODEL --dataset_name prompts.jsonl \\
             --reward_funcs rewards.py:length --output_dir runs/a"""
PROMPT_GUESS = 512  # tokens, where there is no dataset to look at


def main(argv: Sequence[str]) -> None:
    """``kedge plan ppo [flags]``, or of another command that trains."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    name, *rest = argv
    if name not in TRAINERS:
        raise ConfigError(f"kedge plan {name} must be one of {', '.join(TRAINERS)}")
    prog, config = f"kedge plan {name}", load_trainer(name).SPEC.command_config
    if parser(prog, config).show_help(rest):
        return
    own = Flags(prog, add_help=False, allow_abbrev=False)
    own.add_argument("--num_processes", "--num-processes", type=int)
    own.add_argument("--measure", action="store_true")
    flags, rest = own.parse_known_args(rest)
    if flags.measure and name == "async-ppo":
        raise ConfigError("kedge plan async-ppo cannot --measure: its processes start on a cluster")
    processes: int | None = flags.num_processes
    if processes is not None and processes < 1:
        raise ConfigError(f"--num_processes {processes} must be at least 1")
    with elsewhere() if config is AsyncPPOConfig else nullcontext():
        if config is AsyncPPOConfig:
            options = parse_options(rest, prog=prog)
            assert isinstance(options.config, AsyncPPOConfig)
            processes = processes or sum(options.config.actor_num_gpus_per_node or [1])
        else:
            options = parse(rest, prog=prog, config=config)
        batches, facts, models = plan(options, processes)
    show(options, batches, facts, models)
    if flags.measure:
        peak = measure(name, rest, options.config, batches)
        kind = "allocated on the GPU" if options.config.device.type == "cuda" else "resident"
        print(f"measured peak: {human(peak)} {kind}, one micro-batch, prompts as they come")


def measure(name: str, argv: Sequence[str], config: OnPolicyConfig, batches: BatchSizes) -> float:
    """Peak memory in bytes of a run of one iteration, in this process.

    The iteration has as few micro-batches as hold whole groups of responses, and responses have no
    end before ``response_length``.  Nothing is left in ``output_dir``.
    """
    import resource  # not on Windows

    from kedge.cli.main import load_command

    least = batches.group // math.gcd(batches.group, config.per_device_train_batch_size)
    with tempfile.TemporaryDirectory() as folder:
        changed = {
            **{"output_dir": folder, "max_steps": 1, "gradient_accumulation_steps": least},
            **{"num_mini_batches": 1, "min_new_tokens": config.response_length},
            **{"save_strategy": "no", "eval_strategy": "no", "report_to": "none"},
            **{"num_sample_generations": 0, "log_token_rows": 0, "push_to_hub": False},
        }
        load_command(name)([*argv, *(f"--{flag}={value}" for flag, value in changed.items())])
    if config.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def plan(
    options: Options, processes: int | None = None
) -> tuple[BatchSizes, dict[str, int], list[ModelMemory]]:
    """Batch sizes, prompt statistics and memory of a run; raises the errors of training.

    Args:
        options: of the run.
        processes: number of ranks; None: as in this launch.
    """
    config, script, names = options.config, options.script, model_names(options)
    is_async, trust = isinstance(config, AsyncPPOConfig), options.model.trust_remote_code
    if is_async:
        tokenizer = load_chat_tokenizer(options, names)
    else:
        tokenizer = load_tokenizer(names.tokenizer, options.model)
    ends = eos_token_ids(
        names.policy, tokenizer, revision=options.model.model_revision, trust_remote_code=trust
    )
    build_sampling(config, ends)
    custom = load_algorithm(script.algorithm, script.algorithm_kwargs)
    algorithm = find_trainer(config).SPEC.build_algorithm(config, custom)
    world_size, columns = processes or config.world_size or 1, None
    if script.dataset_name is None and not script.dataset_mixer_list:
        if config.total_episodes is None and config.max_steps <= 0:
            raise ConfigError(
                "the length of the run is unknown; set --dataset_name, --total_episodes or "
                "--max_steps"
            )
        sizes = shared_kwargs(config, compute_batch_sizes) | {"world_size": world_size}
        batches = compute_batch_sizes(**sizes, min_group=algorithm.min_group)
        facts = {"longest prompt, assumed": config.max_prompt_length or PROMPT_GUESS}
    else:
        train, _ = load_mixed(options) if is_async else load_prompts(options)
        here: Any = SimpleNamespace(process_index=0, num_processes=world_size)
        prompts, batches = build_prompts(
            train, config, tokenizer, here, min_group=algorithm.min_group
        )
        report, columns = prompts.report, prompts.columns
        facts = {
            "prompts": report.rows - report.dropped,
            "prompts dropped": report.dropped,
            "prompts truncated": report.truncated,
            "longest prompt": report.longest,
        }
    check_targets(config)
    for spec in script.reward_funcs or []:
        function = load_function(spec)
        if columns is not None:
            Signature(function, function_name(function)).check(columns)
    longest = [*facts.values()][-1]
    if columns is not None:  # else the longest prompt is a guess
        check_length(
            {"the policy": read_config(names.policy, trust_remote_code=trust)},
            prompt=longest,
            response=config.response_length,
            option=config.length_option,
        )
    estimate = Estimate(options, batches, names, longest)
    return batches, facts, estimate.models(algorithm)


def show(
    options: Options, batches: BatchSizes, facts: dict[str, int], models: list[ModelMemory]
) -> None:
    """Print the plan."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    config, console = options.config, Console()
    sizes = Table(title="sizes", show_header=False, title_justify="left")
    for row in size_rows(options, batches, facts, models) + sync_rows(config, models[0]):
        sizes.add_row(*row)
    console.print(sizes)
    # Eight columns have to fit into the 80 characters of a plain terminal.
    table = Table(
        title="memory per process, estimated",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("model", "params", "trained", "weights", "grads", "optim", "activ.", "cache"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for m in models:
        parts = (m.weights, m.gradients, m.optimizer, m.training, m.generation)
        table.add_row(m.role, short(m.count.total), short(m.count.trained), *map(human, parts))
    console.print(table)
    process = process_bytes() if config.device.type == "cpu" else 0.0
    phases = peaks(models, process)
    console.print(
        "params: parameters; grads and optim: gradients and optimizer state of those that train; "
        "activ.: activations and logits of a micro-batch; cache: keys and values while sampling\n"
        f"peak about {human(max(phases.values()))} per process, before sharding by FSDP or"
        f" DeepSpeed: {', '.join(f'{phase} {human(x)}' for phase, x in phases.items())}"
        + (f"; {human(process)} of it Python and libraries" if process else "")
    )
    ranks, stage = batches.world_size, getattr(config, "deepspeed_stage", None)
    if isinstance(config, AsyncPPOConfig) and ranks > 1 and stage:
        console.print(verdict(models, config, ranks=ranks, stage=stage, rows=batches.micro_rows))
