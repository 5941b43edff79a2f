"""The learner, built on transformers, torch and accelerate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments

from kedge.learner import optim
from kedge.learner.distributed import (
    GatheredEngine,
    accelerator_for,
    all_gather_rows,
    all_reduce,
    broadcast_parameters,
    broadcast_unsharded,
    reshard,
    shard,
    shard_optimizer_state,
    sharding_strategy,
)
from kedge.learner.learner_state import (
    WeightCopier,
    all_finite,
    full_state,
    load_weights,
    read_state,
)
from kedge.learner.logprobs import (
    ActorCritic,
    ForwardOutput,
    Value,
    build_request,
    compute_logprobs,
)
from kedge.learner.reference import FrozenModel, Reference, RemoteReference
from kedge.learner.settings import LearnerSettings
from kedge.models.backbone import BackboneCache
from kedge.models.compatibility import check_rows
from kedge.models.fingerprint import fingerprint, policy_weights
from kedge.models.model import (
    LanguageModelParts,
    causal_parts,
    check_trainable,
    checkpoint_activations,
    no_dropout,
    reached_weights,
    rounds_activations,
    set_training,
)
from kedge.models.packing import forward_passes, padding_budget, split_by_length, to_device
from kedge.models.peft import own_adapters
from kedge.models.shared_base import AdapterValue, checkpointing_options
from kedge.models.value_head import ScalarModel
from kedge.ops.attention import use_own_attention
from kedge.ops.kernels import Kernels
from kedge.ops.products import backend
from kedge.records.errors import ConfigError, KedgeError
from kedge.records.histogram import ratio_range
from kedge.records.protocols import LossFn, RolloutEngine, ShouldApply, always
from kedge.records.types import Experience, MicroBatch, ModelOutputs, PolicyOutput, Rollout

_NO_LIMIT = 2**62  # padding tokens, if ranks must run equally many passes
_PATIENCE = 3  # optimizer steps that may be skipped in a row
_PATIENCE_FP16 = 25  # the first loss scale is too high by design and is halved until it fits


class HFLearner:
    """Holds policy, value model, reference and optimizer.

    Args:
        policy: causal language model.
        args: optimizer, schedule, weight decay and compilation are read from it.
        settings: all other settings.
        value: a separate model, an adapter or a head on the policy's backbone, or None.
        reference: frozen policy of the KL term, or None.
        remote: computes the reference's log-probabilities instead of ``reference``.
        accelerator: device, precision and processes; None: built from ``args``.
        optimizers: (optimizer, scheduler); None: built from ``args``.
        parts: backbone and head of the policy; None: those of a causal language model.

    Raises:
        ConfigError: a model cannot be trained with these settings.
    """

    def __init__(
        self,
        policy: nn.Module,
        args: TrainingArguments,
        settings: LearnerSettings,
        *,
        value: Value | None = None,
        reference: Reference | None = None,
        remote: RemoteReference | None = None,
        accelerator: Accelerator | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        parts: LanguageModelParts | None = None,
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator or accelerator_for(args)
        self.rank, self.world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.shards = sharding_strategy(self.accelerator)
        self.sharded = self.shards != "none"  # weights are sharded across ranks
        self.device = self.accelerator.device
        self.policy, self.value = policy, value
        parts = parts or causal_parts(policy)
        self.module = ActorCritic(policy, parts, value, recomputes=settings.gradient_checkpointing)
        self.reference, self.remote = reference, remote
        self._prepare()
        reached = self._reached_weights(parts)
        if optimizers[0] is None:
            reached = []  # a list would keep whole models that are sharded next
        if self.sharded:
            self._shard(optimizers[0])
        else:
            self._move()
        self.optimizer = optimizers[0] or optim.build_optimizer(args, self._groups(args))
        if optimizers[0] is not None:
            optim.check_optimizer_covers(self.optimizer, self._trained() | {"policy": reached})
        self.scheduler = optimizers[1] or optim.build_schedule(
            args,
            self.optimizer,
            settings.total_iterations,
            delay=settings.value_warmup_steps,
            delayed=self._trained()["policy"],
        )
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.accelerator.mixed_precision == "fp16"
        )
        self._plan_passes(args)
        self._bucket_mb = args.ddp_bucket_cap_mb or 25
        self.version = self.skipped = self._skips_in_row = 0
        self.copy_weights = WeightCopier()  # copies for rollout engines
        self._stepped = False  # whether the weights changed since the last version

    def _plan_passes(self, args: TrainingArguments) -> None:
        """Choose kernels, cached states and packing; compiled or sharded models use none of them.

        Results equal those of plain passes, up to the order of floating-point additions.
        """
        if args.torch_compile:
            self.module.compile_backbones(args.torch_compile_backend, args.torch_compile_mode)
        for model in self._all_models():
            use_own_attention(model)
        settings, plain = self.settings, not (args.torch_compile or self.sharded)
        models = self._all_models() if plain else []
        self._kernels = Kernels(models)
        owners: list[Any] = [self.module.parts, self.value, getattr(self.reference, "parts", None)]
        self._backbones = BackboneCache(owners if plain and settings.cache_trunk else [])
        # compute a prompt once for all its rows in a micro-batch
        self.shares_prompts = plain and self.module.enable_packing(self.reference)
        budget = settings.padding_budget
        if budget is None:
            output, skipped = self.module.parts.output, self._backbones.skipped
            budget = padding_budget(self.policy, output, skipped, joined=self.shares_prompts)
        self._max_padding = budget

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Context of forward and backward passes."""
        with self._kernels.active(), self._backbones.active():
            yield

    def _prepare(self) -> None:
        no_dropout(self.module)
        check_trainable(
            self.module.named_parameters(), allow_low=self.settings.allow_low_precision_weights
        )
        options = checkpointing_options(self.settings.checkpointing_options, self.value)
        for model in self._models() if self.settings.gradient_checkpointing else []:
            checkpoint_activations(model, options)
        set_training(self.module, False)
        if self.device.type == "cpu":
            # Recomputed activations would fragment the heap between objects of the graph.
            backend().keep_freed_memory(not (self.module.recomputes or self.sharded))

    def _reached_weights(self, parts: LanguageModelParts) -> list[nn.Parameter]:
        """The policy's weights that will train; a value model must not train alone."""
        trainable = {id(p) for p in self._trained()["policy"]}
        reached = [p for p in reached_weights(self.policy, parts) if id(p) in trainable]
        if not reached:
            names = [n for n, p in self.policy.named_parameters() if id(p) in trainable]
            problem = f"its log-probabilities depend on none of those that have: {names[:3]}"
            raise ConfigError(
                f"the policy ({type(self.policy).__name__}) would not train: no weight that it"
                f" computes with has requires_grad=True"
                f"{f' ({problem})' if names else ''}; load an adapter with is_trainable=True, or"
                " call requires_grad_(True) on the weights to train"
            )
        return reached

    def _move(self) -> None:
        """Move all models to the device, with the weights of rank 0."""
        for model in [self.module, *(self.reference.separate_models if self.reference else [])]:
            model.to(self.device)
        if self.world_size > 1:
            broadcast_parameters([self.module, *self._all_models()])

    def _shard(self, optimizer: Optimizer | None) -> None:
        if optimizer is not None or self.accelerator.mixed_precision == "fp16":
            raise ConfigError(
                "sharded models need an optimizer built from options (optim=..., not optimizers=)"
                " and bf16 or float32 (fp16=False)"
            )
        resharding = self.shards == "weights"
        for model in self._all_models():
            shard(
                model,
                self.device,
                self.world_size,
                reshard_after_forward=resharding,
                dtype=torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None,
            )
        broadcast_unsharded(self.module, self.device)  # a value head on the policy is not sharded

    def _all_models(self) -> list[nn.Module]:
        return [*self._models(), *(self.reference.separate_models if self.reference else [])]

    def _models(self) -> list[nn.Module]:
        return [self.policy, *([self.value.model] if isinstance(self.value, ScalarModel) else [])]

    def _groups(self, args: TrainingArguments) -> list[dict[str, Any]]:
        rate = self.settings.value_learning_rate
        models = {"policy": (self.policy, args.learning_rate)}
        if self.value is not None:
            models["value"] = (self.value, args.learning_rate if rate is None else rate)
        return optim.parameter_groups(models, args.weight_decay)

    @property
    def low_precision(self) -> bool:
        """Whether the forward pass runs in bf16, fp16 or 8-bit integers."""
        low = self.settings.allow_low_precision_weights or rounds_activations(self.policy)
        return low or self.accelerator.mixed_precision != "no"

    @torch.no_grad()
    def compute_logprobs(
        self, rollout: Rollout, *, values: bool, reference: bool, full_kl: bool
    ) -> ModelOutputs:
        """Log-probabilities, reference and values of a rollout on the host, without gradient."""
        local = self.reference is not None
        if (full_kl and not local) or (reference and not (local or self.remote)):
            raise ConfigError("the KL term needs a reference, but the learner has none")
        if values and self.value is None:
            raise ConfigError("values need a value model, but the learner has none")
        check_rows(rollout, self._all_models())
        sampled = rollout.behavior_logprobs
        known = self.settings.reuse_behavior_logprobs and sampled is not None and not self._stepped
        reuse = known and bool((rollout.policy_version == self.version).all())
        set_training(self.module, False)
        groups = forward_passes(
            rollout, self.settings.forward_rows, self._max_padding, by_prompt=self.shares_prompts
        )
        begin = self.remote.begin if reference and self.remote else None
        pending = begin and begin(rollout, groups, joined=self.shares_prompts)
        wanted = {"values"} if values else set()
        wanted |= set() if reuse else {"logprobs", "entropy"}
        wanted |= {"ref_logprobs"} if reference and pending is None else set()
        wanted |= {"full_kl"} if full_kl else set()
        models = (self.module, self.reference, self.device)
        with self._passes(), self.accelerator.autocast():
            out = compute_logprobs(
                models, rollout, groups, wanted, self.settings, sharded=self.sharded
            )
        if pending is not None:
            out["ref_logprobs"] = pending()
        if reuse and sampled is not None:
            out["logprobs"] = sampled
        return ModelOutputs(**out)

    @torch.enable_grad()  # a reward or a callback may have left gradients off
    def optimizer_step(
        self,
        step: Iterable[MicroBatch],
        loss: LossFn,
        *,
        only_value: bool = False,
        skip_policy: bool = False,
        should_apply: ShouldApply = always,
    ) -> dict[str, float]:
        """One optimizer step; returns the loss's metrics summed over micro-batches and ranks.

        Of metrics with one log ratio per token, the range of the ratios (``ratio_range``).
        With ``only_value`` the policy gets no gradient.  ``skip_policy`` takes its old
        log-probabilities instead of a forward pass, so that only metrics of the value model
        are meaningful.  If ``should_apply`` rejects these metrics, the gradient is dropped.

        Raises:
            KedgeError: the gradient was not finite three times in a row.
        """
        set_training(self.module, self.settings.gradient_checkpointing)
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        per_token: dict[str, list[Tensor]] = {}
        max_padding = _NO_LIMIT if self.sharded else self._max_padding
        with self._passes():  # micro-batches are split if lengths differ much
            for micro_batch in split_by_length(step, max_padding=max_padding):
                output = self._output(micro_batch.rows, only_value, policy=not skip_policy)
                losses = loss(output, to_device(micro_batch, self.device))
                self.scaler.scale(losses.total).backward()
                for name, x in {"loss": losses.total, **losses.metrics}.items():
                    if x.dim():
                        per_token.setdefault(name, []).append(x.detach())
                    else:
                        sums[name] = sums.get(name, 0.0) + x.detach().float()
        reduced = self.all_reduce(torch.stack(list(sums.values()))) if sums else torch.zeros(0)
        metrics = dict(zip(sums, reduced.tolist(), strict=True))
        ranks = {"rank": self.rank, "world_size": self.world_size}
        for name, parts in per_token.items():
            found = ratio_range(torch.cat(parts), self.all_reduce, **ranks)
            metrics |= {f"{name}_{part}": x for part, x in found.items()}
        if not should_apply(metrics):
            return metrics | self._step_metrics()
        return metrics | self._take_step()

    def _step_metrics(self) -> dict[str, float]:
        return optim.learning_rates(self.optimizer) | {"skipped_steps": self.skipped}

    def _output(
        self, rows: Experience, only_value: bool, *, values: bool = True, policy: bool = True
    ) -> PolicyOutput:
        """The forward pass over rows on the host; its output is on the device of the models."""
        request = build_request(
            self.module.parts,
            rows,
            rows.loss_mask,
            self.settings,
            self.device,
            value_slots=rows.value_mask if values and self.value is not None else None,
            policy=policy,
            only_value=only_value,
        )
        with self.accelerator.autocast():
            output: ForwardOutput = self.module(request)
        predicted = None if output.values is None else request.place_values(output.values)
        if output.logprobs is None or output.entropy is None:
            old = rows.old_logprobs.to(self.device)
            return PolicyOutput(logprobs=old, entropy=torch.zeros_like(old), values=predicted)
        return PolicyOutput(
            logprobs=request.place_tokens(output.logprobs),
            entropy=request.place_tokens(output.entropy),
            values=predicted,
        )

    @torch.no_grad()
    def forward_no_grad(self, rows: Experience, *, values: bool = True) -> PolicyOutput:
        """The forward pass of ``optimizer_step`` without gradient, on the device of ``rows``."""
        set_training(self.module, self.settings.gradient_checkpointing)
        with self._passes():
            output = self._output(rows, only_value=False, values=values)
        reshard(self._all_models())  # no backward pass will reshard them
        home = rows.ids.device
        return PolicyOutput(
            logprobs=output.logprobs.to(home),
            entropy=output.entropy.to(home),
            values=None if output.values is None else output.values.to(home),
        )

    def _take_step(self) -> dict[str, float]:
        """Sum gradients over ranks, clip them, and take the optimizer step."""
        reshard(self._all_models())
        trained = [p for p in self.module.parameters() if p.requires_grad]
        optim.sum_gradients(trained, self.world_size, self._bucket_mb)
        self.scaler.unscale_(self.optimizer)
        grads = {n: [p.grad for p in ps if p.grad is not None] for n, ps in self._trained().items()}
        sizes = optim.norms(grads)
        names = {n: f"grad_norm/{n}" if n else "grad_norm" for n in sizes}
        finite = math.isfinite(sizes[""])
        if finite:
            # A value head is part of the policy's network and shares its norm, as in TRL.
            apart = isinstance(self.value, ScalarModel | AdapterValue)
            limit = self.settings.max_grad_norm
            for name, group in grads.items():
                norm = sizes[name if apart else ""]
                if limit and group and norm > limit:  # no group while only the value trains
                    torch._foreach_mul_(group, limit / norm)
            self.scaler.step(self.optimizer)
            self._stepped, self._skips_in_row = True, 0
        else:
            self.skipped += 1
            self._skips_in_row += 1
        self.scaler.update()
        if self._skips_in_row >= (_PATIENCE_FP16 if self.scaler.is_enabled() else _PATIENCE):
            raise KedgeError(
                f"the gradient was not finite in {self._skips_in_row} optimizer steps in a row "
                f"(norms: {sizes}); check for infinite rewards or a learning rate that is too high"
            )
        metrics = {names[n]: x for n, x in sizes.items()} if finite else {}
        return metrics | self._step_metrics()

    def _trained(self) -> dict[str, list[nn.Parameter]]:
        models = {"value": self.value} if self.value is not None else {}
        value = {n: [p for p in m.parameters() if p.requires_grad] for n, m in models.items()}
        other = {id(p) for p in value.get("value", [])}  # value adapters belong to the policy, too
        policy = [p for p in self.policy.parameters() if p.requires_grad and id(p) not in other]
        return {"policy": policy, **value}

    def _stored(self) -> dict[str, list[nn.Parameter]]:
        """The weights that a checkpoint holds: all that change during the run."""
        stored = self._trained()
        if self.settings.reference_sync_steps and isinstance(self.reference, FrozenModel):
            stored["reference"] = [*self.reference.model.parameters()]
        return stored

    def advance_version(self) -> None:
        """End the iteration: advance policy version and schedule by one, and free the gradients."""
        with warnings.catch_warnings():
            # Torch warns if all optimizer steps so far were skipped.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._backbones.clear()
        self.version += 1
        every = self.settings.reference_sync_steps
        if every and self.version % every == 0 and isinstance(self.reference, FrozenModel):
            self.reference.mix(self.policy, self.settings.reference_mixup)
        self._stepped = False

    def weights(self) -> Mapping[str, Tensor]:
        """The policy's trainable weights for rollout engines, by ``copy_weights``."""
        return self.copy_weights(self.policy)

    def fingerprint(self) -> str:
        """A short hash of the policy's weights."""
        return fingerprint(policy_weights(self.policy))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over all ranks, on the device it came from."""
        return x if self.world_size == 1 else all_reduce(x, self.device)

    def all_gather(self, local: Experience) -> Experience:
        """The rows of all ranks, in rank order."""
        return all_gather_rows(local, self.device, self.world_size)

    def wrap_engine(self, engine: RolloutEngine) -> RolloutEngine:
        """Wrap an engine that samples from a sharded policy, so that it gathers weights."""
        gathers = self.sharded and engine.shares_weights
        return GatheredEngine(engine, self.policy) if gathers else engine

    def non_finite_weights(self) -> list[str]:
        """Names of the trained weights with NaN or infinite numbers, on any rank.  Collective."""
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        bad = self.all_reduce(torch.tensor([float(not all_finite(p)) for _, p in named]))
        return [name for (name, _), flag in zip(named, bad.tolist(), strict=True) if flag]

    def save(self, folder: Path, value_folder: Path) -> None:
        """Write policy and value model for ``from_pretrained``.  Collective; rank 0 writes."""
        policy, value, main = self.policy, self.value, self.accelerator.is_main_process
        state = full_state(policy)
        if main:
            policy.save_pretrained(folder, state_dict=state, **own_adapters(policy))  # type: ignore[operator]
        if isinstance(value, ScalarModel):
            del state  # free it before the next one is gathered
            state = full_state(value.model)
        if main and value is not None:
            value.save(value_folder, state)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume exactly; sharded tensors stay sharded."""
        return {
            "weights": {name: [p.detach() for p in ps] for name, ps in self._stored().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "version": self.version,
            "skipped": [self.skipped, self._skips_in_row],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``.

        Raises:
            CheckpointError: the state belongs to different models.
        """
        state = read_state(state, self._stored(), self.optimizer)
        load_weights(self._stored(), state["weights"])
        names = {id(p): name for name, p in self.module.named_parameters()}
        optim.load_optimizer_state(self.optimizer, self.scheduler, state, names=names)
        shard_optimizer_state(self.optimizer)
        self.scaler.load_state_dict(state["scaler"])
        self.version = state["version"]
        self.skipped, self._skips_in_row = state["skipped"]
