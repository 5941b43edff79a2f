"""The classic trainer: you generate and score responses, ``step`` runs one PPO iteration."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data import Dataset as TorchDataset
from transformers import DataCollatorForLanguageModeling

from kedge.algorithms.ppo import ppo
from kedge.checkpoint import checkpoint
from kedge.data.prompts import pad_id
from kedge.ext.trl.classic.assembly import (
    SCHEDULER,
    check_arguments,
    check_kind,
    make_accelerator,
    make_learner,
)
from kedge.ext.trl.classic.config import AdaptiveKLController, FixedKLController, PPOConfig
from kedge.ext.trl.classic.core import (
    PPODecorators,
    convert_to_scalar,
    random_state,
    set_random_state,
    set_seed,
    stats_to_np,
)
from kedge.ext.trl.classic.models import create_reference_model
from kedge.ext.trl.classic.reports import log_batch, model_card, push
from kedge.ext.trl.classic.samples import (
    Samples,
    build_rollout,
    build_samples,
    check_samples,
    on_grid,
    pad_tensors,
    scale_scores,
    total_scores,
)
from kedge.ext.trl.classic.stats_recorder import (
    KEYS,
    STAGES,
    StatsRecorder,
    over_steps,
    update_statistics,
)
from kedge.ext.trl.classic.steps import ESTIMATORS, GradientAccumulator, PPOSteps, step_by_step
from kedge.learner.optim import check_optimizer_covers
from kedge.loop.batch_sizes import BatchSizes
from kedge.loop.updater import Updater
from kedge.math.running import RunningMoments
from kedge.models.fingerprint import fingerprint
from kedge.models.load import as_list
from kedge.models.model import in_float32
from kedge.records.errors import CheckpointError, ConfigError, DataError
from kedge.records.types import RewardOutput, Sample, require
from kedge.suggestions import suggest_names

_UPDATER = ("step", "learner", "kl")  # keys of the updater's state in a checkpoint
_PREPARE = "; prepare their loader with trainer.accelerator.prepare(dataloader)"


@suggest_names("argument", config=PPOConfig)
class PPOTrainer(PPOSteps):
    """PPO one step at a time.

        responses = trainer.generate(queries, return_prompt=False, **options)
        scores = [torch.tensor(...) for ...]
        stats = trainer.step(queries, responses, scores)

    A subclass may override the steps of PPO: ``prepare_model_inputs``, ``batched_forward_pass``,
    ``compute_rewards``, ``compute_advantages``, ``loss``, ``train_minibatch``,
    ``record_step_stats``, ``gather_stats``, ``_kl_penalty``, ``_early_stop`` and
    ``_step_safety_checker``.  ``step`` then calls each one in turn, with the arguments and shapes
    of TRL 0.11, and uses what it returns; without an override, a faster path computes the same
    weights.  In their shapes T is the length of the longest query with its response, minus one.

    Args:
        config: a ``PPOConfig``.
        model: the policy with a value head; its trainable weights are trained.
        ref_model: the reference of the KL penalty; None: a frozen copy of the initial policy, or
            for a PEFT model its base without the adapter.
        tokenizer: of the policy.
        dataset: for ``dataloader``; None: bring your own batches.
        optimizer: None: Adam.
        data_collator: makes batches for ``dataloader``; None: columns as lists, ``input_ids`` as
            tensors; rows that are not dictionaries use torch's default collation.
        num_shared_layers: see ``create_reference_model``; only without ``ref_model``.
        lr_scheduler: schedule of your optimizer, advanced once per ``step``.
        training_data_collator: pads rows for the forward passes of ``step``, which then runs step
            by step as if ``prepare_model_inputs`` was overridden; None: rows are packed without
            padding, which is faster.
    """

    def __init__(
        self,
        config: PPOConfig = None,  # type: ignore[assignment]
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Optimizer | None = None,
        data_collator: Any = None,
        num_shared_layers: int | None = None,
        lr_scheduler: LRScheduler | None = None,
        training_data_collator: Any = None,
    ) -> None:
        check_arguments(
            config, model, ref_model, tokenizer, optimizer, lr_scheduler, num_shared_layers
        )
        if in_float32(model, "model") and ref_model is not None:
            ref_model.float()  # otherwise the KL would include the difference in precision
        set_seed(config.seed)
        self.config, self.model = config, model
        self.tokenizer = self.processing_class = tokenizer
        self._usual_collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        self.data_collator = training_data_collator or self._usual_collator
        self.accelerator = make_accelerator(config)
        if ref_model is None and not model.is_peft_model:
            ref_model = create_reference_model(model, num_shared_layers)
        self._ref_model = ref_model
        self.learner = make_learner(
            config, model, ref_model, self.accelerator, optimizer, lr_scheduler
        )
        self._gradients = GradientAccumulator(self.learner)
        self._overridden()
        c, self._recorder = config, StatsRecorder()
        self._updater = Updater(
            learner=self.learner,
            kl=AdaptiveKLController(c.init_kl_coef, c.target, c.horizon)
            if c.adap_kl_ctrl
            else FixedKLController(c.init_kl_coef),
            hooks=[self._recorder],
            seed=config.seed,
            **self._engine_options(),
        )
        self.running = RunningMoments(self.learner.all_reduce)
        self.dataset, self.dataloader = dataset, None
        if dataset is not None:
            self.dataloader = self.accelerator.prepare(
                self.prepare_dataloader(dataset, data_collator)
            )
        else:
            warnings.warn(
                f"no dataset was given: pass batch_size={config.batch_size} samples to "
                "step() on each process" + _PREPARE * self.is_distributed,
                stacklevel=3,
            )
        self.highest_reward: float | None = None
        self._since_best = 0

    def _engine_options(self) -> dict[str, Any]:
        """The engine's options from ``config``, which may change between steps."""
        c = self.config
        self.algorithm = ppo(
            gamma=c.gamma,
            lam=c.lam,
            cliprange=c.cliprange,
            cliprange_value=c.cliprange_value,
            vf_coef=c.vf_coef,
            kl_estimator=ESTIMATORS[c.kl_penalty],
            whiten_rewards=c.whiten_rewards,
            whiten_advantages="batch",
        )
        sizes = BatchSizes(
            world_size=c.world_size or 1,
            micro_rows=c.mini_batch_size,
            local_rows=c.batch_size,
            minibatches=c.batch_size // (c.backward_batch_size or c.batch_size),
            epochs=c.ppo_epochs,
            group=1,
            iterations=c.total_ppo_epochs,
        )
        return {
            "algorithm": self._recorder.record_algorithm(self.algorithm),
            "batch_sizes": sizes,
            "step_limits": self._step_limits,
        }

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self.learner.optimizer
        return AcceleratedOptimizer(optimizer, False) if self._accumulates else optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        check_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        check_optimizer_covers(optimizer, self.learner._trained())
        before, self.learner.optimizer = self.learner.optimizer, optimizer
        if isinstance(self.learner.scheduler, ConstantLR) and before is not optimizer:
            self.learner.scheduler = ConstantLR(optimizer, 1.0, 0)

    @property
    def lr_scheduler(self) -> LRScheduler:
        """The learning-rate schedule; constant by default."""
        return self.learner.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler | None) -> None:
        check_kind("lr_scheduler", scheduler, LRScheduler | None, SCHEDULER)
        self.learner.scheduler = scheduler or ConstantLR(self.learner.optimizer, 1.0, 0)

    @property
    def model_params(self) -> list[nn.Parameter]:
        """The trainable weights."""
        return [p for p in self.model.parameters() if p.requires_grad]

    # Batches

    def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> DataLoader[Any]:
        """Shuffled batches of ``batch_size`` rows; an incomplete last batch is dropped.

        A dataset with a text column "query" and no "input_ids" is tokenized.
        """
        kinds = "a datasets.Dataset or a torch Dataset"
        check_kind("dataset", dataset, Dataset | TorchDataset, kinds)
        if isinstance(dataset, Dataset):
            names = dataset.column_names
            if not {"input_ids", "query"} & set(names):
                raise DataError(
                    "the dataset must have a text column 'query' or token ids in 'input_ids'; its "
                    f"columns: {', '.join(names)}"
                )
            if "input_ids" not in names:
                dataset = dataset.map(
                    lambda row: {"input_ids": self.tokenizer.encode(row["query"])},
                    num_proc=self.config.dataset_num_proc,
                )
            dataset = self._remove_unused_columns(dataset)
        streams, size = isinstance(dataset, IterableDataset), self.config.batch_size
        if not streams and len(dataset) < size:
            raise DataError(
                f"the dataset has {len(dataset)} rows, fewer than batch_size={size}; add rows or "
                "lower batch_size"
            )
        return DataLoader(
            dataset,
            batch_size=size,
            collate_fn=data_collator or _as_lists,
            shuffle=not streams,
            drop_last=True,
        )

    def _remove_unused_columns(self, dataset: Dataset) -> Dataset:
        """The dataset without unused columns, if ``remove_unused_columns``."""
        if not self.config.remove_unused_columns:
            return dataset
        read = {*inspect.signature(self.model.pretrained_model.forward).parameters}
        read |= {"input_ids", "label", "query", "response"}
        return dataset.remove_columns([n for n in dataset.column_names if n not in read])

    # Sampling

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample responses with transformers' ``generate``.

        Args:
            query_tensor: int64 [P], or a list of them.
            length_sampler: draws ``max_new_tokens``, once per ``batch_size`` queries.
            batch_size: queries of a list to sample together.
            return_prompt: whether to return the query before its response; an encoder-decoder
                returns its start token instead.
            generate_ref_response: also sample from the reference.
            **generation_kwargs: arguments of transformers' ``generate``.

        Returns:
            Int64 [1, n] for one query; for a list, a list of int64 [n_i], each up to its first end
            token.  With ``generate_ref_response`` a pair, the reference's second.
        """
        if isinstance(query_tensor, Tensor) and query_tensor.dim() != 1:
            raise DataError(
                "query_tensor must be one query of shape (length,) or a list of them, got shape "
                f"{tuple(query_tensor.shape)}"
            )

        def sample(model: Any) -> Any:
            if isinstance(query_tensor, list):
                options: Any = (length_sampler, batch_size, return_prompt)
                return self._generate_batched(model, query_tensor, *options, **generation_kwargs)
            model.eval()
            ids, mask = query_tensor[None], torch.ones_like(query_tensor)[None]
            output = _sample(model, ids, mask, length_sampler, generation_kwargs)
            skip = 0 if return_prompt or self.is_encoder_decoder else len(query_tensor)
            return output[:, skip:]

        response = sample(self.model)
        if not generate_ref_response:
            return response
        if self.ref_model is not None:
            return response, sample(self.ref_model)
        with self.optional_peft_ctx():
            return response, sample(self.model)

    def _generate_batched(
        self,
        model: Any,
        query_tensors: list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        pad_to_multiple_of: int | None = None,
        remove_padding: bool = True,
        **generation_kwargs: Any,
    ) -> list[Tensor]:
        """``generate`` for a list of queries int64 [P_i], from one model.

        Queries are padded on the left to a multiple of ``pad_to_multiple_of``; with
        ``remove_padding`` a response is cut after its first end token.
        """
        for i, query in enumerate(query_tensors):
            if query.dim() != 1 or not len(query):
                raise DataError(
                    f"query_tensor[{i}] must have shape (length,) with at least one token, got "
                    f"shape {tuple(query.shape)}"
                )
        model.eval()
        options = {"pad_token_id": pad_id(self.tokenizer), **generation_kwargs}
        model_config = getattr(getattr(model, "pretrained_model", model), "generation_config", None)
        stops = options.get("eos_token_id", getattr(model_config, "eos_token_id", None))
        device = next(model.parameters()).device
        ends = torch.tensor([*as_list(self.tokenizer.eos_token_id), *as_list(stops)], device=device)
        pad, responses = options["pad_token_id"] or 0, []
        for i in range(0, len(query_tensors), batch_size):
            queries = query_tensors[i : i + batch_size]
            ids = pad_tensors(queries, pad, left=True)
            mask = pad_tensors([torch.ones_like(x) for x in queries], left=True)
            extra = -ids.shape[1] % (pad_to_multiple_of or 1)
            ids, mask = F.pad(ids, (extra, 0), value=pad), F.pad(mask, (extra, 0))
            rows = _sample(model, ids, mask, length_sampler, options)
            begin = 1 if self.is_encoder_decoder else ids.shape[1]  # a start token may be EOS
            for query, row in zip(queries, rows, strict=True):
                new = row[begin:]
                ended = torch.isin(new, ends.long()).nonzero()[:1, 0].tolist()
                if ended and remove_padding:
                    new = new[: ended[0] + 1]
                if self.is_encoder_decoder:
                    new = torch.cat([row[:begin], new])
                elif return_prompt:
                    new = torch.cat([query.to(new), new])
                responses.append(new)
        return responses

    # One iteration

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """One PPO iteration on ``batch_size`` samples of this process.

        Args:
            queries: int64 [P_i] each.
            responses: int64 [R_i] each; an empty one is ignored.
            scores: float [] or [1] each, or float [R_i]: a reward for every token.
            response_masks: [R_i] each; tokens with 0 get no loss and no reward (tool output).

        Returns:
            The statistics of ``docs/reference/classic.md``: floats, and numpy arrays per token.
        """
        self._recorder.begin()
        c = self.config
        c.check()
        for name, option in self._engine_options().items():
            setattr(self._updater, name, option)
        self.learner.settings = replace(
            self.learner.settings,
            forward_rows=c.mini_batch_size,
            max_grad_norm=c.max_grad_norm or 0.0,
        )
        replaced = self._overridden()
        checked = self._step_safety_checker(
            c.batch_size, queries, responses, scores, response_masks
        )
        if "_step_safety_checker" in replaced:
            check_samples(c.batch_size, *checked)
        samples = build_samples(*checked, start=self._start_token)
        scaled = scale_scores(
            samples.scores,
            self.running,
            scale=c.use_score_scaling,
            norm=c.use_score_norm,
            clip=c.score_clip,
        )
        self._push_if_best(scaled)
        if replaced - {"_step_safety_checker"}:
            stats = step_by_step(self, samples, scaled, masked=checked[3] is not None)
        else:
            stats = self._fast_step(samples, scaled)
        for weight in self.model.parameters():  # zero gradients, as accelerate leaves them
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        PPODecorators.optimize_device_cache = c.optimize_device_cache
        with PPODecorators.empty_device_cache():
            return {name: stats[name] for name in KEYS if name in stats} | stats

    def _fast_step(self, samples: Samples, scores: RewardOutput) -> dict[str, Any]:
        """One iteration by the training engine: rows packed without padding, logits never kept."""
        rollout = build_rollout(
            samples,
            pad=pad_id(self.tokenizer),
            eos=self.tokenizer.eos_token_id,
            first_row=self.learner.rank * self.config.batch_size,
            version=self.learner.version,
        )
        recorder, times = self._recorder, [time.perf_counter()]
        kl_coef = float(self.kl_ctl.value)
        metrics = self._updater.train_on(Sample(rollout=rollout, reward_output=scores))
        times.append(time.perf_counter())
        inputs = require(recorder.advantage_inputs, "advantage_inputs")
        kl = require(require(recorder.advantage_output, "advantage_output").kl, "kl")
        rollout, outputs = inputs.rollout, inputs.model_outputs
        present = rollout.response_mask.cpu()
        grid_queries = None if self.is_encoder_decoder else samples.queries

        def grid(x: Tensor) -> Tensor:
            return on_grid(x.cpu(), present, grid_queries)

        total = self.learner.all_reduce
        stats = update_statistics(
            kl_coef,
            scores=total_scores(scores),
            logprobs=grid(outputs.logprobs),
            ref_logprobs=grid(require(outputs.ref_logprobs, "ref_logprobs")),
            non_score_reward=grid(-kl_coef * kl),
            masks=grid(rollout.loss_mask.float()) > 0,
            kls=grid(kl),
            queries=samples.queries,
            responses=samples.responses,
            train_stats=over_steps([step.statistics(total) for step in recorder.steps]),
            total=total,
        )
        stats = convert_to_scalar(stats_to_np(stats))
        times.append(time.perf_counter())
        seconds = (  # "rewards" includes building the batch, "advantages" the KL penalty
            recorder.annotated - times[0],
            times[0] - recorder.started,
            recorder.credited - recorder.annotated,
            times[1] - recorder.credited,
            times[2] - times[1],
            times[2] - recorder.started,
        )
        stats |= {f"time/ppo/{name}": x for name, x in zip(STAGES, seconds, strict=True)}
        return stats | {"ppo/learning_rate": float(metrics["lr"])}

    # Logs, files and the hub

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: list[Tensor] | Tensor,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Send the result of ``step`` and a table of the batch to the trackers of ``log_with``.

        ``columns_to_log`` are the columns of the table ``game_log``; rewards per token are summed.
        """
        columns = list(columns_to_log)
        log_batch(self.accelerator, stats, batch, rewards, columns, step=self.current_step)

    def save_state(self, output_dir: str | Path | None = None) -> Path | None:
        """Write everything needed to resume exactly to ``output_dir/checkpoint-N``.

        Saves policy, value head, optimizer, schedule, KL coefficient, running moments and the
        random states of Python, numpy and torch, and returns the checkpoint's folder.  Every
        process calls it.  Without ``output_dir`` it is ``transformers.Trainer.save_state``, for a
        class that inherits from both.
        """
        if output_dir is None:
            parent_save = getattr(super(), "save_state", None)
            if parent_save is None:
                raise ConfigError("save_state needs a folder; call save_state(output_dir)")
            parent_save()
            return None
        updater = self._updater.state_dict()
        parts = {
            **{name: updater[name] for name in _UPDATER},
            "running": self.running.state_dict(),
            "reference": {"fingerprint": self._reference_fingerprint()},
            "best": {"score": self.highest_reward, "calls": self._since_best},
        }
        return checkpoint.save(
            output_dir,
            self.current_step,
            parts,
            local={"random": random_state()},
            rank=self.learner.rank,
            world_size=self.learner.world_size,
            barrier=self.accelerator.wait_for_everyone,
        )

    def load_state(self, folder: str | Path) -> None:
        """Resume from ``save_state``; ``folder`` is a checkpoint or contains checkpoints."""
        path, total = Path(folder), self.learner.all_reduce
        if path.name.startswith("checkpoint-"):
            checkpoint.load_one(path, self._restore)
            return
        newest = checkpoint.load_latest(
            path,
            self._restore,
            anywhere=lambda failed: bool(total(torch.tensor([float(failed)])).item()),
        )
        if newest is None:
            raise CheckpointError(
                f"{folder} has no checkpoint; pass the folder that save_state wrote to"
            )

    def _restore(self, folder: Path) -> None:
        rank, world_size = self.learner.rank, self.learner.world_size
        saved = checkpoint.load(folder, rank=rank, world_size=world_size, verified=True)
        parts = saved.parts
        if self._reference_fingerprint() != str(parts["reference"]["fingerprint"]):
            raise CheckpointError(
                f"the reference differs from that of the checkpoint {folder}; create the trainer"
                " with the model that the run started from, or pass that as ref_model, then load"
                " the state"
            )
        self._updater.load_state_dict({name: parts[name] for name in _UPDATER})
        self.running.load_state_dict(parts["running"])
        self.highest_reward = parts["best"]["score"]
        self._since_best = int(parts["best"]["calls"])
        if saved.local is not None:
            set_random_state(saved.local["random"])

    def _reference_fingerprint(self) -> str:
        """A short hash of the reference: its weights, or those of the adapter's base."""
        model = self.model if self.ref_model is None else self.ref_model
        inner = getattr(model, "pretrained_model", model)
        return fingerprint({n: p for n, p in inner.named_parameters() if not p.requires_grad})

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **push_kwargs: Any,
    ) -> None:
        """Write model, value head, tokenizer and model card; with ``push_to_hub`` upload them, too.

        Only the main process writes; the others return immediately, so all processes or only the
        main one may call it.  ``repo_id`` is the folder's name by default.
        """
        if not self.accelerator.is_main_process:
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._save_pretrained(folder)
        if push_to_hub:
            self.push_to_hub(repo_id or folder.name, **push_kwargs)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write model, value head, tokenizer and model card into an existing folder."""
        self.model.save_pretrained(str(save_directory))
        self.tokenizer.save_pretrained(str(save_directory))
        self.create_model_card(str(save_directory), save_directory.name)

    def push_to_hub(self, repo_id: str, **push_kwargs: Any) -> Any:
        """Upload model, value head, tokenizer and card; the arguments are those of ``push``."""
        if not self.accelerator.is_main_process:
            return None

        def write(folder: str) -> None:
            self._save_pretrained(Path(folder))
            self.create_model_card(folder, repo_id)

        return push(write, repo_id, **push_kwargs)

    def _push_if_best(self, scores: RewardOutput) -> None:
        push_options = self.config.options("push_to_hub_if_best_kwargs")
        if not push_options:
            return
        self._since_best += 1
        if self._since_best % self.config.compare_steps:
            return
        mean = float(self.learner.all_reduce(total_scores(scores).mean())) / self.learner.world_size
        if self.highest_reward is None or mean > self.highest_reward:
            self.highest_reward = mean
            self.push_to_hub(**push_options)

    def create_model_card(self, path: str | Path, model_name: str | None = "TRL Model") -> None:
        """Write ``README.md`` into a folder: the model, how to load it, and its options."""
        Path(path).mkdir(parents=True, exist_ok=True)
        text = model_card(self.config, model_name, loader=type(self.model).__name__)
        (Path(path) / "README.md").write_text(text, encoding="utf-8")


def _as_lists(rows: Sequence[Any]) -> Any:
    """Turn rows into columns; ``input_ids`` is a list of int64 [P_i], ready for ``generate``."""
    if not isinstance(rows[0], Mapping):
        return default_collate(list(rows))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if "input_ids" in columns:
        columns["input_ids"] = [torch.as_tensor(x, dtype=torch.long) for x in columns["input_ids"]]
    return columns


@torch.no_grad()
def _sample(
    model: Any, ids: Tensor, mask: Tensor, length: Callable[[], int] | None, options: dict[str, Any]
) -> Tensor:
    """Call ``generate`` with options that transformers 5 accepts: int top_k, min_length >= 0."""
    options = dict(options)
    if isinstance(options.get("top_k"), float):
        options["top_k"] = int(options["top_k"])
    if (options.get("min_length") or 0) < 0:
        options["min_length"] = 0
    if length is not None:
        options["max_new_tokens"] = int(length())
    device = next(model.parameters()).device
    rows: Tensor = model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), **options
    )
    return rows
