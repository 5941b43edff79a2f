"""Optimizer, schedule and gradient clipping."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from kedge.backends.hf.fingerprint import full
from kedge.backends.hf.optimizer_state import check_state
from kedge.errors import CheckpointError, ConfigError
from kedge.ops.cpu.heap import keep_free_memory

_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

_WITHOUT_ARGS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


def parameter_groups(
    models: Mapping[str, tuple[nn.Module, float]], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups per model: with weight decay (matrices) and without (biases, norms).

    Args:
        models: name -> (model, learning rate).
        weight_decay: for the matrices.
    """
    groups, decays, owner = [], set(), {}
    for name, (model, _) in models.items():
        matrices = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
        for n, p in model.named_parameters():
            owner[id(p)] = name  # a value adapter is in the policy, too
            if n in matrices:
                decays.add(id(p))
    for name, (model, rate) in models.items():
        trained = [p for p in model.parameters() if p.requires_grad and owner[id(p)] == name]
        for decay in (True, False):
            params = [p for p in trained if (id(p) in decays) == decay]
            if params:
                amount = weight_decay if decay else 0.0
                groups.append({"params": params, "lr": rate, "weight_decay": amount, "name": name})
    return groups


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """``lr`` of the policy, or of the first group if unnamed; ``lr/value`` if present."""
    rates = {group.get("name"): group["lr"] for group in reversed(optimizer.param_groups)}
    metrics = {"lr": rates.get("policy", optimizer.param_groups[0]["lr"])}
    return metrics | ({"lr/value": rates["value"]} if "value" in rates else {})


class TFAdamW(Optimizer):
    """AdamW as TensorFlow computes it: epsilon is added before the bias correction.

        w -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps) + lr weight_decay w

    The first steps are smaller than torch's where gradients are small.  arXiv:2403.17031, sec. 5;
    Kingma & Ba 2015 (arXiv:1412.6980), the remark after Algorithm 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One optimizer step."""
        for group in self.param_groups:
            (b1, b2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                t = state["step"]
                p.mul_(1 - rate * group["weight_decay"])
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                size = rate * (1 - b2**t) ** 0.5 / (1 - b1**t)
                p.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-size)


