"""Optimizer, schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from kedge.models.fingerprint import full_tensor
from kedge.records.errors import CheckpointError, ConfigError, DamagedCheckpointError

_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

# Entries that a resumed run may change; others may hold the optimizer's state.
_OPTIONS = ("initial_lr", "weight_decay", "betas", "eps", "momentum", "alpha")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")  # as large as weights
_WITHOUT_ARGS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


def parameter_groups(
    models: Mapping[str, tuple[nn.Module, float]], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups per model: with weight decay (matrices) and without (biases, norms).

    ``models`` has each model and its learning rate by name.
    """
    groups, decays, owner = [], set(), {}
    for name, (model, _) in models.items():
        matrices = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
        for n, p in model.named_parameters():
            owner[id(p)] = name  # value adapters belong to the policy, too
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


def build_optimizer(args: TrainingArguments, groups: list[dict[str, Any]]) -> Optimizer:
    """Build the optimizer ``args.optim`` over these groups."""
    name = str(getattr(args.optim, "value", args.optim))
    what = f"optim={name!r} with optim_args={args.optim_args!r} cannot be built"
    if args.optim_args and name in _WITHOUT_ARGS:
        raise ConfigError(
            f"{what}: {args.optim_args.split('=')[0].strip()!r} has no effect;"
            " adam_beta1, adam_beta2, adam_epsilon and weight_decay are separate options"
        )
    try:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
        if "betas" in options:
            options["betas"] = tuple(map(float, options["betas"]))  # torch rejects the integer 0
        known = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
        if known and "params" not in options:
            return optimizer_class(groups, **options)
    except (ImportError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{what}: {error}") from error
    raise ConfigError(
        f"optim={name!r} needs more than parameter groups and is not supported; pass"
        " optimizers=(optimizer, scheduler)"
    )


def check_optimizer_covers(
    optimizer: Optimizer, trained: Mapping[str, Sequence[nn.Parameter]]
) -> None:
    """Reject an optimizer without any of the weights that one of the models (by name) trains."""
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, params in trained.items():
        if params and not any(id(p) in in_optimizer for p in params):
            raise ConfigError(
                f"optimizers: the {type(optimizer).__name__} holds no weight of the {name} model, "
                "which would never train; build it from the weights of every trained model (pass "
                "value_model to have its weights), or set optim instead of optimizers"
            )


def build_schedule(
    args: TrainingArguments,
    optimizer: Optimizer,
    iterations: int,
    *,
    delay: int = 0,
    delayed: Sequence[nn.Parameter] = (),
) -> LRScheduler:
    """The learning-rate schedule of ``args`` over ``iterations``.

    The groups of ``delayed`` weights have rate 0 in the first ``delay`` iterations; their warmup
    and decay cover the rest.
    """
    whole = _schedule(args, optimizer, iterations)
    if not delay or not isinstance(whole, LambdaLR):
        return whole
    late = {id(p) for p in delayed}
    rest = cast("LambdaLR", _schedule(args, optimizer, max(1, iterations - delay))).lr_lambdas[0]
    rules = [
        (lambda step: rest(step - delay) if step >= delay else 0.0)
        if all(id(p) in late for p in group["params"])
        else rule
        for group, rule in zip(optimizer.param_groups, whole.lr_lambdas, strict=True)
    ]
    return LambdaLR(optimizer, rules)


def _schedule(args: TrainingArguments, optimizer: Optimizer, iterations: int) -> LRScheduler:
    options = args.lr_scheduler_kwargs
    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(iterations),
            num_training_steps=iterations,
            scheduler_specific_kwargs=dict(options) if options else None,  # type: ignore[arg-type]
        )
    except (TypeError, ValueError) as error:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise ConfigError(
            f"lr_scheduler_type={kind!r} with lr_scheduler_kwargs={options}: {error}"
        ) from error


