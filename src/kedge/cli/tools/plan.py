"""``kedge plan``: batch sizes and estimated memory of a run, without loading weights."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from kedge.cli.arguments import Options, parse, parser
from kedge.cli.data import load_prompts
from kedge.cli.flags import Flags
from kedge.cli.tools.memory import (
    Estimate,
    ModelMemory,
    peaks,
    process_bytes,
    read_config,
)
from kedge.cli.train import async_ppo
from kedge.cli.train.ppo import load_algorithm, load_tokenizer, model_names
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import elsewhere, find_engine
from kedge.config.sampling import build_sampling
from kedge.config.schedule import warmup_iterations
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
RESERVE = 5 << 30  # bytes of a GPU that are left to CUDA, NCCL and fragments
GPU = 79 << 30  # bytes that 80 GB are, where this machine has no GPU to look at
Row = tuple[str, str, str]  # name, value, note


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
    with elsewhere() if config is AsyncPPOConfig else nullcontext():
        if config is AsyncPPOConfig:
            options = async_ppo.parse_options(rest, prog=prog)
            processes = processes or sum(options.config.actor_num_gpus_per_node or [1])
        else:
            options = parse(rest, prog=prog, config=config)
        batches, facts, models = plan(options, processes)
    show(options, batches, facts, models)
    if flags.measure:
        print(f"measured peak: {measure(name, rest, options.config, batches)}")


def measure(name: str, argv: Sequence[str], config: OnPolicyConfig, batches: BatchSizes) -> str:
    """Peak memory of a run of one iteration in this process, as text.

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
    unit = 1 if sys.platform == "darwin" else 1024
    peak = f"{human(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} resident"
    if config.device.type == "cuda":
        peak = f"{human(torch.cuda.max_memory_allocated())} allocated on the GPU"
    return f"{peak}, one micro-batch, prompts as they come"


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
        tokenizer = async_ppo.load_chat_tokenizer(options, names)
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
        train, _ = async_ppo.load_mixed(options) if is_async else load_prompts(options)
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
    return batches, facts, Estimate(options, batches, names, longest).models(algorithm)


