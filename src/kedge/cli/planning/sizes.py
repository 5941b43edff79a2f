"""The rows of the tables of ``kedge plan``."""

from __future__ import annotations

from kedge.cli.arguments import Options
from kedge.cli.planning import memory
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import find_engine
from kedge.config.schedule import warmup_iterations
from kedge.engine.batch_sizes import BatchSizes


def longest(facts: dict[str, int]) -> int:
    """Tokens of the longest prompt, measured or assumed."""
    return next(value for name, value in facts.items() if name.startswith("longest prompt"))


def size_rows(
    options: Options, batches: BatchSizes, facts: dict[str, int]
) -> list[tuple[str, str, str]]:
    """Every size with its name and where it comes from."""
    response = options.config.response_length
    per_iteration = batches.batch_size * (longest(facts) + response)
    warmup = warmup_iterations(options.config, batches.iterations)
    return [
        ("processes", f"{batches.world_size:,}", ""),
        *((name, f"{value:,}", "") for name, value in facts.items()),
        ("batch", f"{batches.batch_size:,}", f"samples; {batches.local_rows} per process"),
        ("prompts per iteration", f"{batches.prompts:,}", f"{batches.group} responses each"),
        (
            "mini-batch",
            f"{batches.mini_batch_size:,}",
            f"samples per optimizer step; {batches.local_mini_rows} per process",
        ),
        (
            "micro-batch",
            f"{batches.micro_batch_size:,}",
            f"samples per forward pass; {batches.micro_rows} per process, "
            f"{batches.micro_batches} passes per optimizer step"
            if batches.max_tokens_per_micro_batch is None
            else f"not used: passes of at most {batches.max_tokens_per_micro_batch:,} tokens",
        ),
        (
            "optimizer steps per iteration",
            f"{batches.optimizer_steps_per_iteration:,}",
            f"{batches.epochs} passes x {batches.minibatches} mini-batches",
        ),
        *_episode_rows(options.config, batches),
        ("iterations", f"{batches.iterations:,}", f"{warmup} of them warm-up"),
        ("optimizer steps", f"{batches.optimizer_steps:,}", ""),
        ("episodes", f"{batches.episodes:,}", "responses generated"),
        ("tokens per iteration", f"{per_iteration:,}", "at most, prompt and response"),
        ("response tokens", f"{batches.episodes * response:,}", "at most, in the run"),
    ]


def sync_row(config: OnPolicyConfig, policy: memory.Need) -> tuple[str, str, str] | None:
    """What an iteration sends to rollout engines; None if they use the learner's weights."""
    engine = find_engine(config)
    if not engine.copies_weights:
        return None
    width = sync_width(config, policy)
    engines = config.vllm_num_engines if engine.several else 1
    sent = "all weights" if policy.trained == policy.parameters else "the adapter"
    kept = _host_copies(config)
    copies = f"up to {kept} copies in host memory" if kept else "without a copy"
    note = f"per iteration: {sent} in {'16 bits' if width == 2 else 'float32'}, {copies}"
    return "weight sync", human(policy.trained * width), f"{note}; rollout engines: {engines}"


def _host_copies(config: OnPolicyConfig) -> int:
    """Copies of the sent weights: those that engines have or may still load, and the next ones."""
    engine, lag = find_engine(config), config.max_lag
    if lag == 0 and engine.per_rank:
        return 0
    if config.in_flight_weight_updates:
        return 2
    if config.rollout_schedule == "as_completed":  # engines may have weights of any age up to it
        lag = min(lag, config.vllm_num_engines if engine.several else 1)
    return max(2, lag + 1)


def sync_width(config: OnPolicyConfig, policy: memory.Need) -> float:
    """Bytes of a weight as it is sent to rollout engines: vLLM is sent its own precision."""
    whole = policy.trained == policy.parameters
    half = find_engine(config).vllm and whole and (config.bf16 or config.fp16)
    return 2.0 if half else 4.0


def _episode_rows(config: OnPolicyConfig, batches: BatchSizes) -> list[tuple[str, str, str]]:
    """Turns of the episodes of an environment."""
    if config.environment is None:
        return []
    tokens, turns = config.max_turn_tokens, config.max_turns
    each = "as many as are left" if tokens is None else f"{tokens:,}"
    most = config.response_length if turns is None else min(turns, config.response_length)
    return [
        ("tokens per episode", f"{config.response_length:,}", "at most, all turns and answers"),
        ("turns per episode", f"{most:,}", f"at most, of {each} tokens"),
        (
            "environment calls per iteration",
            f"{batches.batch_size * (most + 1):,}",
            f"at most, resets included; {config.environment_concurrency} at a time",
        ),
    ]


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
