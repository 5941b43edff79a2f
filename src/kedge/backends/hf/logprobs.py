"""Log-probabilities, values and reference log-probabilities of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kedge.backends.hf.actor_critic import ActorCritic, ForwardOutput, ForwardRequest
from kedge.backends.hf.packing import place
from kedge.backends.hf.reference import Reference
from kedge.backends.hf.settings import LearnerSettings
from kedge.ops.linear_logprob import linear_kl, linear_logprob
from kedge.types import Rollout


def compute_logprobs(
    module: ActorCritic,
    reference: Reference | None,
    rollout: Rollout,
    groups: Sequence[Sequence[int]],
    names: set[str],
    settings: LearnerSettings,
) -> dict[str, Tensor]:
    """The fields ``names`` of a ModelOutputs, ``groups`` of rows at a time; call under no_grad."""
    device = rollout.ids.device
    out = {name: torch.zeros(rollout.ids.shape, device=device) for name in names}
    if "values" in names:
        out["last_values"] = torch.zeros(len(rollout), device=device)
    for rows in groups:
        index = torch.tensor(rows, device=device)
        outputs = compute_row_logprobs(module, reference, rollout, index, names, settings)
        for name, x in outputs.items():
            out[name][index] = x
    return out


def compute_row_logprobs(
    module: ActorCritic,
    reference: Reference | None,
    rollout: Rollout,
    index: Tensor,
    names: set[str],
    settings: LearnerSettings,
) -> dict[str, Tensor]:
    """ModelOutputs fields ``names`` for the rows ``index`` int64 [b]; call under no_grad."""
    ids, present = rollout.ids[index], rollout.response_mask[index]
    prompts = rollout.prompts
    slots = None
    if "values" in names:
        position = torch.arange(present.shape[1], device=present.device)
        slots = position <= present.sum(1)[:, None]
    request = ForwardRequest(
        packed=module.parts.pack(prompts.ids[index], prompts.mask[index], ids, present),
        tokens=present,
        targets=ids[present],
        draw=settings.draw(
            present, None if rollout.allowed_tokens is None else rollout.allowed_tokens[index]
        ),
        slots=slots,
        ends=slots is not None,
        policy=bool(names & {"logprobs", "full_kl"}),
    )
    output: ForwardOutput = module(request)
    flat: dict[str, Tensor] = {}
    if "logprobs" in names and output.logprobs is not None and output.entropy is not None:
        flat |= {"logprobs": output.logprobs, "entropy": output.entropy}
    if names & {"ref_logprobs", "full_kl"} and reference is not None:
        flat |= _reference_outputs(module, reference, request, output, names)
    outputs = {name: place(x, present) for name, x in flat.items()}
    if slots is not None and output.values is not None and output.ends is not None:
        outputs |= {"values": place(output.values, slots), "last_values": output.ends}
    return {name: x.float() for name, x in outputs.items()}


def _reference_outputs(
    module: ActorCritic,
    reference: Reference,
    request: ForwardRequest,
    output: ForwardOutput,
    names: set[str],
) -> dict[str, Tensor]:
    outputs = {}
    head = module.parts.head()
    with reference.active() as parts:
        whole = parts.read(request.packed).flatten(0, 1)
        hidden = whole[request.packed.states(request.tokens)]
        if "ref_logprobs" in names:
            outputs["ref_logprobs"], _ = linear_logprob(
                hidden, parts.head(), request.targets, draw=request.draw
            )
        if "full_kl" in names and output.hidden is not None:
            outputs["full_kl"] = linear_kl(
                output.hidden, head, hidden, parts.head(), draw=request.draw
            )
    return outputs


def reference_logprobs(
    reference: Reference, rollout: Rollout, index: Tensor, settings: LearnerSettings
) -> Tensor:
    """Reference log-probabilities of the rows ``index`` int64 [b]: float32 [b, R]."""
    ids, present, prompts = rollout.ids[index], rollout.response_mask[index], rollout.prompts
    draw = settings.draw(
        present, None if rollout.allowed_tokens is None else rollout.allowed_tokens[index]
    )
    with reference.active() as parts:
        packed = parts.pack(prompts.ids[index], prompts.mask[index], ids, present)
        hidden = parts.read(packed).flatten(0, 1)[packed.states(present)]
        logprobs, _ = linear_logprob(hidden, parts.head(), ids[present], draw=draw)
    return place(logprobs, present)


def sampled_by(version: int, rollout: Rollout) -> bool:
    """Whether this version sampled all rows and log-probabilities were recorded."""
    return rollout.behavior_logprobs is not None and bool((rollout.version == version).all())
