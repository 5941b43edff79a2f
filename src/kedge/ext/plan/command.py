"""``kedge plan``: batch sizes and estimated memory of a run, without loading weights.

Weights, gradients and optimizer state follow from parameter counts; activations and caches are
approximate, and all are of one process without sharding.  ``kedge plan --measure`` measures a run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kedge.algorithms import Algorithm
from kedge.cli.arguments import parser
from kedge.cli.flags import Flags, print_table
from kedge.cli.model_arguments import get_peft_config
from kedge.cli.options import ModelPaths, Options, model_names
from kedge.cli.ppo import build, load_algorithm
from kedge.config.base import OnPolicyConfig
from kedge.config.rollout_engines import assume_all_packages
from kedge.learner.models import value_start
from kedge.loop.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.models.compatibility import check_length
from kedge.models.freezing import freeze_attention, train_top_layers
from kedge.models.load import configuration_source, eos_token_ids
from kedge.models.value_head import ScalarHead
from kedge.ops.products import backend
from kedge.output import check_targets
from kedge.records.errors import ConfigError
from kedge.reporting.base import format_duration
from kedge.rewards.build import load_function
from kedge.rewards.function import Signature, function_name
from kedge.trainers import find_trainer, load_trainer, trainer_commands
from kedge.trainers.options import sampling_options, size_options, value_arguments
from kedge.trainers.prompts import build_prompts
from kedge.trainers.spec import check_custom

USAGE = f"""\
usage: kedge plan COMMAND [--num_processes N] [--measure] [flags of that command]

COMMAND is one of {", ".join(trainer_commands())}.

Print a run's batch sizes and estimated memory, and check its flags, without loading weights.

  --num_processes N   number of ranks that train (default: those of this launch)
  --measure           also run a few iterations with responses of full length, and print the seconds
                      per iteration, the time for the whole run, and the peak memory

`kedge plan ppo --help` lists the flags of `kedge ppo`.
example: kedge plan ppo --model_name_or_path MODEL --dataset_name prompts.jsonl \\
             --reward_funcs rewards.py:length --output_dir runs/a"""
PROMPT_GUESS = 512  # tokens, assumed if no dataset is given
MEASURED = 3  # iterations of --measure; the first one warms up
# Bytes of optimizer state per trained parameter, by the first of these that the name contains; ""
# is Adam, with two moments in float32.
OPTIMIZER_BYTES = {
    **{"4bit": 1.0, "lion_8bit": 1.0, "rmsprop_bnb_8bit": 1.0, "ademamix_8bit": 3.0, "8bit": 2.0},
    **{"sgd": 0.0, "adafactor": 0.1, "ademamix": 12.0},
    **{"lion": 4.0, "rmsprop": 4.0, "adagrad": 4.0, "": 8.0},
}
TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # bytes of logits held at a time
KEPT_BYTES = 128 << 20  # most bytes of logits kept for the backward pass


def main(argv: Sequence[str]) -> None:
    """Show batch sizes and estimated memory of a run without loading weights."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    name, *rest = argv
    if name not in trainer_commands():
        raise ConfigError(f"kedge plan {name} must be one of {', '.join(trainer_commands())}")
    prog, spec = f"kedge plan {name}", load_trainer(name).SPEC
    config = spec.config
    if parser(prog, config).show_help(rest):
        return
    own = Flags(prog, add_help=False, allow_abbrev=False)
    own.add_argument("--num_processes", "--num-processes", type=int)
    own.add_argument("--measure", action="store_true")
    flags, rest = own.parse_known_args(rest)
    if flags.measure and spec.learners is not None:
        raise ConfigError(f"{prog} cannot --measure: its processes start on a cluster")
    processes: int | None = flags.num_processes
    if processes is not None and processes < 1:
        raise ConfigError(f"--num_processes {processes} must be at least 1")
    with assume_all_packages() if spec.learners is not None else nullcontext():
        options = import_module(spec.command).parse_options(rest, prog=prog, config=config)
        if spec.learners is not None:
            processes = processes or spec.learners(options.config)
        batches, facts, models = plan(options, processes)
    print_table("sizes", size_rows(options.config, batches, facts))
    show_memory(options.config, models)
    if flags.measure:
        print(measure(rest, options.config, batches.iterations))


