"""Log-probabilities, values and reference log-probabilities of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kedge.learner.actor_critic import ActorCritic, ForwardOutput, ForwardRequest, build_request
from kedge.learner.reference import Reference
from kedge.learner.settings import LearnerSettings
from kedge.learner.sharding import call_within, reshard
from kedge.models.model import LanguageModelParts
from kedge.ops.linear_logprob import linear_kl
from kedge.types import Rollout

Models = tuple[ActorCritic, Reference | None, torch.device]


def compute_logprobs(
    models: Models,
    rollout: Rollout,
    groups: Sequence[Sequence[int]],
    names: set[str],
    settings: LearnerSettings,
    *,
    sharded: bool = False,
) -> dict[str, Tensor]:
    """The fields ``names`` of a ModelOutputs, ``groups`` of rows at a time; call under no_grad.

    Args:
        models: policy and value model, reference (for ``ref_logprobs`` and ``full_kl``), device.
        rollout: on the host.
        groups: rows of one forward pass; each row is in one.
        names: which fields.
        settings: temperature and constraints of sampling.
        sharded: run the models one after another.  Each layer is gathered for its part of a forward
            pass, so all ranks run equally many.  Collective.

    Returns:
        float32 [B, R] each, on the host; ``last_values`` [B] with ``values``.
    """
    if not sharded:
        return _run_passes(models, rollout, groups, names, settings) if names else {}
    module, reference, device = models
    passes = torch.tensor(len(groups), device=device)
    dist.all_reduce(passes, op=dist.ReduceOp.MAX)
    more = int(passes) - len(groups)
    outputs: dict[str, Tensor] = {}
    for fields in _by_model(names, shared=module.shared):
        outputs |= _run_passes(models, rollout, groups, fields, settings, more=more)
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


def _run_passes(
    models: Models,
    rollout: Rollout,
    groups: Sequence[Sequence[int]],
    names: set[str],
    settings: LearnerSettings,
    *,
    more: int = 0,
) -> dict[str, Tensor]:
    """A forward pass for each group, and ``more``, since other ranks wait for weights held here."""
    passes = [*groups, *[groups[-1][:1]] * more]
    parts = [
        _compute_rows(models, rollout.rows(torch.tensor(rows)), names, settings) for rows in passes
    ][: len(groups)]
    order = torch.tensor([row for rows in groups for row in rows])
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    flat = torch.cat([x.flatten() for x in joined.values()]).to(rollout.ids.device)  # the one wait
    sizes = [x.numel() for x in joined.values()]
    outputs = {}
    for (name, x), values in zip(joined.items(), flat.split(sizes), strict=True):
        outputs[name] = values.new_empty((len(rollout), *x.shape[1:]))
        outputs[name][order] = values.view(x.shape)
    return outputs


def _compute_rows(
    models: Models, rollout: Rollout, names: set[str], settings: LearnerSettings
) -> dict[str, Tensor]:
    module, reference, device = models
    policy = bool(names & {"logprobs", "full_kl"})
    request = _build_request(
        module.parts, rollout, settings, device, values="values" in names, policy=policy
    )
    output: ForwardOutput = module(request)

    def read_reference() -> dict[str, Tensor]:
        assert reference is not None
        head = module.parts.head() if "full_kl" in names else None  # with the policy's adapter
        found = {}
        with reference.active() as parts:
            hidden = request.hidden(parts)
            if "ref_logprobs" in names:
                found["ref_logprobs"], _ = request.logprobs(parts, hidden)
            if head is not None and output.hidden is not None:
                constraints = request.constraints
                found["full_kl"] = linear_kl(
                    output.hidden, head, hidden, parts.head(), constraints=constraints
                )
        return found

    flat: dict[str, Tensor] = {}
    if "logprobs" in names and output.logprobs is not None and output.entropy is not None:
        flat |= {"logprobs": output.logprobs, "entropy": output.entropy}
    if names & {"ref_logprobs", "full_kl"} and reference is not None:
        flat |= call_within(next(iter(reference.separate_models), module.policy), read_reference)
    outputs = {name: request.tokens(x) for name, x in flat.items()}
    if "values" in names and output.values is not None:
        last = output.values[-len(rollout) :]
        outputs |= {"values": request.values(output.values), "last_values": last}
    return {name: x.float() for name, x in outputs.items()}


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


def reference_logprobs(
    reference: Reference, rollout: Rollout, settings: LearnerSettings, device: torch.device
) -> Tensor:
    """Reference log-probabilities of the rows of a rollout on the host: float32 [B, R]."""
    with reference.active() as parts:
        request = _build_request(parts, rollout, settings, device)
        logprobs, _ = request.logprobs(parts, request.hidden(parts))
    return request.tokens(logprobs)
