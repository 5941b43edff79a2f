"""``kedge async-ppo``: PPO whose rollout engines sample while the learners train."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kedge.checkpoint.checkpoint import checkpoints
from kedge.cli import ppo
from kedge.cli.arguments import parse
from kedge.cli.data import load_mixture, load_prompts, note
from kedge.cli.options import ModelPaths, Options, model_names
from kedge.config.rollout_engines import find_engine
from kedge.ext.open_instruct.config import AsyncPPOConfig
from kedge.models.load import configuration_source
from kedge.records.errors import ConfigError, DataError, LostLearnerError

_TORCH_DECAY = 0.01  # open-instruct passes AdamW neither a weight decay nor its ``eps``


def main(argv: Sequence[str], *, prog: str = "kedge async-ppo") -> int:
    """Train with asynchronous PPO: Ray and vLLM sample while the learners train."""
    if ppo.parser("async-ppo").show_help(argv):
        return 0
    options = parse_options(argv, prog=prog)
    config = options.config
    if differences := compare(options):
        note(f"differs from open-instruct: {'; '.join(differences)}")
    if config.cache_dataset_only:
        train, test = load_rows(options)
        note(f"{len(train)} prompts to train on, {0 if test is None else len(test)} to evaluate on")
    elif on_ray(config):
        return learn_on_ray(list(argv), options)
    else:
        return int(learn(options).stopped_by is not None)
    return 0


def parse_options(
    argv: Sequence[str], *, prog: str = "kedge async-ppo", config: type = AsyncPPOConfig
) -> Options:
    """Parse the flags; the value model defaults to the reward model, even if it scores nothing."""
    options = parse(argv, prog=prog, config=config)
    script, given = options.script, options.given
    load_template(options.config.chat_template_name)
    unscored = script.reward_model_multiplier == 0 and "reward_model_path" in given
    if unscored and script.value_model_path is None:
        script = replace(script, value_model_path=options.config.reward_model_path)
    return replace(options, script=script)


def compare(options: Options) -> list[str]:
    """Differences from a run of open-instruct with the same flags."""
    config, model = options.config, options.model
    differences = []
    if not config.bf16:
        kind = "float16" if config.fp16 else "float32"
        differences.append(f"{kind} instead of bfloat16 (--bf16)")
    if model.attn_implementation != "flash_attention_2":
        differences.append(
            f"attention {model.attn_implementation or 'as transformers chooses'} instead of"
            " flash_attention_2 (--attn_implementation)"
        )
    if config.stop_token == "eos" and "stop_token" not in options.given:
        differences.append("responses end at EOS (--stop_token none for fixed length)")
    if "learning_rate" not in options.given:
        rate = f"{config.learning_rate:g}"
        differences.append(f"learning rate {rate} instead of 2e-05 (--learning_rate)")
    if config.weight_decay != _TORCH_DECAY:
        differences.append(f"weight decay {config.weight_decay:g} instead of 0.01 (--weight_decay)")
    steps = config.num_ppo_epochs * config.num_mini_batches
    if config.warm_up_steps % steps:
        differences.append(
            f"{config.warm_up_steps} optimizer steps of warmup are rounded up to"
            f" {config.warmup_steps:g} iterations of {steps}"
        )
    return differences


# -- prompts and tokenizer -------------------------------------------------------------------------


def load_rows(options: Options) -> tuple[Any, Any]:
    """Training prompts, and evaluation prompts or None."""
    config, script = options.config, options.script
    if not script.dataset_mixer_list:
        train, test = load_prompts(options)
    elif script.eval_dataset_name is not None:
        raise DataError(
            "--eval_dataset_name needs --dataset_name; with --dataset_mixer_list, set"
            f" --dataset_mixer_eval_list {script.eval_dataset_name} 1.0"
        )
    else:
        splits = config.dataset_mixer_list_splits or [script.dataset_train_split]
        train, test = load_mixture(script.dataset_mixer_list, splits, options), None
    if config.dataset_mixer_eval_list:
        splits = config.dataset_mixer_eval_list_splits or [script.dataset_test_split]
        test = load_mixture(config.dataset_mixer_eval_list, splits, options)
    return _rename_columns(train, config), test and _rename_columns(test, config)


def _rename_columns(rows: Any, config: AsyncPPOConfig) -> Any:
    """Rename columns to those that Kedge reads: prompt, ground_truth, dataset."""
    columns = rows.column_names
    names = {"ground_truth": config.ground_truths_key, "dataset": config.dataset_source_key}
    for ours, theirs in names.items():
        if theirs != ours and theirs in columns:
            if ours in columns:
                rows = rows.remove_columns(ours)
            rows = rows.rename_column(theirs, ours)
    chats = config.sft_messages_key
    if chats in columns and not {"prompt", "query", "input_ids"} & set(columns):
        rows = rows.map(lambda row: {"prompt": without_answer(row[chats])}, remove_columns=[chats])
    return rows


def without_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat without its final assistant turn."""
    last = messages[-1] if messages else {}
    return messages[:-1] if last.get("role") == "assistant" else messages