def measure(argv: Sequence[str], config: OnPolicyConfig, iterations: int) -> str:
    """Time and memory of a run, from a few iterations that write no file.

    No response ends before ``response_length``, so both are the most that the run can take.
    """
    import resource  # not on Windows

    command = import_module(find_trainer(config).SPEC.command)
    steps = min(MEASURED, iterations)
    changed = f"--max_steps={steps} --logging_steps=1 --min_new_tokens={config.response_length}"
    changed += " --save_strategy=no --eval_strategy=no --report_to=none --num_sample_generations=0"
    changed += " --log_token_rows=0 --push_to_hub=False --preflight=False"  # no response ends
    words = [*argv, *changed.split()]
    options = command.parse_options(words, prog="kedge plan", config=type(config))
    options.config.output_dir = None
    trainer = build(options)
    trainer.train()
    times = [row["time/step"] for row in trainer.state.log_history if "time/step" in row]
    seconds = median(times[1:] or times)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = f"{human(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} resident"
    if config.device.type == "cuda":
        peak = f"{human(torch.cuda.max_memory_allocated())} allocated on the GPU"
    return (
        f"measured, with responses of full length: {format_duration(seconds)} an iteration, "
        f"{format_duration(seconds * iterations)} for the whole run of {iterations:,} iterations, "
        f"evaluations and checkpoints not included; peak {peak}"
    )


def plan(
    options: Options, processes: int | None = None
) -> tuple[BatchSizes, dict[str, int], list[ModelMemory]]:
    """Batch sizes, prompt statistics and memory of a run; raises the errors of training."""
    config, script, names = options.config, options.script, model_names(options)
    names.check()
    spec, trust = find_trainer(config).SPEC, options.model.trust_remote_code
    command = import_module(spec.command)
    tokenizer, revision = command.load_run_tokenizer(options, names), options.model.model_revision
    sampling_options(
        config,
        eos_token_ids(names.policy, tokenizer, revision=revision, trust_remote_code=trust),
    )
    custom = load_algorithm(script.algorithm, script.algorithm_kwargs)
    if custom is not None:
        check_custom(config, custom)
    algorithm = custom or spec.algorithm(config, config.reward_weights)
    world_size, columns = processes or config.world_size or 1, None
    if script.dataset_name is None and not script.dataset_mixer_list:
        if config.total_episodes is None and config.max_steps <= 0:
            raise ConfigError(
                "the length of the run is unknown; set --dataset_name, --total_episodes or "
                "--max_steps"
            )
        sizes = size_options(config) | {"world_size": world_size}
        batches = compute_batch_sizes(**sizes, min_group=algorithm.min_group)
        facts = {"longest prompt, assumed": config.max_prompt_length or PROMPT_GUESS}
    else:
        train, _ = command.load_rows(options)
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
    for function_spec in script.reward_funcs or []:
        function = load_function(function_spec)
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


# -- what is printed -------------------------------------------------------------------------------