def load_optimizer_state(
    optimizer: Optimizer,
    scheduler: LRScheduler,
    state: Mapping[str, Any],
    *,
    names: Mapping[int, str] | None = None,
) -> None:
    """Restore optimizer state and the step of the schedule.

    Learning rates are those of this run's schedule at that step, which differ from the saved ones
    if the run was extended or was given other rates: a linear schedule that had ended at 0
    continues on the line to its new end.  Other options of the optimizer are this run's, too.
    ``names`` of weights by id are for errors.
    """
    options_now = [{k: g[k] for k in _OPTIONS if k in g} for g in optimizer.param_groups]
    bases = getattr(scheduler, "base_lrs", None)
    _check_state(optimizer, state["optimizer"], names or {})
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if bases is not None:
        scheduler.base_lrs = bases
    for group, options in zip(optimizer.param_groups, options_now, strict=True):
        before, now = group.get("initial_lr"), options.get("initial_lr")
        if before and now is not None and before != now:
            group["lr"] *= now / before
        group.update(options)
    if isinstance(scheduler, LambdaLR):
        step = scheduler.last_epoch
        groups, bases = scheduler.optimizer.param_groups, scheduler.base_lrs
        for group, base, rule in zip(groups, bases, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * rule(step)


def _check_state(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Compare a saved state with an optimizer and, for torch's own, its moments with the weights.

    Fused kernels trust the shapes in the state: a wrong one writes past the end of a weight.
    """
    groups, saved = optimizer.param_groups, state["param_groups"]
    options, options_saved = (set(each[0]) - {"initial_lr"} for each in (groups, saved))
    if options != options_saved:
        removed, added = (options_saved - options, options - options_saved)
        raise CheckpointError(
            f"the checkpoint's optimizer must have the options of this run's"
            f" {type(optimizer).__name__}; only the checkpoint has"
            f" {', '.join(sorted(removed)) or 'none'}, only this run has"
            f" {', '.join(sorted(added)) or 'none'}. Resume with the same optim"
        )
    sizes, sizes_saved = ([len(g["params"]) for g in each] for each in (groups, saved))
    if sizes != sizes_saved:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {sizes_saved} weights, this run's"
            f" {type(optimizer).__name__} of {sizes}; train the same weights as in that run"
        )
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    moments = {name for x in state["state"].values() for name in x if name in _MOMENTS}
    weights = [weight for group in groups for weight in group["params"]]
    numbers = [index for group in saved for index in group["params"]]
    for weight, index in zip(weights, numbers, strict=True):
        kept = state["state"].get(index)
        for name in sorted(moments) if kept else ():  # empty before the first gradient
            x = kept.get(name)
            wrong = not isinstance(x, Tensor) or (x.shape, x.dtype) != (weight.shape, weight.dtype)
            if wrong:
                actual = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
                raise DamagedCheckpointError(
                    f"the optimizer's tensor optimizer/state/{index}/{name} must be {weight.dtype}"
                    f" {tuple(weight.shape)}, got {actual} (of the weight"
                    f" {names.get(id(weight), f'number {index}')})"
                )


def sum_gradients(trained: Sequence[nn.Parameter], ranks: int, bucket_mb: float) -> None:
    """Sum the gradients of all ranks (loss weights sum to 1 over them), ``bucket_mb`` at a time.

    Runs after the last micro-batch, not in hooks: ranks may have different numbers of them, and
    a step may leave some weights without a gradient.
    """
    whole = [p for p in trained if not isinstance(p, DTensor)]
    if ranks > 1 and whole:
        has = torch.tensor([float(p.grad is not None) for p in whole], device=whole[0].device)
        dist.all_reduce(has)
        present = [p for p, anywhere in zip(whole, has.tolist(), strict=True) if anywhere]
        for p in present:  # a rank without a gradient counts as 0
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for grads in _take_tensors([p.grad for p in present], int(bucket_mb * 2**20)):
            flat = _flatten_dense_tensors(grads)
            dist.all_reduce(flat)
            torch._foreach_copy_(grads, list(_unflatten_dense_tensors(flat, grads)))
    averaged: list[Tensor] = [p.grad for p in trained if isinstance(p.grad, DTensor)]
    if averaged:  # FSDP averages
        torch._foreach_mul_(averaged, float(ranks))


def norms(grads: Mapping[str, Iterable[Tensor]]) -> dict[str, float]:
    """The L2 norm of each named set of gradients, and of all of them under ``""``."""
    each = torch.stack(
        [full_tensor(torch.nn.utils.get_total_norm(list(g))).float() for g in grads.values()]
    )
    total = each.square().sum().sqrt()
    return dict(zip(["", *grads], torch.cat([total[None], each]).tolist(), strict=True))