def load_template(name: str | None) -> str | None:
    """The chat template called ``name``, or the contents of a file; None for None."""
    if name is None:
        return None
    file = Path(__file__).with_name("chat_templates.yaml")
    templates: dict[str, str] = yaml.safe_load(file.read_text(encoding="utf-8"))
    if name in templates:
        return templates[name]
    if not Path(name).is_file():
        raise ConfigError(
            f"chat_template_name={name!r} must be {', '.join(templates)} or a file with a Jinja"
            " template; leave it unset to use the tokenizer's template"
        )
    return Path(name).read_text(encoding="utf-8")


def apply_template(tokenizer: Any, config: AsyncPPOConfig) -> Any:
    """Set the tokenizer's chat template according to the options."""
    tokenizer.chat_template = load_template(config.chat_template_name) or tokenizer.chat_template
    if config.add_bos:
        if tokenizer.bos_token is None or tokenizer.chat_template is None:
            raise ConfigError(
                "add_bos=True needs a tokenizer with a BOS token and a chat template; leave add_bos"
                " unset"
            )
        if "bos_token" not in tokenizer.chat_template:
            tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


def load_run_tokenizer(options: Options, names: ModelPaths) -> Any:
    """The tokenizer, with the chat template that the options name."""
    config = options.config
    name = config.tokenizer_name_or_path or names.tokenizer
    tokenizer = ppo.load_tokenizer(name, options.model, config.tokenizer_revision)
    return apply_template(tokenizer, config)


# -- learners on Ray -------------------------------------------------------------------------------


def on_ray(config: AsyncPPOConfig) -> bool:
    """Whether learners run in Ray actors, as with rollout engines on Ray or several learners."""
    learners = sum(config.actor_num_gpus_per_node or [1])
    launched = "RANK" in os.environ  # set by accelerate: this process is one of its ranks
    return not launched and (find_engine(config).actors or learners > 1)


