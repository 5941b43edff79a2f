"""The part of ``kedge plan async-ppo`` about time: which devices learn, and which sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kedge.cli.arguments import Options
from kedge.cli.planning import costs, memory
from kedge.cli.train.ppo import Names
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.rollout_engines import find_engine
from kedge.engine.batch_sizes import BatchSizes
from kedge.errors import ConfigError

SHOWN = 6  # ways to share the devices


@dataclass(frozen=True, slots=True)
class Asked:
    """What ``--hardware`` and ``--devices`` say."""

    hardware: str | None = None
    devices: int | None = None


def take_flags(argv: list[str]) -> tuple[Asked, list[str]]:
    """``--hardware NAME`` and ``--devices N`` out of the flags.

    Raises:
        ConfigError: an unknown device, or no number.
    """
    rest: list[str] = []
    found: dict[str, str] = {}
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name not in ("--hardware", "--devices"):
            rest.append(token)
            continue
        found[name] = value if equals else next(tokens, "")
    kind, number = found.get("--hardware"), found.get("--devices")
    if kind is not None and kind not in (*costs.KNOWN, "cpu"):
        raise ConfigError(f"--hardware {kind} must be one of {', '.join(costs.KNOWN)}, cpu")
    if number is not None and (not number.isdigit() or int(number) < 1):
        raise ConfigError(f"--devices {number} must be a whole number of at least 1")
    return Asked(kind, None if number is None else int(number)), rest


def build_job(options: Options, batches: BatchSizes, names: Names, prompt: float) -> costs.Job:
    """The update that the flags describe, as far as its cost goes; responses at full length."""
    config, trust = options.config, options.model.trust_remote_code

    def model(name: str | None, head: str) -> costs.Model | None:
        if name is None:
            return None
        read = memory.read_config(name, trust_remote_code=trust)
        shape = memory.read_shape(read)
        count, _ = memory.count_parameters(read, head=head)
        if head == "score":
            return costs.Model(body=count - shape.hidden * shape.vocab, shape=shape)
        tied = bool(getattr(read.get_text_config(), "tie_word_embeddings", False))
        return costs.Model(body=costs.body_parameters(count, shape, tied=tied), shape=shape)

    policy = model(names.policy, "causal")
    assert policy is not None
    value = options.script.value_model_path or names.reward
    return costs.Job(
        policy=policy,
        value=model(value, "score") or policy,
        reward=model(names.reward, "score"),
        reference=config.kl_coef > 0 and not config.ray_ref_workers,  # they run in parallel
        rows=batches.batch_size,
        prompt=prompt,
        response=config.response_length,
        group=batches.group,
        epochs=batches.epochs,
        checkpointing=bool(config.gradient_checkpointing),
    )


def show_split(job: costs.Job, options: Options, asked: Asked, console: Any) -> None:
    """Print where the time of an update goes, and the best ways to share the devices."""
    from rich.table import Table

    config = options.config
    assert isinstance(config, AsyncPPOConfig)
    learners = sum(config.actor_num_gpus_per_node or [1])
    each = config.vllm_tensor_parallel_size
    engines = config.vllm_num_engines * each if find_engine(config).actors else 0
    name = asked.hardware or ("cpu" if config.use_cpu else "h100")
    device = costs.hardware(name)
    assert device is not None
    total = asked.devices or learners + engines
    told = costs.plan_split(job, device, learners=learners, engines=engines)
    table = Table(title=f"seconds of an update on {device.name}, estimated", title_justify="left")
    for column in ("devices", *costs.STAGES, "update"):
        table.add_column(
            column,
            justify="left" if column == "devices" else "right",
            no_wrap=column == "devices",
        )
    best = costs.splits(job, device, total)
    for split in [told, *(s for s in best[:SHOWN] if s != told)]:
        who = f"{split.learners} learn, {split.engines} sample"
        who = who if split.engines else f"{split.learners} in turn"
        if split is told:
            who += "  (as asked)"
        table.add_row(
            who, *(f"{split.seconds[n]:.3g}" for n in costs.STAGES), f"{split.update:.3g}"
        )
    console.print(table)
    first = best[0]
    advice = (
        f"fastest with {total}: sample on {first.engines}, learn on {first.learners}"
        if first.engines
        else f"fastest with {total}: sample and learn in turn on all of them (max_lag=0)"
    )
    console.print(
        f"{advice}; {first.update:.3g} s an update. Responses of full length, devices busy all the"
        " time: docs/explain/scaling.md says how far such figures can be trusted"
    )
