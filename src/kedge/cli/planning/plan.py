"""``kedge plan``: batch sizes and estimated memory of a run, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kedge.algorithms import Algorithm
from kedge.cli.arguments import Options, parse, parser
from kedge.cli.data import load_prompts
from kedge.cli.flags import Flags
from kedge.cli.planning import memory
from kedge.cli.planning.sharding import Units, count_units, read_sharding, verdict
from kedge.cli.planning.sizes import human, longest, short, size_rows, sync_row
from kedge.cli.train.async_data import load_mixed
from kedge.cli.train.async_ppo import load_chat_tokenizer, parse_options
from kedge.cli.train.ppo import Names, load_algorithm, load_tokenizer, model_names
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.base import OnPolicyConfig
from kedge.config.grpo import GRPOConfig
from kedge.config.options import elsewhere
from kedge.config.ppo import PPOv2Config
from kedge.config.rloo import RLOOConfig
from kedge.config.sampling import build_sampling
from kedge.engine.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.errors import ConfigError
from kedge.trl_scripts import get_peft_config

if TYPE_CHECKING:
    from kedge.trainers.spec import TrainerSpec

CONFIGS: dict[str, type[OnPolicyConfig]] = {
    "async-ppo": AsyncPPOConfig,
    "ppo": PPOv2Config,
    "rloo": RLOOConfig,
    "grpo": GRPOConfig,
}
USAGE = f"""\
usage: kedge plan {"|".join(CONFIGS)} [--num_processes N] [flags of that command]

Show batch sizes and estimated memory of a run, and check its flags, without loading weights.

  --num_processes N   ranks that train; by default those of this launch

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
    if name not in CONFIGS:
        raise ConfigError(f"kedge plan {name} must be one of {', '.join(CONFIGS)}")
    prog, config = f"kedge plan {name}", CONFIGS[name]
    if parser(prog, config).show_help(rest):
        return
    own = Flags(prog, add_help=False, allow_abbrev=False)
    own.add_argument("--num_processes", "--num-processes", type=int)
    flags, rest = own.parse_known_args(rest)
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
        planned = plan(options, processes)
    show(*planned)


def plan(
    options: Options, processes: int | None = None
) -> tuple[Options, BatchSizes, dict[str, int], list[memory.Need]]:
    """Batch sizes, prompt statistics and memory of a run; raises the errors of training.

    ``processes`` is the number of ranks; None: as in this launch.
    """
    from kedge.backends.hf.end_tokens import eos_token_ids

    names, flags = model_names(options), options.model
    if isinstance(options.config, AsyncPPOConfig):
        tokenizer = load_chat_tokenizer(options, names)
    else:
        tokenizer = load_tokenizer(names.tokenizer, flags)
    ends = eos_token_ids(
        names.policy,
        tokenizer,
        revision=flags.model_revision,
        trust_remote_code=flags.trust_remote_code,
    )
    build_sampling(options.config, ends)
    custom = load_algorithm(options.script.algorithm, options.script.algorithm_kwargs)
    algorithm = find_spec(options.config).build_algorithm(options.config, custom)
    world_size = processes or options.config.world_size or 1
    batches, facts, columns = _batches(options, tokenizer, world_size, algorithm.min_group)
    _check(options, names, longest(facts), columns)
    needs = estimate_needs(options, algorithm, batches, names, longest(facts))
    return options, batches, facts, needs


def _check(options: Options, names: Names, prompt: int, columns: list[str] | None) -> None:
    """Run the checks of training: folders, reward functions, columns, context length."""
    from kedge.backends.hf.compatibility import check_length
    from kedge.backends.rewards.call import Signature, function_name
    from kedge.backends.rewards.load import load_function
    from kedge.trainers.run.output_lock import check_targets

    config = options.config
    check_targets(config)
    for spec in options.script.reward_funcs or []:
        function = load_function(spec)
        signature = Signature(function, function_name(function))
        if columns is not None:
            signature.check(columns)
    if columns is not None:  # else the longest prompt is a guess
        policy = memory.read_config(names.policy, trust_remote_code=options.model.trust_remote_code)
        check_length(
            {"the policy": policy},
            prompt=prompt,
            response=config.response_length,
            option=config.length_option,
        )


def find_spec(config: OnPolicyConfig) -> TrainerSpec:
    """The spec of the trainer that takes this config."""
    from kedge.trainers.grpo import GRPOTrainer
    from kedge.trainers.ppo import PPOTrainer
    from kedge.trainers.rloo import RLOOTrainer

    trainers = (PPOTrainer, RLOOTrainer, GRPOTrainer)
    return next(t.SPEC for t in trainers if isinstance(config, t.SPEC.config))