def size_rows(
    config: OnPolicyConfig, batches: BatchSizes, facts: dict[str, int]
) -> list[tuple[str, str, str]]:
    """Every size with its name and where it comes from."""
    response, prompt = config.response_length, [*facts.values()][-1]
    micro = (
        f"samples per forward pass; {batches.micro_rows} per process, "
        f"{batches.micro_batches} pass{'es' * (batches.micro_batches != 1)} per optimizer step"
    )
    if batches.max_tokens_per_micro_batch is not None:
        micro = f"not used: passes of at most {batches.max_tokens_per_micro_batch:,} tokens"
    mini = f"samples per optimizer step; {batches.local_mini_rows} per process"
    passes = f"{batches.epochs} passes x {batches.minibatches} mini-batches"
    counts: list[tuple[str, int, str]] = [
        ("processes", batches.world_size, ""),
        *((name, value, "") for name, value in facts.items()),
        ("batch", batches.batch_size, f"samples; {batches.local_rows} per process"),
        ("prompts per iteration", batches.prompts, f"responses each: {batches.group}"),
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
        ("iterations", batches.iterations, f"{config.get_warmup_steps(warmup)} of them warm-up"),
        ("optimizer steps", batches.optimizer_steps, ""),
        ("episodes", batches.episodes, "responses generated"),
        ("tokens per iteration", tokens, "at most, prompt and response"),
        ("response tokens", batches.episodes * response, "at most, in the run"),
    ]
    return [(name, f"{value:,}", note) for name, value, note in counts]


def show_memory(config: OnPolicyConfig, models: list[ModelMemory]) -> None:
    """Print the memory of each model and of each phase."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, on_cpu = Console(), config.device.type == "cpu"
    # Eight columns have to fit into the 80 characters of a plain terminal.
    table = Table(title="memory per process, estimated", title_justify="left")
    table.box, table.padding, table.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False
    for name in ("model", "params", "trained", "weights", "grads", "optim", "activ.", "cache"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for m in models:
        parts = (m.weights, m.gradients, m.optimizer, m.activations, m.cache)
        table.add_row(m.role, short(m.total), short(m.trained), *map(human, parts))
    console.print(table)
    console.print(
        "params: parameters; grads and optim: gradients and optimizer state of those that train; "
        "activ.: activations and logits of a micro-batch; cache: keys and values while sampling\n"
        + describe(peaks(models))
    )
    if config.bf16 and on_cpu and backend().slow_bf16:
        console.print(backend().slow_bf16)


def describe(phases: dict[str, float]) -> str:
    """The peak of all phases, and of each."""
    listed = ", ".join(f"{phase} {human(size)}" for phase, size in phases.items())
    return (
        f"peak about {human(max(phases.values()))} per process: {listed}; Python, libraries and "
        "CUDA come on top, and FSDP or DeepSpeed divides weights, grads and optim by the processes"
    )


def short(count: int) -> str:
    """A count in thousands, millions or billions."""
    power = min(3, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f}{' kMB'[power]}" if power else str(count)


def human(size: float) -> str:
    """Format bytes in a readable unit."""
    if not size:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.{1 if size < 100 else 0}f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# -- memory ----------------------------------------------------------------------------------------


class ModelDims(NamedTuple):
    """Dimensions of a decoder, from which the size of activations and caches follows."""

    hidden: int
    layers: int
    intermediate: int
    cache: int  # numbers per token and layer: keys and values
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Parameters of a model, an adapter or a head, and its memory in bytes.

    Weights that train are float32, and so are their gradients.
    """

    role: str
    total: int
    trained: int = 0
    frozen_width: float = 4.0  # bytes per frozen weight
    optimizer_width: float = 0.0  # bytes of optimizer state per trained weight
    activations: float = 0.0  # of one micro-batch, logits included
    cache: float = 0.0  # keys, values and logits while responses are sampled

    @property
    def gradients(self) -> float:
        """Gradients of the trained weights."""
        return self.trained * 4.0

    @property
    def weights(self) -> float:
        """All weights."""
        return (self.total - self.trained) * self.frozen_width + self.gradients

    @property
    def optimizer(self) -> float:
        """State of the optimizer."""
        return self.trained * self.optimizer_width

    @property
    def resident(self) -> float:
        """Memory used for the whole run."""
        return self.weights + self.gradients + self.optimizer


def optimizer_bytes(optim: str) -> float:
    """Bytes of optimizer state per trained parameter."""
    return next(size for name, size in OPTIMIZER_BYTES.items() if name in optim)


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """A model's configuration, without its weights."""
    from transformers import AutoConfig

    try:
        base, _ = configuration_source(name)
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model {name!r} has no configuration to plan with: {error}"
        ) from error