def learn_on_ray(argv: list[str], options: Options) -> int:
    """Run ``learn`` on every rank and show its progress here; returns 1 as ``learn_from``."""
    from kedge.ext.ray.launch import LaunchLimits, launch
    from kedge.reporting.trackers import ConsoleTracker

    config = options.config
    learners = config.actor_num_gpus_per_node or [1]
    batch = config.local_rollout_batch_size * config.num_generations * sum(learners)
    steps = config.max_steps if config.max_steps > 0 else (config.total_episodes or 0) // batch
    screen = ConsoleTracker(max(1, steps), bar=not config.disable_tqdm)
    engines = config.vllm_num_engines if find_engine(config).actors else 0
    sharding = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true" if config.deepspeed_stage == 3 else "false",
    }
    start = partial(
        launch,
        learners=learners,
        engines=engines,
        gpus_per_engine=config.vllm_tensor_parallel_size,
        rewards=config.ray_reward_workers,
        gpus_per_reward=config.ray_reward_gpus,
        references=config.ray_ref_workers,
        gpus_per_reference=config.ray_ref_gpus,
        single_gpu_mode=config.single_gpu_mode,
        address=config.ray_address,
        environment=sharding if config.deepspeed_stage and sum(learners) > 1 else {},
        limits=LaunchLimits(
            placement=config.ray_wait_seconds,
            start=config.worker_start_timeout,
            heartbeat=config.worker_heartbeat,
            patience=config.worker_timeout,
            stop=config.worker_stop_timeout,
        ),
        on_row=lambda row: screen.log(row, step=int(row["step"])),
    )
    try:
        for failures in range(config.max_failures + 1):
            try:
                stopped = start(partial(learn_from, argv, str(Path.cwd())))
                break
            except LostLearnerError as error:
                if failures == config.max_failures:
                    raise
                saved = checkpoints(config.output_dir or "")
                where = saved[-1].name if saved else "the beginning"
                note(f"{error}\nrestart {failures + 1} of {config.max_failures} from {where}")
                argv = [*argv, *(["--resume_from_checkpoint", "True"] if saved else [])]
    except (KeyboardInterrupt, SystemExit):
        saved = [] if config.save_only_model else checkpoints(config.output_dir or "")
        note(f"stopped; {ppo.resume_line(saved[-1] if saved else None)}")
        raise
    finally:
        screen.close()
    if not stopped:
        note(f"the trained model is in {config.output_dir}")
    return stopped


def learn_from(argv: list[str], folder: str) -> int:
    """Entry point of a rank: parse the flags in the launch folder, and train.

    Returns 1 if ``stop_on_finding`` ended the run, and else 0.
    """
    if Path(folder).is_dir():
        os.chdir(folder)
    return int(learn(parse_options(argv)).stopped_by is not None)


def learn(options: Options) -> Any:
    """Build the trainer of this process and train."""
    config = options.config
    if "wandb" in (config.report_to or []):
        os.environ.setdefault("WANDB_PROJECT", config.wandb_project_name)
        if config.wandb_entity is not None:
            os.environ.setdefault("WANDB_ENTITY", config.wandb_entity)
    options = _at_revision(options)
    names = model_names(options)
    train, test = load_rows(options)
    return ppo.train(
        options,
        train_dataset=train,
        eval_dataset=test,
        tokenizer=load_run_tokenizer(options, names),
        value_model=_random_value_model(options) if config.init_value_from_scratch else None,
    )


def _at_revision(options: Options) -> Options:
    """With ``reward_model_revision``, the options name the downloaded reward model."""
    config, script = copy.copy(options.config), options.script
    name, revision = config.reward_model_path, config.reward_model_revision
    if revision is None or Path(name).expanduser().is_dir():
        return options
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        kinds = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        config.reward_model_path = snapshot_download(name, revision=revision, allow_patterns=kinds)
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise ConfigError(
            f"reward_model_path={name!r} at reward_model_revision={revision!r} cannot be"
            f" downloaded: {error}"
        ) from error
    if script.value_model_path == name:
        script = replace(script, value_model_path=config.reward_model_path)
    return replace(options, config=config, script=script)


def _random_value_model(options: Options) -> Any:
    """A randomly initialized value model with the reward model's architecture."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, set_seed

    script, trust = options.script, options.model.trust_remote_code
    name = script.value_model_path or options.config.reward_model_path
    if "reward_model_path" not in options.given and script.value_model_path is None:
        raise ConfigError(
            "--init_value_from_scratch needs --reward_model_path or --value_model_path for the"
            " architecture of the value model"
        )
    base, _ = configuration_source(name)
    config = AutoConfig.from_pretrained(base, trust_remote_code=trust)
    config.num_labels = 1
    set_seed(options.config.seed)
    return AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust)
