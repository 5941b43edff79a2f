"""The rows of the tables of ``kedge plan``."""

from __future__ import annotations

from kedge.cli.arguments import Options
from kedge.cli.planning.memory import ModelMemory
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import find_engine
from kedge.config.schedule import warmup_iterations
from kedge.loop.batch_sizes import BatchSizes

Row = tuple[str, str, str]  # name, value, note


def size_rows(
    options: Options, batches: BatchSizes, facts: dict[str, int], models: list[ModelMemory]
) -> list[Row]:
    """Every size with its name and where it comes from.

    Args:
        options: of the run.
        batches: its sizes.
        facts: numbers of prompts by name; the last one is the tokens of the longest.
        models: all models of the run, the policy first.
    """
    config, prompt = options.config, [*facts.values()][-1]
    response, epochs = config.response_length, batches.epochs
    tokens = batches.batch_size * (prompt + response)
    micro = (
        f"samples per forward pass; {batches.micro_rows} per process, "
        f"{batches.micro_batches} passes per optimizer step"
    )
    if batches.max_tokens_per_micro_batch is not None:
        micro = f"not used: passes of at most {batches.max_tokens_per_micro_batch:,} tokens"
    counts: list[tuple[str, int, str]] = [
        ("processes", batches.world_size, ""),
        *((name, value, "") for name, value in facts.items()),
        ("batch", batches.batch_size, f"samples; {batches.local_rows} per process"),
        ("prompts per iteration", batches.prompts, f"{batches.group} responses each"),
        (
            "mini-batch",
            batches.mini_batch_size,
            f"samples per optimizer step; {batches.local_mini_rows} per process",
        ),
        ("micro-batch", batches.micro_batch_size, micro),
        (
            "optimizer steps per iteration",
            batches.optimizer_steps_per_iteration,
            f"{epochs} passes x {batches.minibatches} mini-batches",
        ),
    ]
    if config.environment is not None:
        turns = min(config.max_turns or response, response)
        most = config.max_turn_tokens
        each = "as many as are left" if most is None else f"{most:,}"
        calls = f"at most, resets included; {config.environment_concurrency} at a time"
        counts += [
            ("tokens per episode", response, "at most, all turns and answers"),
            ("turns per episode", turns, f"at most, of {each} tokens"),
            ("environment calls per iteration", batches.batch_size * (turns + 1), calls),
        ]
    warmup = warmup_iterations(config, batches.iterations)
    counts += [
        ("iterations", batches.iterations, f"{warmup} of them warm-up"),
        ("optimizer steps", batches.optimizer_steps, ""),
        ("episodes", batches.episodes, "responses generated"),
        ("tokens per iteration", tokens, "at most, prompt and response"),
        ("response tokens", batches.episodes * response, "at most, in the run"),
    ]
    # 2 operations per weight and token forward, twice as many backward
    again = "; gradient_checkpointing adds a third" if config.gradient_checkpointing else ""
    trained = sum(m.count.total for m in models if m.count.trained)
    sampled = batches.prompts * prompt + batches.batch_size * response
    operations = {
        "sampling": 2 * models[0].count.total * sampled,
        "log-probabilities, values and scores": 2 * sum(m.count.total for m in models) * tokens,
        f"training in {epochs} passes": epochs * (4 if again else 3) * 2 * trained * tokens,
    }
    listed = ", ".join(f"{name} {x / 1e12:.2g}" for name, x in operations.items())
    total = f"{sum(operations.values()) / 1e12:.2g}"
    rows = [(name, f"{value:,}", note) for name, value, note in counts]
    return [*rows, ("TFLOP per iteration", total, f"at most; {listed}{again}")]


def sync_rows(config: OnPolicyConfig, policy: ModelMemory) -> list[Row]:
    """What an iteration sends to rollout engines; no row if they use the learner's weights."""
    engine, lag = find_engine(config), config.max_lag
    if not engine.copies_weights:
        return []
    engines = config.vllm_num_engines if engine.several else 1
    if config.rollout_schedule == "as_completed":  # engines may have weights of any age up to it
        lag = min(lag, engines)
    copies = f"up to {max(2, lag + 1)} copies in host memory"  # engines' and the next ones
    if config.max_lag == 0 and engine.per_rank:
        copies = "without a copy"
    elif config.in_flight_weight_updates:
        copies = "up to 2 copies in host memory"
    width = sync_width(config, policy)
    sent = "all weights" if policy.count.trained == policy.count.total else "the adapter"
    note = f"per iteration: {sent} in {'16 bits' if width == 2 else 'float32'}, {copies}"
    size = human(policy.count.trained * width)
    return [("weight sync", size, f"{note}; rollout engines: {engines}")]


def sync_width(config: OnPolicyConfig, policy: ModelMemory) -> float:
    """Bytes of a weight as it is sent to rollout engines: vLLM is sent its own precision."""
    whole = policy.count.trained == policy.count.total
    half = find_engine(config).vllm and whole and (config.bf16 or config.fp16)
    return 2.0 if half else 4.0


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
