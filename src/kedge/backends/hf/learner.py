"""The learner on transformers, torch and accelerate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments

from kedge.backends.hf.actor_critic import ActorCritic, ForwardOutput, ForwardRequest
from kedge.backends.hf.compatibility import check_rows
from kedge.backends.hf.distributed import accelerator_for, broadcast_parameters, pool_rows, total
from kedge.backends.hf.fingerprint import fingerprint, full, policy_weights
from kedge.backends.hf.logprobs import compute_logprobs, sampled_by
from kedge.backends.hf.model import (
    LanguageModelParts,
    causal_parts,
    check_trainable,
    checkpoint_activations,
    no_dropout,
    set_training,
)
from kedge.backends.hf.optim import (
    advance,
    build_optimizer,
    build_schedule,
    check_holds,
    go_on,
    learning_rates,
    norms,
    parameter_groups,
    scale_,
    sum_gradients,
)
from kedge.backends.hf.packing import by_length, place, split_by_length, to_device, worth_padding
from kedge.backends.hf.reference import Reference, RemoteReference
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.hf.sharding import (
    GatheredEngine,
    cut_like,
    cut_state,
    full_state,
    full_tree,
    reshard,
    shard,
    shards_asked,
    whole,
)
from kedge.backends.hf.value_head import ScalarHead, ScalarModel, save_value
from kedge.errors import CheckpointError, ConfigError, KedgeError
from kedge.ops.cpu.patch import Kernels
from kedge.protocols import LossFn, RolloutEngine, ShouldApply, always
from kedge.types import Experience, MicroBatch, ModelOutputs, PolicyOutput, Rollout

_PATIENCE = 3  # optimizer steps in a row that may be skipped
_PATIENCE_FP16 = 25  # the first loss scale is too high by design and is halved until it fits


class HFLearner:
    """Holds policy, value model, reference and optimizer.

    Args:
        policy: causal language model.
        args: optimizer, schedule and weight decay are read from it.
        settings: everything else.
        value: a model of its own, a head on the policy's trunk, or None.
        reference: what the policy is held to, or None.
        elsewhere: computes the reference's log-probabilities in place of ``reference``.
        accelerator: device, precision and processes; None makes one from ``args``.
        optimizers: your own (optimizer, scheduler); None where it shall be made.
        parts: trunk and head of the policy; None: those of a causal language model.

    Raises:
        ConfigError: a model that cannot be trained this way.
    """

    def __init__(
        self,
        policy: nn.Module,
        args: TrainingArguments,
        settings: LearnerSettings,
        *,
        value: ScalarModel | ScalarHead | None = None,
        reference: Reference | None = None,
        elsewhere: RemoteReference | None = None,
        accelerator: Accelerator | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        parts: LanguageModelParts | None = None,
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator or accelerator_for(args)
        self.shards = shards_asked(self.accelerator)
        self.device = self.accelerator.device
        self.module = ActorCritic(policy, parts or causal_parts(policy), value).to(self.device)
        self.reference = None if reference is None else reference.to(self.device)
        self.elsewhere = elsewhere
        self._prepare()
        if self.world_size > 1:
            broadcast_parameters([self.module, *(self.reference.own if self.reference else [])])
        if self.sharded:
            self._shard(optimizers[0])
        self.optimizer = optimizers[0] or build_optimizer(args, self._groups(args))
        check_holds(self.optimizer, self._trained())
        self.scheduler = optimizers[1] or build_schedule(
            args, self.optimizer, settings.total_updates
        )
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.accelerator.mixed_precision == "fp16"
        )
        if args.torch_compile:
            self.module.compile_trunks(args.torch_compile_backend, args.torch_compile_mode)
        plain = not (args.torch_compile or self.sharded)
        self._kernels = Kernels(self._held() if plain else [])
        spare = settings.spare_tokens
        self._spare = worth_padding(policy, self.module.parts.output) if spare is None else spare
        self._bucket_mb = args.ddp_bucket_cap_mb or 25
        self.version = self.skipped = self._in_a_row = 0
        self._stepped = False  # the weights are no longer those of the version

    def _prepare(self) -> None:
        no_dropout(self.module)
        check_trainable(
            self.module.named_parameters(), allow_low=self.settings.allow_low_precision_weights
        )
        for model in self._models() if self.settings.gradient_checkpointing else []:
            checkpoint_activations(model, self.settings.checkpointing_options)
        set_training(self.module, False)

    def _shard(self, optimizer: Optimizer | None) -> None:
        if optimizer is not None or self.accelerator.mixed_precision == "fp16":
            raise ConfigError(
                "sharded models need an optimizer made from options (optim=..., not optimizers=) "
                "and bf16 or float32 (fp16=False)"
            )
        for model in self._held():
            shard(model, self.device, self.world_size, again=self.shards == "weights")

    def _held(self) -> list[nn.Module]:
        return [*self._models(), *(self.reference.own if self.reference else [])]

    def _models(self) -> list[nn.Module]:
        value = self.module.value
        return [self.policy, *([value.model] if isinstance(value, ScalarModel) else [])]

    def _groups(self, args: TrainingArguments) -> list[dict[str, Any]]:
        rate = self.settings.value_learning_rate
        models = {"policy": (self.policy, args.learning_rate)}
        if self.module.value is not None:
            models["value"] = (self.module.value, args.learning_rate if rate is None else rate)
        return parameter_groups(models, args.weight_decay)

    @property
    def policy(self) -> nn.Module:
        """The policy, as it was given."""
        return self.module.policy

    @property
    def value(self) -> ScalarModel | ScalarHead | None:
        """The value model or value head."""
        return self.module.value

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.accelerator.process_index

    @property
    def sharded(self) -> bool:
        """Whether weights are cut over ranks."""
        return self.shards != "none"

    @torch.no_grad()
    def compute_logprobs(
        self, rollout: Rollout, *, values: bool, reference: bool, full_kl: bool
    ) -> ModelOutputs:
        """Log-probabilities, reference and values of a rollout, on its device, without gradient."""
        self._check(values=values, reference=reference, full_kl=full_kl)
        check_rows(rollout, self._held())
        home, sampled = rollout.ids.device, rollout.behavior_logprobs
        rollout = to_device(rollout, self.device)
        known = self.settings.reuse_behavior_logprobs and not self._stepped
        reuse = known and sampled_by(self.version, rollout)
        set_training(self.module, False)
        lengths = rollout.prompts.mask.sum(1) + rollout.response_mask.sum(1)
        most = self.settings.forward_rows * int(lengths.max())
        groups = by_length(lengths.tolist(), tokens=most, spare=self._spare)
        begun = self.elsewhere.begin(rollout, groups) if self.elsewhere and reference else None
        names = {"logprobs": not reuse, "entropy": not reuse, "values": values}
        names |= {"ref_logprobs": reference and begun is None, "full_kl": full_kl}
        wanted = {name for name, asked in names.items() if asked}
        gathered = whole(self._held() if self.sharded else [])
        with gathered, self._kernels.active(), self.accelerator.autocast():
            out = compute_logprobs(
                self.module, self.reference, rollout, groups, wanted, self.settings
            )
        if begun is not None:
            out["ref_logprobs"] = begun()
        out = {name: x.to(home) for name, x in out.items()}
        if reuse and sampled is not None:
            out["logprobs"] = sampled
        return ModelOutputs(**out)

    def _check(self, *, values: bool, reference: bool, full_kl: bool) -> None:
        held = self.reference is not None
        if (reference and not (held or self.elsewhere)) or (full_kl and not held):
            raise ConfigError("the reference was asked for, but the learner was given none")
        if values and self.value is None:
            raise ConfigError("values were asked for, but the learner was given no value model")

    def optimizer_step(
        self,
        step: Iterable[MicroBatch],
        loss: LossFn,
        *,
        only_value: bool = False,
        should_apply: ShouldApply = always,
    ) -> dict[str, float]:
        """ONE optimizer step.  Returns the loss's metrics summed over micro-batches and ranks.

        The step is taken if ``admit`` says so of these metrics; else the gradient is dropped.

        Raises:
            KedgeError: the gradient was not finite three times in a row.
        """
        set_training(self.module, self.settings.gradient_checkpointing)
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        spare = 2**62 if self.sharded else self._spare  # sharded ranks run equally many passes
        with self._kernels.active():
            for part in split_by_length(step, self.device, spare=spare):
                output = self._output(part.rows, only_value)
                found = loss(output, part)
                self.scaler.scale(found.total).backward()
                for name, x in {"loss": found.total, **found.metrics}.items():
                    sums[name] = sums.get(name, 0.0) + x.detach().float()
        total = self.total(torch.stack(list(sums.values()))) if sums else torch.zeros(0)
        metrics = dict(zip(sums, total.tolist(), strict=True))
        if not should_apply(metrics):
            return metrics | self._standing()
        return metrics | self._take_step()

    def _standing(self) -> dict[str, float]:
        return learning_rates(self.optimizer) | {"skipped_steps": self.skipped}

    def _output(self, rows: Experience, only_value: bool) -> PolicyOutput:
        slots = None if self.value is None else rows.value_mask
        ask = ForwardRequest(
            packed=self.module.parts.pack(
                rows.prompt_ids, rows.prompt_mask, rows.ids, rows.response_mask
            ),
            tokens=rows.loss_mask,
            targets=rows.ids[rows.loss_mask],
            draw=self.settings.draw(
                rows.loss_mask, None if rows.allowed_tokens is None else rows.allowed_tokens
            ),
            slots=slots,
            only_value=only_value,
        )
        with self.accelerator.autocast():
            said: ForwardOutput = self.module(ask)
        assert said.logprobs is not None and said.entropy is not None  # asked for  # noqa: PT018
        return PolicyOutput(
            logprobs=place(said.logprobs, rows.loss_mask),
            entropy=place(said.entropy, rows.loss_mask),
            values=None if slots is None or said.values is None else place(said.values, slots),
        )

    @torch.no_grad()
    def forward_no_grad(self, rows: Experience) -> PolicyOutput:
        """The forward pass of ``update`` without gradient or step, on the device of ``rows``."""
        set_training(self.module, self.settings.gradient_checkpointing)
        with self._kernels.active():
            output = self._output(to_device(rows, self.device), only_value=False)
        reshard(self._held() if self.sharded else [])  # no backward pass will do it
        home = rows.ids.device  # not by to_device, whose copies to the CPU could be read too early
        return PolicyOutput(
            logprobs=output.logprobs.to(home),
            entropy=output.entropy.to(home),
            values=None if output.values is None else output.values.to(home),
        )

    def _sum_gradients(self) -> None:
        reshard(self._held())
        trained = [p for p in self.module.parameters() if p.requires_grad]
        sum_gradients(trained, self.world_size, self._bucket_mb)

    def _take_step(self) -> dict[str, float]:
        """Clip the gradients that are there, summed over ranks, and take the optimizer step."""
        self._sum_gradients()
        self.scaler.unscale_(self.optimizer)
        grads = {n: [p.grad for p in ps if p.grad is not None] for n, ps in self._trained().items()}
        found = {n: float(x) for n, x in norms(grads).items()}
        names = {n: f"grad_norm/{n}" if n else "grad_norm" for n in found}
        finite = math.isfinite(found[""])
        if finite:
            for group in grads.values() if self.settings.max_grad_norm else []:
                scale_(group, found[""], self.settings.max_grad_norm)
            self.scaler.step(self.optimizer)
            self._stepped, self._in_a_row = True, 0
        else:
            self.skipped += 1
            self._in_a_row += 1
        self.scaler.update()
        if self._in_a_row >= (_PATIENCE_FP16 if self.scaler.is_enabled() else _PATIENCE):
            raise KedgeError(
                f"the gradient was not finite in {self._in_a_row} optimizer steps in a row (norms: "
                f"{found}); look for infinite rewards or a learning rate that is too high"
            )
        sizes = {names[n]: x for n, x in found.items()} if finite else {}
        return sizes | self._standing()

    def _trained(self) -> dict[str, list[nn.Parameter]]:
        models = {"policy": self.policy, "value": self.module.value}
        held = {n: m for n, m in models.items() if m is not None}
        return {n: [p for p in m.parameters() if p.requires_grad] for n, m in held.items()}

    def advance_version(self) -> None:
        """A training step is over: the version and the schedule move on by one."""
        advance(self.scheduler)
        self.version += 1
        self._stepped = False

    def weights(self) -> Mapping[str, Tensor]:
        """A copy of the policy's weights that train."""
        return {name: full(p).clone() for name, p in policy_weights(self.policy).items()}

    def fingerprint(self) -> str:
        """A short hash of the policy's weights."""
        return fingerprint(policy_weights(self.policy))

    def total(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over all ranks, on the device it came from."""
        return x if self.world_size == 1 else total(x, self.device)

    def pool(self, mine: Experience) -> Experience:
        """The rows of all ranks, in rank order."""
        return mine if self.world_size == 1 else pool_rows(mine, self.device, self.world_size)

    def sampler(self, engine: RolloutEngine) -> RolloutEngine:
        """``engine``, made to see whole weights where those it samples from are cut over ranks."""
        return (
            GatheredEngine(engine, self.policy)
            if self.sharded and engine.shares_weights
            else engine
        )

    def save(self, folder: Path, value_folder: Path) -> None:
        """Write policy and value model for ``from_pretrained``.  Every rank calls, one writes."""
        states = [full_state(m) if self.sharded else None for m in self._models()]
        if not self.accelerator.is_main_process:
            return
        policy: Any = self.policy
        policy.save_pretrained(folder, state_dict=states[0])
        if self.value is not None:
            save_value(self.value, value_folder, state=states[-1])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here.  Every rank calls it."""
        state = {
            "weights": {name: [p.detach() for p in ps] for name, ps in self._trained().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "version": self.version,
            "skipped": [self.skipped, self._in_a_row],
        }
        return full_tree(state)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            CheckpointError: it is of other models.
        """
        for name, mine in self._trained().items():
            theirs = state["weights"].get(name, [])
            if [p.shape for p in mine] != [p.shape for p in theirs]:
                raise CheckpointError(f"the checkpoint's {name} weights have other shapes")
            for p, q in zip(mine, theirs, strict=True):
                p.copy_(cut_like(q, p))
        names = {id(p): name for name, p in self.module.named_parameters()}
        go_on(self.optimizer, self.scheduler, state, names=names)
        cut_state(self.optimizer)
        self.scaler.load_state_dict(state["scaler"])
        self.version = state["version"]
        self.skipped, self._in_a_row = state["skipped"]