def read_dims(config: Any) -> ModelDims:
    """The dimensions of a decoder; its configuration may use any known names."""
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    layers, cache = int(text.num_hidden_layers), 2 * int(kv_heads) * int(head_dim)
    return ModelDims(hidden, layers, int(inner), cache, int(text.vocab_size))


def count_parameters(
    config: Any,
    *,
    causal: bool = False,
    adapter: Any = None,
    train_layers: int | None = None,
    without_attention: bool = False,
) -> dict[str, int]:
    """``total`` and ``trained`` parameters of a model that is built on ``meta``.

    The head is ``causal`` or one logit per sequence; with an ``adapter`` nothing else trains, and
    ``without_attention`` that does not.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    with torch.device("meta"), warnings.catch_warnings():
        if not causal:
            config.num_labels = 1
        kind: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
        model = kind.from_config(config)
        backbone = getattr(model, model.base_model_prefix)
        if without_attention:
            freeze_attention(backbone, what="the value model")
        if train_layers is not None:
            if not causal:  # a value model, which may have fewer than the policy
                train_layers = min(train_layers, int(config.get_text_config().num_hidden_layers))
            train_top_layers(backbone, train_layers, what="the policy")
        if adapter is not None:
            from peft import get_peft_model

            # peft uses a deprecated name of transformers.
            warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
            model = get_peft_model(model, adapter)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"total": size_of(model), "trained": trained}


def size_of(module: Any) -> int:
    """Number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


