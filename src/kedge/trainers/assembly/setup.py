"""Everything known before weights are loaded: tokenizer, sampling, prompts and sizes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from kedge.algorithms import Algorithm
from kedge.config.base import OnPolicyConfig, check_end
from kedge.config.declare import read_mapping
from kedge.config.rollout_engines import RolloutEngineSpec, find_engine
from kedge.data import DatasetPrompts
from kedge.data.prompts import pad_id
from kedge.learner.distributed import accelerator_for
from kedge.loop.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.models.load import eos_token_ids, load_tokenizer
from kedge.output import check_targets
from kedge.records.errors import ConfigError, DataError
from kedge.records.protocols import PromptSource
from kedge.records.types import Sampling
from kedge.trainers.spec import TrainerInputs, size_options

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)
_INIT_KWARGS = "model_init_kwargs"
_REFUSED_INIT_KWARGS = {
    "device_map": "accelerate places the models; leave it out",
    "use_safetensors": "loading pickled weights can run arbitrary code; leave it out",
    "output_loading_info": "it changes the return value; leave it out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One set of evaluation prompts."""

    prefix: str  # "eval_" or "eval_<name>_"
    source: PromptSource
    batches: int
    rows: int  # total number of responses


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything known about a run before weights are loaded."""

    inputs: TrainerInputs
    algorithm: Algorithm
    accelerator: Accelerator
    tokenizer: Any
    sampling: Sampling
    prompts: DatasetPrompts
    sizes: BatchSizes
    eval_sets: list[EvalSet]
    engine: RolloutEngineSpec  # selected by the config
    pad_id: int  # token id that pads responses
    loading: Mapping[str, Any]  # arguments of ``load_policy`` for the policy and the reference

    @property
    def args(self) -> OnPolicyConfig:
        """The trainer's copy of the config, with the derived sizes."""
        return self.inputs.args

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of mixed precision; None is float32."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    @property
    def value_warmup_steps(self) -> int:
        """Iterations at the start that train only the value model."""
        return getattr(self.args, "value_warmup_steps", 0) if self.algorithm.needs_values else 0


def build_setup(inputs: TrainerInputs) -> Setup:
    """Check the output folders, tokenize the prompts and derive the sizes."""
    args = inputs.args
    check_targets(args)
    accelerator = accelerator_for(args)
    tokenizer = find_tokenizer(inputs.processing_class, inputs.model, args)
    assert inputs.model is not None  # find_tokenizer requires it
    kwargs = init_kwargs(args)
    eos_ids = eos_token_ids(
        inputs.model,
        tokenizer,
        revision=kwargs.get("revision"),
        trust_remote_code=kwargs.get("trust_remote_code", trusts_remote_code(args)),
    )
    sampling = build_sampling(args, eos_ids)
    algorithm = inputs.spec.build_algorithm(
        args,
        inputs.algorithm,
        ref_model=inputs.ref_model,
        value_model=inputs.value_model,
        reward_weights=inputs.reward_weights,
    )
    prompts, sizes = build_prompts(
        inputs.train_dataset,
        args,
        tokenizer,
        accelerator,
        collator=inputs.data_collator,
        min_group=algorithm.min_group,
    )
    for name in ("whiten_advantages", "whiten_rewards"):
        if getattr(args, name, False) and sizes.batch_size * args.response_length < 2:
            raise ConfigError(
                f"{name}=True needs a batch of at least 2 tokens, got one sample with "
                f"response_length=1, which has no variance; enlarge the batch or set {name}=False"
            )
    for name, size in sizes.derived().items():
        if getattr(args, name) not in (None, size):
            raise ConfigError(
                f"{name}={getattr(args, name)} must be {size}, as the other sizes imply"
                f" (per_device_train_batch_size={args.per_device_train_batch_size},"
                f" gradient_accumulation_steps={args.gradient_accumulation_steps}, ...); change"
                " those and leave it unset"
            )
        setattr(args, name, size)  # only in the trainer's copy
    return Setup(
        inputs=inputs,
        algorithm=algorithm,
        accelerator=accelerator,
        tokenizer=tokenizer,
        sampling=sampling,
        prompts=prompts,
        sizes=sizes,
        eval_sets=build_eval_sets(inputs.eval_dataset, args, tokenizer, accelerator),
        engine=find_engine(args),
        pad_id=pad_id(tokenizer),
        loading=loading_options(inputs),
    )