def _batches(
    options: Options, tokenizer: Any, world_size: int, min_group: int
) -> tuple[BatchSizes, dict[str, int], list[str] | None]:
    """Sizes, facts about the prompts, and the dataset's columns; None without a dataset."""
    from kedge.trainers.build.data import build_prompts
    from kedge.trainers.spec import shared_kwargs

    config = options.config
    if options.script.dataset_name is None and not options.script.dataset_mixer_list:
        if config.total_episodes is None and config.max_steps <= 0:
            raise ConfigError(
                "the length of the run is unknown; set --dataset_name, --total_episodes or "
                "--max_steps"
            )
        sizes = shared_kwargs(config, compute_batch_sizes) | {"world_size": world_size}
        batches = compute_batch_sizes(**sizes, min_group=min_group)
        return batches, {"longest prompt, assumed": config.max_prompt_length or PROMPT_GUESS}, None
    is_async = isinstance(config, AsyncPPOConfig)
    train, _ = load_mixed(options) if is_async else load_prompts(options)
    here: Any = SimpleNamespace(process_index=0, num_processes=world_size)
    prompts, batches = build_prompts(train, config, tokenizer, here, min_group=min_group)
    report = prompts.report
    facts = {
        "prompts": report.rows - report.dropped,
        "prompts dropped": report.dropped,
        "prompts truncated": report.truncated,
        "longest prompt": report.longest,
    }
    return batches, facts, prompts.columns


def _passes(
    config: OnPolicyConfig, batches: BatchSizes, prompt: int, shape: memory.Shape
) -> memory.Passes:
    length = prompt + config.response_length
    tokens = batches.micro_rows * length
    if batches.max_tokens_per_micro_batch is not None:
        tokens = min(batches.local_mini_rows * length, batches.max_tokens_per_micro_batch)
        tokens = max(tokens, length)  # one row at least
    logits = tokens * config.response_length // length * shape.vocab * 4
    tile = memory.TILE_BYTES.get(config.device.type, memory.TILE_BYTES["cuda"])
    return memory.Passes(
        tokens=tokens,
        rows=min(batches.local_rows, config.local_rollout_forward_batch_size),
        length=length,
        width=2 if config.bf16 or config.fp16 else 4,
        tile=min(tile, logits),
        kept_logits=min(memory.KEPT_BYTES, logits),
        checkpointing=bool(config.gradient_checkpointing),
    )


def _base_bytes(options: Options) -> float:
    """Bytes of a weight of the policy that does not train."""
    flags = options.model
    if flags.load_in_4bit or flags.load_in_8bit:
        return 0.56 if flags.load_in_4bit else 1.0  # 4 bits and scales
    bf16_base = flags.use_peft and options.config.bf16 and "dtype" not in options.given
    return 2.0 if bf16_base or flags.dtype in ("bfloat16", "float16") else 4.0


def _packed_bytes(config: OnPolicyConfig, policy: Any, parameters: int, base: float) -> float:
    """Packed copies of the policy's linear layers while a CPU samples from it."""
    from kedge.ops.cpu.patch import PACKED_TOKENS, packed_bytes

    short = config.response_length < PACKED_TOKENS
    if config.device.type != "cpu" or short or not (config.bf16 or base == 4):
        return 0.0
    text = policy.get_text_config()
    tied = getattr(policy, "tie_word_embeddings", False)
    inputs = 0 if tied else text.vocab_size * text.hidden_size  # the embedding is not packed
    modes = {"low": bool(config.bf16), "checkpointing": bool(config.gradient_checkpointing)}
    return float(packed_bytes(parameters - inputs, **modes))