def build_optimizer(args: TrainingArguments, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer ``args.optim`` over these groups.

    ``optim_args="style=tf"`` selects TensorFlow's AdamW.

    Raises:
        ConfigError: nothing trains, or the optimizer needs the whole model.
    """
    if not groups:
        raise ConfigError("at least one weight must have requires_grad=True to train")
    if _style(args) == "tf":
        betas = (args.adam_beta1, args.adam_beta2)
        return TFAdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
    try:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{_optimizer_error(args)}: {error}") from error
    if (
        not isinstance(optimizer_class, type)
        or not issubclass(optimizer_class, Optimizer)
        or "params" in options
    ):
        raise ConfigError(
            f"optim={str(args.optim)!r} needs more than parameter groups and is not supported; "
            "pass optimizers=(optimizer, scheduler)"
        )
    if "betas" in options:
        options["betas"] = tuple(map(float, options["betas"]))  # torch rejects the integer 0
    try:
        return optimizer_class(groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_optimizer_error(args)}: {error}") from error


def _optimizer_error(args: TrainingArguments) -> str:
    kind = getattr(args.optim, "value", args.optim)
    return f"optim={kind!r} with optim_args={args.optim_args!r} cannot be built"


def _style(args: TrainingArguments) -> str:
    """The ``style`` in ``optim_args``: "torch" or "tf"."""
    optim = str(getattr(args.optim, "value", args.optim))
    pairs = dict(x.split("=", 1) for x in (args.optim_args or "").split(",") if "=" in x)
    style = pairs.get("style", "torch").strip()
    if style not in {"torch", "tf"} or (style == "tf" and not optim.startswith("adamw_torch")):
        raise ConfigError(
            f"optim_args={args.optim_args!r} with optim={optim!r}: style is torch or tf, and tf is "
            "for optim=adamw_torch or adamw_torch_fused"
        )
    unread = [name for name in pairs if name.strip() != "style"]
    if unread and optim in _WITHOUT_ARGS:
        raise ConfigError(
            f"optim_args={args.optim_args!r} with optim={optim!r}: {unread[0]!r} has no effect; "
            "adam_beta1, adam_beta2, adam_epsilon and weight_decay are separate options"
        )
    return style


def check_optimizer_covers(
    optimizer: Optimizer, trained: Mapping[str, Sequence[nn.Parameter]]
) -> None:
    """Reject an optimizer without any weight of one of the trained models (by name)."""
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, params in trained.items():
        if params and not any(id(p) in in_optimizer for p in params):
            raise ConfigError(
                f"optimizers: the {type(optimizer).__name__} holds no weight of the {name} model, "
                "which would never train; build it from the weights of every trained model (pass "
                "value_model to have its weights), or set optim instead of optimizers"
            )


def build_schedule(args: TrainingArguments, optimizer: Optimizer, updates: int) -> LRScheduler:
    """The learning-rate schedule of ``args`` over ``updates`` iterations.

    Raises:
        ConfigError: the schedule needs options that are missing.
    """
    options = args.lr_scheduler_kwargs
    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(updates),
            num_training_steps=updates,
            scheduler_specific_kwargs=dict(options) if options else None,  # type: ignore[arg-type]
        )
    except (TypeError, ValueError) as error:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise ConfigError(
            f"lr_scheduler_type={kind!r} with lr_scheduler_kwargs={options}: {error}"
        ) from error


def step_schedule(scheduler: LRScheduler) -> None:
    """Advance a schedule by one iteration."""
    with warnings.catch_warnings():
        # Torch warns if the first optimizer steps were all skipped.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        scheduler.step()


def load_optimizer_state(
    optimizer: Optimizer,
    scheduler: LRScheduler,
    state: Mapping[str, Any],
    *,
    names: Mapping[int, str] | None = None,
) -> None:
    """Restore optimizer state and the step of the schedule.

    Learning rates are those of this schedule at that step, which differ from the saved ones if the
    run was extended: a linear schedule that had ended at 0 continues on the line to its new end.

    Args:
        optimizer: optimizer of the resumed run.
        scheduler: its schedule.
        state: their ``state_dict``, under "optimizer" and "scheduler".
        names: weight names by id, for errors.

    Raises:
        CheckpointError: the state belongs to another kind of optimizer.
        DamagedCheckpointError: a tensor is missing, or has a different shape or dtype.
    """
    _load_state(optimizer, state["optimizer"], names or {})
    scheduler.load_state_dict(state["scheduler"])
    if isinstance(scheduler, LambdaLR):
        step = scheduler.last_epoch
        groups, bases = scheduler.optimizer.param_groups, scheduler.base_lrs
        for group, base, rule in zip(groups, bases, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * rule(step)


def _load_state(optimizer: Optimizer, state: dict[str, Any], names: Mapping[int, str]) -> None:
    current = set(optimizer.param_groups[0]) - {"initial_lr"}
    saved = set(state["param_groups"][0]) - {"initial_lr"}
    if current != saved:
        removed, added = (", ".join(sorted(x)) for x in (saved - current, current - saved))
        raise CheckpointError(
            f"the checkpoint's optimizer must have the options of this run's"
            f" {type(optimizer).__name__}; only the checkpoint has {removed or 'none'}, only this"
            f" run has {added or 'none'}. Resume with the same optim"
        )
    check_state(optimizer, state, names)
    optimizer.load_state_dict(state)


def sum_gradients(trained: Sequence[nn.Parameter], ranks: int, bucket_mb: float) -> None:
    """Sum the gradients of all ranks (loss weights sum to 1 over them), ``bucket_mb`` at a time.

    After the last micro-batch, not in hooks: ranks may have different numbers of micro-batches, and
    a step may leave some weights without a gradient.
    """
    if ranks > 1:
        _sum_whole([p for p in trained if not isinstance(p, DTensor)], bucket_mb)
    averaged: list[Tensor] = [p.grad for p in trained if isinstance(p.grad, DTensor)]
    if averaged:  # by FSDP
        torch._foreach_mul_(averaged, float(ranks))


def _sum_whole(params: Sequence[nn.Parameter], bucket_mb: float) -> None:
    """In buckets; a gradient that a rank lacks counts as 0."""
    if not params:
        return
    device = params[0].device
    has = torch.tensor([float(p.grad is not None) for p in params], device=device)
    dist.all_reduce(has)
    bucket: list[Tensor] = []
    for p, anywhere in zip(params, has.tolist(), strict=True):
        if not anywhere:
            continue
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        full = sum(g.nbytes for g in bucket) + p.grad.nbytes > bucket_mb * 2**20
        if bucket and (full or p.grad.dtype != bucket[0].dtype):
            _reduce(bucket)
            bucket = []
        bucket.append(p.grad)
    _reduce(bucket)


def _reduce(grads: list[Tensor]) -> None:
    if not grads:
        return
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))


def _on_cpu(optimizer: Optimizer) -> bool:
    weights = (p for group in optimizer.param_groups for p in group["params"])
    return all(p.device.type == "cpu" for p in weights)


def zero_gradients(optimizer: Optimizer, *, keeps_memory: bool) -> None:
    """Free all gradients.

    Args:
        optimizer: optimizer of the weights.
        keeps_memory: on a CPU, keep freed memory for the passes that follow.
    """
    if keeps_memory and _on_cpu(optimizer):
        keep_free_memory()
    optimizer.zero_grad(set_to_none=True)


def norms(grads: Mapping[str, Iterable[Tensor]]) -> dict[str, float]:
    """The L2 norm of each named set of gradients, and of all of them under ``""``."""
    each = torch.stack(
        [full(torch.nn.utils.get_total_norm(list(g))).float() for g in grads.values()]
    )
    total = each.square().sum().sqrt()
    return dict(zip(["", *grads], torch.cat([total[None], each]).tolist(), strict=True))


def scale_(grads: Iterable[Tensor], norm: float, largest: float) -> None:
    """Scale gradients of norm ``norm`` down to ``largest``, in place; leave smaller ones."""
    present = list(grads)  # none while only the value model is trained
    if present and norm > largest:
        torch._foreach_mul_(present, largest / norm)