def build_sampling(config: Any, eos_token_ids: Sequence[int]) -> Sampling:
    """Sampling distribution of responses and where they end."""
    check_end(config, has_eos=bool(eos_token_ids))
    stops = [*eos_token_ids] if config.stop_token == "eos" else []
    stops += [] if config.stop_token_id is None else [config.stop_token_id]
    stops += config.stop_token_ids or []
    if config.stop_token == "eos" and not (stops or config.stop_strings):
        logger.warning(
            "neither the tokenizer nor the model's generation_config has an EOS token: every"
            " response has response_length=%d tokens",
            config.response_length,
        )
    cut = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if given := [f"{n}={x}" for n, off in cut.items() if (x := getattr(config, n)) != off]:
        logger.warning(
            "%s: training normalizes over the tokens that could be sampled, which are recorded",
            ", ".join(given),
        )
    return Sampling(
        max_new_tokens=config.response_length,
        min_new_tokens=config.min_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        stop_ids=tuple(dict.fromkeys(stops)),
        stop_strings=tuple(config.stop_strings or ()),
    )


# -- tokenizers and models given by name --------------------------------------------------------


def trusts_remote_code(config: OnPolicyConfig) -> bool:
    """Whether code from model repositories may run."""
    return config.trust_remote_code


def find_tokenizer(processing_class: Any, model: Any, args: OnPolicyConfig) -> Any:
    """Find the tokenizer: given as object, name or folder, in a processor, or with the model."""
    if model is None or model == "" or not isinstance(model, str | nn.Module):
        raise ConfigError(f"model={model!r} must be the policy: a model, a folder or a hub name")
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    name = processing_class if isinstance(processing_class, str) else name
    if isinstance(name, str) and name and isinstance(processing_class, str | None):
        revision = None if processing_class else init_kwargs(args).get("revision")  # of the model
        return load_tokenizer(name, trust_remote_code=trusts_remote_code(args), revision=revision)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer is None or not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(
            f"processing_class={processing_class!r} must be a tokenizer, for example"
            " AutoTokenizer.from_pretrained(...)"
        )
    return tokenizer


def pick_tokenizer(processing_class: Any, tokenizer: Any) -> Any:
    """The given object (perhaps a processor), or for None or a name the loaded tokenizer."""
    return tokenizer if isinstance(processing_class, str | None) else processing_class


def init_kwargs(config: OnPolicyConfig) -> dict[str, Any]:
    """``model_init_kwargs``, with ``torch_dtype`` renamed to ``dtype``."""
    kwargs = read_mapping(config.model_init_kwargs)
    for name, reason in _REFUSED_INIT_KWARGS.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"{_INIT_KWARGS} sets {name}={kwargs[name]!r}: {reason}")
        kwargs.pop(name, None)
    if "torch_dtype" in kwargs:
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    return kwargs


def loading_options(inputs: TrainerInputs) -> dict[str, Any]:
    """Arguments of ``load_policy`` for the policy and a reference by name."""
    kwargs = init_kwargs(inputs.args)
    if inputs.quantization_config is not None:
        kwargs["quantization_config"] = inputs.quantization_config
    if kwargs and not isinstance(inputs.model, str):
        raise ConfigError(
            f"{', '.join(kwargs)} cannot be set ({_INIT_KWARGS}, quantization_config): the model is"
            " already loaded; pass them when you load it"
        )
    if "quantization_config" in kwargs and inputs.peft_config is None:
        raise ConfigError(
            "quantization_config freezes the weights; pass a peft_config to train an adapter"
        )
    if inputs.args.bf16 and inputs.peft_config is not None and isinstance(inputs.model, str):
        kwargs.setdefault("dtype", "bfloat16")  # the base under the adapter is frozen
    return to_load_kwargs({"trust_remote_code": trusts_remote_code(inputs.args)} | kwargs)