def estimate_needs(
    options: Options, algorithm: Algorithm, batches: BatchSizes, names: Names, prompt: int
) -> list[memory.Need]:
    """The memory of every model of the run."""
    config, flags = options.config, options.model
    read = partial(memory.read_config, trust_remote_code=flags.trust_remote_code)
    policy = read(names.policy)
    shape = memory.read_shape(policy)
    passes = _passes(config, batches, prompt, shape)
    state = memory.optimizer_bytes(str(getattr(config.optim, "value", config.optim)))
    adapter = get_peft_config(flags)
    layers = config.train_layers
    counts = memory.count_parameters(policy, head="causal", adapter=adapter, train_layers=layers)
    top = memory.top_layers(shape, layers)
    kept = passes.kept(shape, batches.local_rows, layers if config.cache_trunk else None)
    base = _base_bytes(options)
    heap = passes.heap(shape) if adapter is not None and config.device.type == "cpu" else 0.0
    needs = [
        memory.trained(
            "policy",
            counts,
            weight_bytes=base,
            state_bytes=state,
            training=passes.training(top) + 2 * passes.tile + passes.kept_logits + heap + kept,
            forward=passes.forward(shape) + passes.tile,
            generation=passes.sampling(shape) + _packed_bytes(config, policy, counts[0], base),
        )
    ]
    if config.kl_coef + config.loss_kl_coef > 0 and adapter is None:
        forward = passes.forward(shape) + passes.tile
        own = counts[0] if layers is None else counts[1]  # it shares frozen layers
        needs.append(memory.frozen("reference", own, base, forward=forward))
    if algorithm.needs_values:
        model, role, size = shape, "value head", (memory.count_head(shape.hidden),) * 2
        source = _value_source(options, names)
        if getattr(config, "value_adapter", False):
            role, size = "value adapter", (counts[1] + shape.hidden,) * 2
        elif source is not None:
            model = memory.read_shape(read(source))
            most = None if layers is None else min(layers, model.layers)
            size = memory.count_parameters(read(source), head="score", train_layers=most)
            role = "value"
        own = role != "value head"  # a head reads the policy's passes
        needs.append(
            memory.trained(
                role,
                size,
                weight_bytes=4.0,
                state_bytes=state,
                training=passes.training(memory.top_layers(model, layers)) if own else 0.0,
                forward=passes.forward(model) if own else 0.0,
            )
        )
    return needs + _reward_needs(config, names, policy, passes, read)


def _value_source(options: Options, names: Names) -> str | None:
    """The model that becomes the value model; None: a head or an adapter on the policy."""
    source = options.script.value_model_path
    if source is None and getattr(options.config, "value_source", "policy") != "policy":
        return names.reward
    return source


def read_units(options: Options, needs: list[memory.Need]) -> dict[str, Units]:
    """The units of the models that are sharded, by role."""
    names = model_names(options)
    read = partial(memory.read_config, trust_remote_code=options.model.trust_remote_code)
    policy = count_units(read(names.policy), head="causal")
    units = {"policy": policy, "reference": policy}
    if any(n.role == "value" for n in needs) and (source := _value_source(options, names)):
        units["value"] = count_units(read(source), head="score")
    return units


def _reward_needs(
    config: OnPolicyConfig, names: Names, policy: Any, passes: memory.Passes, read: Any
) -> list[memory.Need]:
    """The memory of the reward model, and of the reward adapter."""
    needs = []
    if names.reward is not None:
        model = read(names.reward)
        count, _ = memory.count_parameters(model, head="score")
        forward = passes.forward(memory.read_shape(model))
        needs.append(memory.frozen("reward", count, forward=forward))
    if config.reward_adapter is not None:
        shape = memory.read_shape(policy)
        count = memory.count_adapter(policy, config.reward_adapter) + shape.hidden
        needs.append(memory.frozen("reward adapter", count, forward=passes.forward(shape)))
    return needs


def process_memory(options: Options) -> float:
    """What a process holds in addition to the models, in the memory that they are in."""
    return memory.process_bytes() if options.config.device.type == "cpu" else 0.0


def show(
    options: Options, batches: BatchSizes, facts: dict[str, int], needs: list[memory.Need]
) -> None:
    """Print the plan."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    sizes = Table(title="sizes", show_header=False, title_justify="left")
    for row in size_rows(options, batches, facts):
        sizes.add_row(*row)
    if (sync := sync_row(options.config, needs[0])) is not None:
        sizes.add_row(*sync)
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
    for n in needs:
        parts = (n.weights, n.gradients, n.optimizer, n.training, n.generation)
        table.add_row(n.role, short(n.parameters), short(n.trained), *map(human, parts))
    console.print(table)
    process = process_memory(options)
    checkpointing = options.config.gradient_checkpointing
    peaks = memory.peaks(needs, process, checkpointing=bool(checkpointing))
    console.print(
        "params: parameters; grads and optim: gradients and optimizer state of those that train; "
        "activ.: activations and logits of a micro-batch; cache: keys, values and packed weights"
        " while sampling\n"
        f"peak about {human(max(peaks.values()))} per process, before sharding by FSDP or"
        f" DeepSpeed: {', '.join(f'{phase} {human(x)}' for phase, x in peaks.items())}"
        + (f"; {human(process)} of it Python and libraries" if process else "")
    )
    if sharding := read_sharding(options.config, batches.world_size, needs[0]):
        units = read_units(options, needs)
        console.print(verdict(needs, units, sharding, batches.micro_rows))
