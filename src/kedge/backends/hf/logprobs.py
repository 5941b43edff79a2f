"""What policy, value model and reference say of some rows, in one visit."""

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
    """The fields ``names`` of an Annotation, ``groups`` of rows at a time; call in no_grad."""
    device = rollout.ids.device
    out = {name: torch.zeros(rollout.ids.shape, device=device) for name in names}
    if "values" in names:
        out["last_values"] = torch.zeros(len(rollout), device=device)
    for rows in groups:
        index = torch.tensor(rows, device=device)
        found = compute_row_logprobs(module, reference, rollout, index, names, settings)
        for name, x in found.items():
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
    """The fields ``names`` of an Annotation for the rows ``index`` int64 [b]; call in no_grad."""
    ids, present = rollout.ids[index], rollout.response_mask[index]
    prompts = rollout.prompts
    slots = None
    if "values" in names:
        every = torch.arange(present.shape[1], device=present.device)
        slots = every <= present.sum(1)[:, None]
    ask = ForwardRequest(
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
    said: ForwardOutput = module(ask)
    flat: dict[str, Tensor] = {}
    if "logprobs" in names and said.logprobs is not None and said.entropy is not None:
        flat |= {"logprobs": said.logprobs, "entropy": said.entropy}
    if names & {"ref_logprobs", "full_kl"} and reference is not None:
        flat |= _reference_outputs(module, reference, ask, said, names)
    found = {name: place(x, present) for name, x in flat.items()}
    if slots is not None and said.values is not None and said.ends is not None:
        found |= {"values": place(said.values, slots), "last_values": said.ends}
    return {name: x.float() for name, x in found.items()}


def _reference_outputs(
    module: ActorCritic,
    reference: Reference,
    ask: ForwardRequest,
    said: ForwardOutput,
    names: set[str],
) -> dict[str, Tensor]:
    found = {}
    head = module.parts.head()
    with reference.active() as parts:
        whole = parts.read(ask.packed).flatten(0, 1)
        hidden = whole[ask.packed.states(ask.tokens)]
        if "ref_logprobs" in names:
            found["ref_logprobs"], _ = linear_logprob(
                hidden, parts.head(), ask.targets, draw=ask.draw
            )
        if "full_kl" in names and said.hidden is not None:
            found["full_kl"] = linear_kl(said.hidden, head, hidden, parts.head(), draw=ask.draw)
    return found


def reference_logprobs(
    reference: Reference, rollout: Rollout, index: Tensor, settings: LearnerSettings
) -> Tensor:
    """What the reference says of the rows ``index`` int64 [b] by itself: float32 [b, R]."""
    ids, present, prompts = rollout.ids[index], rollout.response_mask[index], rollout.prompts
    draw = settings.draw(
        present, None if rollout.allowed_tokens is None else rollout.allowed_tokens[index]
    )
    with reference.active() as parts:
        packed = parts.pack(prompts.ids[index], prompts.mask[index], ids, present)
        hidden = parts.read(packed).flatten(0, 1)[packed.states(present)]
        found, _ = linear_logprob(hidden, parts.head(), ids[present], draw=draw)
    return place(found, present)


def sampled_by(version: int, rollout: Rollout) -> bool:
    """Whether these very weights sampled all rows and their log-probabilities were recorded."""
    return rollout.behavior_logprobs is not None and bool((rollout.version == version).all())