def to_load_kwargs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of ``from_pretrained`` to those of ``load_policy``."""
    names = {"dtype", "revision", "attn_implementation", "trust_remote_code"}
    arguments = {name: x for name, x in options.items() if name in names}
    arguments["quantization"] = options.get("quantization_config")
    rest = {n: x for n, x in options.items() if n not in names and n != "quantization_config"}
    return arguments | {"more": rest}


# -- prompts ------------------------------------------------------------------------------------


def build_prompts(
    dataset: Any,
    args: OnPolicyConfig,
    tokenizer: Any,
    accelerator: Accelerator,
    *,
    collator: Any = None,
    min_group: int = 1,
) -> tuple[DatasetPrompts, BatchSizes]:
    """Tokenize the training prompts and derive the batch sizes."""
    if dataset is None:
        raise DataError("train_dataset=None: pass a dataset with a `prompt` column")
    options = size_options(args) | {
        "world_size": accelerator.num_processes,
        "min_group": min_group,
    }
    draft = compute_batch_sizes(**options | {"max_steps": 1})
    prompts = _prompt_source(
        dataset,
        args,
        tokenizer,
        accelerator,
        prompts_per_step=draft.prompts,
        num_generations=draft.group,
        shuffle=args.shuffle_dataset,
        data_collator=collator,
    )
    return prompts, compute_batch_sizes(**options, dataset_rows=len(prompts))


def _prompt_source(
    dataset: Any, args: OnPolicyConfig, tokenizer: Any, accelerator: Accelerator, **options: Any
) -> DatasetPrompts:
    """This rank's shard of a dataset's prompts."""
    return DatasetPrompts(
        dataset,
        tokenizer,
        seed=args.seed if args.data_seed is None else args.data_seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        max_prompt_length=args.max_prompt_length,
        overlong=args.overlong_prompts,
        chat_template_kwargs=read_mapping(args.chat_template_kwargs),
        dataset_num_proc=args.dataset_num_proc,
        **options,
    )


def build_eval_sets(
    dataset: Any, args: OnPolicyConfig, tokenizer: Any, accelerator: Accelerator
) -> list[EvalSet]:
    """Build evaluation prompts from no dataset, one, or a dict of named ones."""
    if dataset is None:
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        if strategy != "no":
            raise ConfigError(
                f"eval_strategy={strategy!r} needs an eval_dataset; pass one, or set"
                " eval_strategy='no'"
            )
        if args.eval_against_start:
            raise ConfigError("eval_against_start=True needs an eval_dataset; pass one")
        return []
    named = {"eval_": dataset}
    if isinstance(dataset, Mapping) and not {"prompt", "query", "input_ids"} & set(dataset):
        named = {f"eval_{name}_": rows for name, rows in dataset.items()}
    per_batch = args.per_device_eval_batch_size * accelerator.num_processes
    sets, completions = [], args.num_generations_eval or 1
    for prefix, rows in named.items():
        if hasattr(rows, "__len__") and not len(rows):
            name = prefix.removeprefix("eval_").removesuffix("_")
            shown = f"[{name!r}]" if name else ""
            raise DataError(f"eval_dataset{shown} is empty; pass at least one prompt")
        source = _prompt_source(
            rows,
            args,
            tokenizer,
            accelerator,
            prompts_per_step=per_batch,
            num_generations=completions,
            shuffle=False,
        )
        batches = math.ceil(len(source) / per_batch)
        sets.append(
            EvalSet(prefix=prefix, source=source, batches=batches, rows=len(source) * completions)
        )
    return sets
