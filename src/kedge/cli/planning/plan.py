"""``kedge plan``: batch sizes and estimated memory of a run, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kedge.algorithms import Algorithm
from kedge.cli.arguments import Options, parse, parser
from kedge.cli.data import load_prompts
from kedge.cli.planning import memory
from kedge.cli.planning.plan_split import build_job, show_split, take_flags
from kedge.cli.train.async_ppo import parse_options
from kedge.cli.train.ppo import Names, load_algorithm, load_tokenizer, lora, model_names
from kedge.config.async_ppo import AsyncPPOConfig
from kedge.config.base import OnPolicyConfig
from kedge.config.grpo import GRPOConfig
from kedge.config.options import elsewhere
from kedge.config.ppo import PPOv2Config
from kedge.config.rloo import RLOOConfig
from kedge.config.sampling import build_sampling
from kedge.config.schedule import warmup_iterations
from kedge.engine.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.trainers.spec import TrainerSpec

CONFIGS: dict[str, type[OnPolicyConfig]] = {
    "async-ppo": AsyncPPOConfig,
    "ppo": PPOv2Config,
    "rloo": RLOOConfig,
    "grpo": GRPOConfig,
}
PROMPT_GUESS = 512  # tokens, where there is no dataset to look at


def main(argv: Sequence[str]) -> None:
    """``kedge plan ppo [flags]``, or of another command that trains."""
    if not argv or argv[0] in ("-h", "--help"):
        print(
            f"usage: kedge plan {'|'.join(CONFIGS)} [--num_processes N] [flags of that command]\n"
            "async-ppo also takes: [--hardware a100|h100|h200|cpu] [--devices N]"
        )
        return
    name, *rest = argv
    if name not in CONFIGS:
        raise ConfigError(f"kedge plan {name} must be one of {', '.join(CONFIGS)}")
    prog, config = f"kedge plan {name}", CONFIGS[name]
    if {"-h", "--help"} & set(rest):
        parser(prog, config).print_help()
        return
    processes, rest = _processes(rest)
    if config is AsyncPPOConfig:
        _plan_async(rest, processes)
    else:
        show(*plan(parse(rest, prog=prog, config=config), processes))


def _plan_async(argv: list[str], processes: int | None) -> None:
    from rich.console import Console

    asked, argv = take_flags(argv)
    with elsewhere():
        options = parse_options(argv, prog="kedge plan async-ppo")
        assert isinstance(options.config, AsyncPPOConfig)
        learners = sum(options.config.actor_num_gpus_per_node or [1])
        options, batches, facts, needs = plan(options, processes or learners)
    show(options, batches, facts, needs)
    job = build_job(options, batches, model_names(options), longest(facts))
    show_split(job, options, asked, Console())


def plan(
    options: Options, processes: int | None = None
) -> tuple[Options, BatchSizes, dict[str, int], list[memory.Need]]:
    """Batch sizes, prompt statistics and memory of the run that the flags describe.

    Args:
        options: what ``parse`` returned.
        processes: number of ranks; None: as in this launch.

    Raises:
        ConfigError, DataError: as training would.
    """
    from kedge.backends.hf.end_tokens import eos_token_ids

    names = model_names(options)
    tokenizer = load_tokenizer(names.tokenizer, options.model)
    flags = options.model
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
    """Run the checks of training: folders, reward functions, columns, context length.

    Raises:
        ConfigError: as training would.
    """
    from kedge.backends.hf.compatibility import check_length
    from kedge.backends.rewards.call import Signature, function_name
    from kedge.backends.rewards.load import load_function
    from kedge.trainers.run.output_lock import check_targets

    config, script = options.config, options.script
    check_targets(config)
    for spec in script.reward_funcs or []:
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


def longest(facts: dict[str, int]) -> int:
    """Tokens of the longest prompt, measured or assumed."""
    return next(value for name, value in facts.items() if name.startswith("longest prompt"))


def _processes(argv: list[str]) -> tuple[int | None, list[str]]:
    rest, found = [], None
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name not in ("--num_processes", "--num-processes"):
            rest.append(token)
            continue
        value = value if equals else next(tokens, "")
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--num_processes {value} must be a whole number of at least 1")
        found = int(value)
    return found, rest


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
    train, _ = load_prompts(options)
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


def estimate_needs(
    options: Options,
    algorithm: Algorithm,
    batches: BatchSizes,
    names: Names,
    prompt: int,
) -> list[memory.Need]:
    """The memory of every model of the run."""
    trust = options.model.trust_remote_code
    policy = memory.read_config(names.policy, trust_remote_code=trust)
    shape = memory.read_shape(policy)
    config = options.config
    device = config.device.type
    width = 2 if config.bf16 or config.fp16 else 4
    length = prompt + config.response_length
    tile = min(
        memory.TILE_BYTES.get(device, memory.TILE_BYTES["cuda"]),
        batches.micro_rows * config.response_length * shape.vocab * 4,
    )
    rows = min(batches.local_rows, config.local_rollout_forward_batch_size)
    state = memory.optimizer_bytes(settings_optimizer(options))

    def training(of: memory.Shape) -> float:
        return memory.activation_bytes(
            of,
            batches.micro_rows * length,
            width=width,
            checkpointing=bool(config.gradient_checkpointing),
        )

    adapter = lora(options.model) if options.model.use_peft else None
    counts = memory.count_parameters(policy, head="causal", adapter=adapter)
    base = weight_bytes(options)
    needs = [
        memory.trained(
            "policy",
            counts,
            weight_bytes=base,
            state_bytes=state,
            training=training(shape) + 2 * tile,
            generation=rows * (length * shape.layers * shape.cache * width + shape.vocab * 8.0),
        )
    ]
    if config.kl_coef + config.loss_kl_coef > 0 and adapter is None:
        needs.append(memory.frozen("reference", counts[0], base))
    needs += _value_and_reward(options, algorithm, names, training, state)
    if algorithm.needs_values and "value" not in {need.role for need in needs}:
        size = memory.count_head(shape.hidden)
        needs.insert(
            len(needs) - (needs[-1].role == "reward"),
            memory.trained(
                "value head", (size, size), weight_bytes=4.0, state_bytes=state, training=0.0
            ),
        )
    return needs


def _value_and_reward(
    options: Options, algorithm: Algorithm, names: Names, training: Any, state: Any
) -> list[memory.Need]:
    trust = options.model.trust_remote_code
    reward, value = names.reward, options.script.value_model_path
    if value is None and getattr(options.config, "value_source", "policy") != "policy":
        value = reward
    needs = []
    if value is not None and algorithm.needs_values:
        config = memory.read_config(value, trust_remote_code=trust)
        counts = memory.count_parameters(config, head="score")
        needs.append(
            memory.trained(
                "value",
                counts,
                weight_bytes=4.0,
                state_bytes=state,
                training=training(memory.read_shape(config)),
            )
        )
    if reward is not None:
        config = memory.read_config(reward, trust_remote_code=trust)
        needs.append(memory.frozen("reward", memory.count_parameters(config, head="score")[0]))
    return needs


def settings_optimizer(options: Options) -> str:
    """The optimizer's name."""
    optim = options.config.optim
    return str(getattr(optim, "value", optim))