def show(
    options: Options, batches: BatchSizes, facts: dict[str, int], models: list[ModelMemory]
) -> None:
    """Print the plan."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    config, console = options.config, Console()
    sizes = Table(title="sizes", show_header=False, title_justify="left")
    for row in size_rows(config, batches, facts) + sync_rows(config, models[0]):
        sizes.add_row(*row)
    console.print(sizes)
    # Eight columns have to fit into the 80 characters of a plain terminal.
    table = Table(title="memory per process, estimated", title_justify="left")
    table.box, table.padding, table.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False
    for name in ("model", "params", "trained", "weights", "grads", "optim", "activ.", "cache"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for m in models:
        parts = (m.weights, m.gradients, m.optimizer, m.activations, m.cache)
        table.add_row(m.role, short(m.total), short(m.trained), *map(human, parts))
    console.print(table)
    process = process_bytes() if config.device.type == "cpu" else 0.0
    console.print(
        "params: parameters; grads and optim: gradients and optimizer state of those that train; "
        "activ.: activations and logits of a micro-batch; cache: keys and values while sampling\n"
        + describe(
            peaks(models, config, process=process),
            "per process, before sharding by FSDP or DeepSpeed",
        )
        + (f"; {human(process)} of it Python and libraries" if process else "")
    )
    ranks, stage = batches.world_size, getattr(config, "deepspeed_stage", None)
    if isinstance(config, AsyncPPOConfig) and ranks > 1 and stage:
        console.print(verdict(models, config, ranks=ranks, stage=stage, rows=batches.micro_rows))


def size_rows(config: OnPolicyConfig, batches: BatchSizes, facts: dict[str, int]) -> list[Row]:
    """Every size with its name and where it comes from.

    Args:
        config: of the run.
        batches: its sizes.
        facts: numbers of prompts by name; the last one is the tokens of the longest.
    """
    response, prompt = config.response_length, [*facts.values()][-1]
    micro = (
        f"samples per forward pass; {batches.micro_rows} per process, "
        f"{batches.micro_batches} passes per optimizer step"
    )
    if batches.max_tokens_per_micro_batch is not None:
        micro = f"not used: passes of at most {batches.max_tokens_per_micro_batch:,} tokens"
    mini = f"samples per optimizer step; {batches.local_mini_rows} per process"
    passes = f"{batches.epochs} passes x {batches.minibatches} mini-batches"
    counts: list[tuple[str, int, str]] = [
        ("processes", batches.world_size, ""),
        *((name, value, "") for name, value in facts.items()),
        ("batch", batches.batch_size, f"samples; {batches.local_rows} per process"),
        ("prompts per iteration", batches.prompts, f"{batches.group} responses each"),
        ("mini-batch", batches.mini_batch_size, mini),
        ("micro-batch", batches.micro_batch_size, micro),
        ("optimizer steps per iteration", batches.optimizer_steps_per_iteration, passes),
    ]
    if config.environment is not None:
        turns, most = min(config.max_turns or response, response), config.max_turn_tokens
        each = "as many as are left" if most is None else f"{most:,}"
        calls = f"at most, resets included; {config.environment_concurrency} at a time"
        counts += [
            ("tokens per episode", response, "at most, all turns and answers"),
            ("turns per episode", turns, f"at most, of {each} tokens"),
            ("environment calls per iteration", batches.batch_size * (turns + 1), calls),
        ]
    tokens, warmup = batches.batch_size * (prompt + response), batches.iterations
    counts += [
        ("iterations", batches.iterations, f"{warmup_iterations(config, warmup)} of them warm-up"),
        ("optimizer steps", batches.optimizer_steps, ""),
        ("episodes", batches.episodes, "responses generated"),
        ("tokens per iteration", tokens, "at most, prompt and response"),
        ("response tokens", batches.episodes * response, "at most, in the run"),
    ]
    return [(name, f"{value:,}", note) for name, value, note in counts]


def sync_rows(config: OnPolicyConfig, policy: ModelMemory) -> list[Row]:
    """What an iteration sends to rollout engines; no row if they use the learner's weights."""
    engine = find_engine(config)
    if not engine.copies_weights:
        return []
    # vLLM is sent its own precision.
    half = engine.vllm and policy.whole and (config.bf16 or config.fp16)
    sent = "all weights" if policy.whole else "the adapter"
    note = f"per iteration: {sent} in {'16 bits' if half else 'float32'}"
    if engine.several:
        note += f", to {config.vllm_num_engines} rollout engines"
    return [("weight sync", human(policy.trained * (2 if half else 4)), note)]


def verdict(
    models: list[ModelMemory], config: OnPolicyConfig, *, ranks: int, stage: int, rows: int
) -> str:
    """The peaks on the first rank, and whether they fit its GPU or which flags make them fit.

    Args:
        models: all models of the run, unsharded, the policy first.
        config: of the run.
        ranks: number of learners.
        stage: of ZeRO.
        rows: of a micro-batch (per_device_train_batch_size).
    """
    memory = float(GPU)
    if torch.cuda.is_available():
        memory = float(torch.cuda.get_device_properties(0).total_memory)
    gpu = f"a GPU of {human(memory)}, of which {human(RESERVE)} are left to CUDA and NCCL"
    phases = peaks(models, config, ranks=ranks, stage=stage)
    text = describe(phases, f"on the first of {ranks} GPUs at deepspeed_stage {stage}") + "\n"
    if max(phases.values()) <= memory - RESERVE:
        return f"{text}fits {gpu}"
    sharded = "--deepspeed_stage 3 " * (stage < 3)
    one_row = [replace(m, activations=m.activations / rows) for m in models]
    for flags, changed in (
        (sharded, models),
        (f"{sharded}--per_device_train_batch_size 1", one_row),
    ):
        if max(peaks(changed, config, ranks=ranks, stage=3).values()) <= memory - RESERVE:
            return f"{text}does not fit {gpu}; set {flags.strip()}"
    return f"{text}does not fit {gpu}; use more GPUs or adapters (--use_peft)"


def describe(phases: dict[str, float], where: str) -> str:
    """The peak of all phases, and of each."""
    listed = ", ".join(f"{phase} {human(size)}" for phase, size in phases.items())
    return f"peak about {human(max(phases.values()))} {where}: {listed}"


def short(count: int) -> str:
    """A count in thousands, millions or billions."""
    if count < 1000:
        return str(count)
    power = min(3, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f}{' kMB'[power]}"


def human(size: float) -> str:
    """Bytes in a unit that a person reads."""
    if not size:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.{1 if size < 100 else 0}f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
