"""Log-probabilities, values and reference log-probabilities of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kedge.backends.hf.actor_critic import (
    ActorCritic,
    ForwardOutput,
    ForwardRequest,
    build_request,
)
from kedge.backends.hf.model import LanguageModelParts
from kedge.backends.hf.reference import Reference
from kedge.backends.hf.settings import LearnerSettings
from kedge.backends.hf.sharding import call_within, reshard
from kedge.ops.linear_logprob import linear_kl, linear_logprob
from kedge.ops.logit_tiles import Head
from kedge.types import Rollout

Models = tuple[ActorCritic, Reference | None, torch.device]


def compute_logprobs(
    models: Models,
    rollout: Rollout,
    groups: Sequence[Sequence[int]],
    names: set[str],
    settings: LearnerSettings,
    *,
    passes: int = 0,
) -> dict[str, Tensor]:
    """The fields ``names`` of a ModelOutputs, ``groups`` of rows at a time; call under no_grad.

    Args:
        models: policy and value model, reference (for ``ref_logprobs`` and ``full_kl``), device.
        rollout: on the host.
        groups: rows of one forward pass; each row is in one.
        names: which fields.
        settings: temperature and constraints of sampling.
        passes: run at least as many forward passes.

    Returns:
        float32 [B, R] each, on the host; ``last_values`` [B] with ``values``.
    """
    if not names:
        return {}
    parts = [
        _compute_rows(models, rollout.rows(torch.tensor(rows)), names, settings) for rows in groups
    ]
    for _ in range(passes - len(groups)):  # other ranks wait for the weights that this one holds
        _compute_rows(models, rollout.rows(torch.tensor(groups[-1][:1])), names, settings)
    order = torch.tensor([row for rows in groups for row in rows])
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    flat = torch.cat([x.flatten() for x in joined.values()]).to(rollout.ids.device)  # the one wait
    outputs = {}
    for (name, x), values in zip(
        joined.items(), flat.split([x.numel() for x in joined.values()]), strict=True
    ):
        outputs[name] = torch.empty_like(values).view(x.shape)
        outputs[name][order] = values.view(x.shape)
    return outputs


def compute_sharded(
    models: Models,
    rollout: Rollout,
    groups: Sequence[Sequence[int]],
    names: set[str],
    settings: LearnerSettings,
) -> dict[str, Tensor]:
    """``compute_logprobs`` with sharded models, one after another.  Collective.

    Each layer is gathered for its part of a forward pass, so all ranks run equally many passes.
    """
    module, reference, device = models
    passes = torch.tensor(len(groups), device=device)
    dist.all_reduce(passes, op=dist.ReduceOp.MAX)
    outputs: dict[str, Tensor] = {}
    for fields in _by_model(names, shared=module.shared):
        outputs |= compute_logprobs(models, rollout, groups, fields, settings, passes=int(passes))
        reshard([module, *(reference.separate_models if reference else [])])
    return outputs


def _by_model(names: set[str], *, shared: bool) -> list[set[str]]:
    """The fields of a ModelOutputs by the models that compute them."""
    policy, value = names & {"logprobs", "entropy"}, names & {"values"}
    reference = names & {"ref_logprobs", "full_kl"}
    if shared:
        policy, value = policy | value, set()
    if "full_kl" in names:  # needs both models at once
        policy, reference = policy | reference, set()
    return [fields for fields in (policy, value, reference) if fields]


def _build_request(
    parts: LanguageModelParts,
    rollout: Rollout,
    settings: LearnerSettings,
    device: torch.device,
    *,
    values: bool = False,
    policy: bool = True,
) -> ForwardRequest:
    mask, slots = rollout.response_mask, None
    if values:
        slots = torch.arange(mask.shape[1], device=mask.device) <= mask.sum(1)[:, None]
    return build_request(
        parts,
        (rollout.prompts.ids, rollout.prompts.mask),
        (rollout.ids, mask),
        mask,
        settings.constraints(mask, rollout.allowed_tokens),
        device=device,
        value_slots=slots,
        last_values=values,
        policy=policy,
    )


def _compute_rows(
    models: Models, rollout: Rollout, names: set[str], settings: LearnerSettings
) -> dict[str, Tensor]:
    module, reference, device = models
    request = _build_request(
        module.parts,
        rollout,
        settings,
        device,
        values="values" in names,
        policy=bool(names & {"logprobs", "full_kl"}),
    )
    output: ForwardOutput = module(request)
    flat: dict[str, Tensor] = {}
    if "logprobs" in names and output.logprobs is not None and output.entropy is not None:
        flat |= {"logprobs": output.logprobs, "entropy": output.entropy}
    if names & {"ref_logprobs", "full_kl"} and reference is not None:
        flat |= _reference_outputs(module, reference, request, output, names)
    outputs = {name: request.tokens(x) for name, x in flat.items()}
    if "values" in names and output.values is not None:
        last = output.values[-len(rollout) :]
        outputs |= {"values": request.values(output.values), "last_values": last}
    return {name: x.float() for name, x in outputs.items()}


def _reference_outputs(
    module: ActorCritic,
    reference: Reference,
    request: ForwardRequest,
    output: ForwardOutput,
    names: set[str],
) -> dict[str, Tensor]:
    model = next(iter(reference.separate_models), module.policy)

    def outputs() -> dict[str, Tensor]:
        head = module.parts.head() if "full_kl" in names else None  # with the policy's adapter
        with reference.active() as parts:
            return _within_reference(head, parts, request, output, names)

    return call_within(model, outputs)


def _within_reference(
    policy_head: Head | None,
    parts: LanguageModelParts,
    request: ForwardRequest,
    output: ForwardOutput,
    names: set[str],
) -> dict[str, Tensor]:
    outputs = {}
    hidden = parts.read(request.packed).flatten(0, 1)[request.states]
    if "ref_logprobs" in names:
        outputs["ref_logprobs"], _ = linear_logprob(
            hidden, parts.head(), request.targets, constraints=request.constraints
        )
    if policy_head is not None and output.hidden is not None:
        outputs["full_kl"] = linear_kl(
            output.hidden, policy_head, hidden, parts.head(), constraints=request.constraints
        )
    return outputs


def reference_logprobs(
    reference: Reference, rollout: Rollout, settings: LearnerSettings, device: torch.device
) -> Tensor:
    """Reference log-probabilities of the rows of a rollout on the host: float32 [B, R]."""
    with reference.active() as parts:
        request = _build_request(parts, rollout, settings, device)
        hidden = parts.read(request.packed).flatten(0, 1)[request.states]
        logprobs, _ = linear_logprob(
            hidden, parts.head(), request.targets, constraints=request.constraints
        )
    return request.tokens(logprobs)


def sampled_by(version: int, rollout: Rollout) -> bool:
    """Whether this version sampled all rows and log-probabilities were recorded."""
    return rollout.behavior_logprobs is not None and bool((rollout.version == version).all())