class Estimate:
    """The memory of the models of a run, with ``prompt`` tokens in the longest prompt."""

    def __init__(
        self, options: Options, batches: BatchSizes, names: ModelPaths, prompt: int
    ) -> None:
        config = self.config = options.config
        self.options, self.batches, self.names = options, batches, names
        self.read = partial(read_config, trust_remote_code=options.model.trust_remote_code)
        self.policy_config = self.read(names.policy)
        self.dims, self.adapter = read_dims(self.policy_config), get_peft_config(options.model)
        optim = str(getattr(config.optim, "value", config.optim))
        self.state = optimizer_bytes(optim)
        self.width = 2 if config.bf16 or config.fp16 else 4
        self.length = prompt + config.response_length
        self.tokens = batches.micro_rows * self.length  # tokens per micro-batch
        if batches.max_tokens_per_micro_batch is not None:
            most = min(batches.local_mini_rows * self.length, batches.max_tokens_per_micro_batch)
            self.tokens = max(most, self.length)  # one row at least

    def models(self, algorithm: Algorithm) -> list[ModelMemory]:
        """Every model of the run, the policy first."""
        models = [policy := self.policy()]
        if self.config.kl_coef + self.config.loss_kl_coef > 0 and self.adapter is None:
            whole = self.config.train_layers is None  # otherwise it shares the frozen weights
            own = {"total": policy.total if whole else policy.trained, "trained": 0}
            models.append(replace(policy, role="reference", **own, activations=0.0, cache=0.0))
        if algorithm.needs_values:
            models.append(self.value(policy))
        return models + self.rewards()

    def activations(self, dims: ModelDims) -> float:
        """Activations of a micro-batch that the backward pass needs, approximately.

        A block keeps about 10 hidden-sized and 4 intermediate-sized vectors per token; with
        checkpointing only one block's exist at a time, and the input of each.
        """
        block = 10 * dims.hidden + 4 * dims.intermediate
        depth = min(self.config.train_layers or dims.layers, dims.layers)
        kept = depth * dims.hidden + block if self.config.gradient_checkpointing else depth * block
        return float(self.tokens * (kept + 4 * dims.hidden) * self.width)

    def policy(self) -> ModelMemory:
        """The policy, with its adapter."""
        config, flags, dims = self.config, self.options.model, self.dims
        layers, frozen, activations = config.train_layers, 4.0, self.activations(dims)
        bf16_base = flags.use_peft and config.bf16 and "dtype" not in self.options.given
        if flags.load_in_4bit or flags.load_in_8bit:
            frozen = 0.56 if flags.load_in_4bit else 1.0  # 4 bits and scales
        elif flags.dtype in ("bfloat16", "float16") or bf16_base:
            frozen = 2.0
        logits = self.tokens * config.response_length // self.length * dims.vocab * 4
        tile = TILE_BYTES["cpu" if config.device.type == "cpu" else "cuda"]
        activations += 2 * min(tile, logits) + min(KEPT_BYTES, logits)
        if config.cache_trunk and layers is not None and layers < dims.layers:
            activations += 4 * self.batches.local_rows * self.length * dims.hidden  # their input
        rows = min(self.batches.local_rows, config.local_rollout_forward_batch_size)
        count = count_parameters(
            self.policy_config, causal=True, adapter=self.adapter, train_layers=layers
        )
        return ModelMemory(
            role="policy",
            **count,
            frozen_width=frozen,
            optimizer_width=self.state,
            activations=activations,
            cache=rows * (self.length * dims.layers * dims.cache * self.width + dims.vocab * 8.0),
        )

    def value(self, policy: ModelMemory) -> ModelMemory:
        """The value model, or the adapter or head on the policy."""
        source, role, activations = self.options.script.value_model_path, "value", 0.0
        both = ("total", "trained")
        frozen = self.adapter is not None or self.config.train_layers is not None
        options, plays = value_arguments(self.config), self.config.environment is not None
        rewarded = bool(self.names.reward)
        start = value_start(options.value_source, plays=plays, rewarded=rewarded, frozen=frozen)
        if source is None and start != "policy":
            source = self.names.policy if start == "copy" else self.names.reward
        if options.value_adapter:
            role, count = "value adapter", dict.fromkeys(both, policy.trained + self.dims.hidden)
            activations = self.activations(self.dims)
        elif source is None:  # the head reads the policy's passes
            role, count = "value head", dict.fromkeys(both, size_of(ScalarHead(self.dims.hidden)))
        else:
            count = count_parameters(
                config := self.read(source),
                train_layers=self.config.train_layers,
                without_attention=options.freeze_value_attention,
            )
            activations = self.activations(read_dims(config))
        return ModelMemory(role=role, **count, optimizer_width=self.state, activations=activations)

    def rewards(self) -> list[ModelMemory]:
        """The reward model, and the reward adapter."""
        models, name, adapter = [], self.names.reward, self.config.reward_adapter
        if name is not None:
            config = self.read(name)
            kinds = ", ".join(getattr(config, "architectures", None) or [])
            whole = configuration_source(name)[0] == name  # an adapter has the head
            if "ForCausalLM" in kinds and whole and not self.options.script.dummy_reward:
                raise ConfigError(f"reward model {name!r} has no score head (it is {kinds})")
            models.append(ModelMemory(role="reward", total=count_parameters(config)["total"]))
        if adapter is not None:
            from peft import PeftConfig

            try:
                saved = PeftConfig.from_pretrained(adapter)
            except (OSError, ValueError) as error:
                raise ConfigError(f"the adapter {adapter!r} cannot be read: {error}") from error
            saved.inference_mode, saved.modules_to_save = False, None
            count = count_parameters(self.policy_config, causal=True, adapter=saved)
            total = count["trained"] + self.dims.hidden
            models.append(ModelMemory(role="reward adapter", total=total))
        return models


def peaks(models: list[ModelMemory]) -> dict[str, float]:
    """Peak memory of each phase in bytes: resident memory plus that of the phase."""
    resident = sum(m.resident for m in models)
    return {
        "sampling": resident + sum(m.cache for m in models),
        "training": resident + sum(m.activations for m in models),
    }