def weight_bytes(options: Options) -> float:
    """Bytes per weight that does not train."""
    model = options.model
    if model.load_in_4bit:
        return 0.56  # 4 bits, and the constants of blocks of 64
    if model.load_in_8bit:
        return 1.0
    return 2.0 if model.dtype in ("bfloat16", "float16") else 4.0


def show(
    options: Options, batches: BatchSizes, facts: dict[str, int], needs: list[memory.Need]
) -> None:
    """Print the plan."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    sizes = Table(title="sizes", show_header=False, title_justify="left")
    for name, value, how in size_rows(options, batches, facts):
        sizes.add_row(name, value, how)
    console.print(sizes)
    # Eight columns have to fit into the 80 characters of a plain terminal.
    table = Table(
        title="memory per process, estimated",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    columns = ("model", "params", "trained", "weights", "grads", "optim")
    for name in (*columns, "activ.", "cache"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for n in needs:
        parts = (n.weights, n.gradients, n.optimizer, n.training, n.generation)
        table.add_row(n.role, short(n.parameters), short(n.trained), *map(human, parts))
    console.print(table)
    console.print(
        "params: parameters; grads and optim: gradients and optimizer state of those that train; "
        "activ.: activations and logits of a micro-batch; cache: keys and values while sampling\n"
        f"peak about {human(memory.peak(needs))} per process, before sharding by FSDP or DeepSpeed"
    )


def size_rows(
    options: Options, batches: BatchSizes, facts: dict[str, int]
) -> list[tuple[str, str, str]]:
    """Every size with its name and where it comes from."""
    response = options.config.response_length
    per_update = batches.batch_size * (longest(facts) + response)
    warmup = warmup_iterations(options.config, batches.iterations)
    return [
        ("processes", f"{batches.world_size:,}", ""),
        *((name, f"{value:,}", "") for name, value in facts.items()),
        ("batch", f"{batches.batch_size:,}", f"samples; {batches.local_rows} per process"),
        ("prompts per update", f"{batches.prompts:,}", f"{batches.group} responses each"),
        (
            "mini-batch",
            f"{batches.mini_batch_size:,}",
            f"samples per optimizer step; {batches.local_mini_rows} per process",
        ),
        (
            "micro-batch",
            f"{batches.micro_batch_size:,}",
            f"samples per forward pass; {batches.micro_rows} per process, "
            f"{batches.micro_batches} passes per optimizer step",
        ),
        (
            "optimizer steps per update",
            f"{batches.optimizer_steps_per_iteration:,}",
            f"{batches.epochs} passes x {batches.minibatches} mini-batches",
        ),
        ("updates", f"{batches.iterations:,}", f"{warmup} of them warm-up"),
        ("optimizer steps", f"{batches.optimizer_steps:,}", ""),
        ("episodes", f"{batches.episodes:,}", "responses generated"),
        ("tokens per update", f"{per_update:,}", "at most, prompt and response"),
        ("response tokens", f"{batches.episodes * response:,}", "at most, in the run"),
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
