"""Log-probabilities and values: one forward pass of policy and value model, and of whole rollouts.

A step of training calls ``ActorCritic`` on the rows of a micro-batch, with gradient;
``compute_logprobs`` calls it on a rollout before training, without.  Both ask for what they need
with a ``ForwardRequest``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kedge.learner.distributed import call_within, reshard
from kedge.learner.reference import Reference
from kedge.learner.settings import LearnerSettings
from kedge.models.backbone import supports_packing
from kedge.models.model import CausalParts, LanguageModelParts
from kedge.models.packing import JoinedInput, scatter
from kedge.models.shared_base import AdapterValue
from kedge.models.value_head import ScalarHead, ScalarModel
from kedge.ops.linear_logprob import TokenConstraints, linear_kl, linear_logprob
from kedge.records.errors import ConfigError
from kedge.records.types import Experience, Rollout

Value = ScalarModel | AdapterValue | ScalarHead


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """The log-probabilities and values that one forward pass returns.

    Masks become indices on the host, so that the forward pass never waits for the device.
    """

    packed: JoinedInput  # b rows of prompts and responses
    states: Tensor  # int64 [n]; flat indices of the states that predict the n tokens
    targets: Tensor  # int64 [n]; ids of these tokens
    slots: Tensor  # int64 [n]; flat indices of these tokens in the responses [b, R]
    constraints: TokenConstraints  # temperature and allowed tokens at these positions
    shape: torch.Size  # (b, R)
    # int64 [m]; flat indices of the states whose values are computed; None: no values
    value_states: Tensor | None = None
    # int64 [at most m]; flat indices in [b, R] of the leading values
    value_slots: Tensor | None = None
    policy: bool = True  # compute log-probabilities
    only_value: bool = False  # no gradient for the policy, including its backbone
    entropy_grad: bool = False  # the entropies have a gradient

    def hidden(self, parts: LanguageModelParts) -> Tensor:
        """States float [n, H] of a model before the n tokens."""
        return parts.read(self.packed).flatten(0, 1).index_select(0, self.states)

    def logprobs(self, parts: LanguageModelParts, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [n] of the tokens from ``hidden``."""
        return linear_logprob(
            hidden,
            parts.head(),
            self.targets,
            constraints=self.constraints,
            entropy_grad=self.entropy_grad,
        )

    def place_tokens(self, x: Tensor) -> Tensor:
        """Values [n] of the tokens at their slots [b, R]; 0 elsewhere."""
        return scatter(x, self.slots, self.shape)

    def place_values(self, x: Tensor) -> Tensor:
        """The values [m] with a slot, placed at their slots in [b, R]; 0 elsewhere."""
        assert self.value_slots is not None  # set, since values were requested
        return scatter(x[: len(self.value_slots)], self.value_slots, self.shape)


def build_request(
    parts: LanguageModelParts,
    rows: Rollout | Experience,
    tokens: Tensor,
    settings: LearnerSettings,
    device: torch.device,
    *,
    value_slots: Tensor | None = None,
    last_values: bool = False,
    policy: bool = True,
    only_value: bool = False,
) -> ForwardRequest:
    """A request on ``device`` for rows on the host; see ``ForwardRequest``.

    ``tokens`` bool [b, R] get log-probabilities; ``value_slots`` bool [b, R] the value of the state
    before each, and with ``last_values`` those of the b states after the last token follow.
    """
    if isinstance(rows, Rollout):
        prompts = rows.prompts.ids, rows.prompts.mask
    else:
        prompts = rows.prompt_ids, rows.prompt_mask
    packed = parts.pack(*prompts, rows.ids, rows.response_mask, rows.context_start)
    value_states = None if value_slots is None else packed.states(value_slots)
    if value_states is not None and last_values:
        value_states = torch.cat([value_states, packed.ends])

    def flat(mask: Tensor) -> Tensor:
        return mask.flatten().nonzero()[:, 0].to(device)

    return ForwardRequest(
        packed=packed.to(device),
        states=packed.states(tokens).to(device),
        targets=rows.ids[tokens].to(device),
        slots=flat(tokens),
        constraints=settings.constraints(tokens, rows.allowed_tokens).to(device),
        shape=tokens.shape,
        value_states=None if value_states is None else value_states.to(device),
        value_slots=None if value_slots is None else flat(value_slots),
        policy=policy,
        only_value=only_value,
        entropy_grad=settings.entropy_grad,
    )


class ForwardOutput(NamedTuple):
    """Flat results, in row-major order of the requested tokens and states."""

    logprobs: Tensor | None = None  # float32 [n]
    entropy: Tensor | None = None  # float32 [n]
    values: Tensor | None = None  # float32 [m]
    hidden: Tensor | None = None  # float [n, H] of the policy


class ActorCritic(nn.Module):
    """A policy and a separate value model, a value adapter, or a head on the policy's backbone."""

    def __init__(
        self,
        policy: nn.Module,
        parts: LanguageModelParts,
        value: Value | None,
        *,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.value = value
        self.recomputes = recomputes  # activations are checkpointed
        self._parts = (parts,)  # a tuple hides the policy's modules from registration

    @property
    def parts(self) -> LanguageModelParts:
        """Backbone and head of the policy."""
        return self._parts[0]

    @property
    def shared(self) -> bool:
        """Whether the value head reads the policy's backbone."""
        return isinstance(self.value, ScalarHead)

    def enable_packing(self, reference: Reference | None) -> bool:
        """Join rows without padding from now on, if every backbone supports it."""
        models: list[Any] = [self.parts]
        if isinstance(self.value, ScalarModel):
            models.append(self.value)
        if reference is not None and reference.separate_models:
            with reference.active() as parts:
                models.append(parts)
        if not all(hasattr(m, "backbone") and supports_packing(m.backbone) for m in models):
            return False
        assert isinstance(self.parts, CausalParts)  # packing needs a backbone
        self._parts = (replace(self.parts, packs_rows=True),)
        return True

    def compile_backbones(self, backend: str | None, mode: str | None) -> None:
        """Run the backbones through torch.compile; the models themselves are unchanged."""
        assert isinstance(self.parts, CausalParts)  # classic trainers do not compile
        options: dict[str, Any] = {"backend": backend or "inductor", "dynamic": True}
        if mode is not None:
            options["mode"] = mode
        try:
            backbone: Any = torch.compile(self.parts.backbone, **options)
            self._parts = (replace(self.parts, backbone=backbone),)
            if isinstance(self.value, ScalarModel):
                self.value.compile_backbone(**options)
        except RuntimeError as error:  # InvalidBackend, whose module is slow to import
            raise ConfigError(
                f"torch_compile_backend={backend!r} with torch_compile_mode={mode!r}:"
                f" {' '.join(str(error).split())}"
            ) from error

    def forward(self, request: ForwardRequest) -> ForwardOutput:
        """Compute the requested outputs with one pass through each backbone involved."""
        value, states, output = self.value, request.value_states, ForwardOutput()
        if request.policy or (self.shared and states is not None):
            output = call_within(self.policy, lambda: self._forward_policy(request))
        if isinstance(value, ScalarModel | AdapterValue) and states is not None:
            model = value.model if isinstance(value, ScalarModel) else self.policy
            values = call_within(model, lambda: value(request.packed, states))
            output = output._replace(values=values)
        return output

    def _forward_policy(self, request: ForwardRequest) -> ForwardOutput:
        logprobs = entropy = hidden = values = None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not request.only_value):
            states = self.parts.read(request.packed).flatten(0, 1)
            if request.policy:
                hidden = states.index_select(0, request.states)
                logprobs, entropy = request.logprobs(self.parts, hidden)
        if isinstance(self.value, ScalarHead) and request.value_states is not None:
            values = self.value(states.index_select(0, request.value_states)).sum(1)  # one column
        return ForwardOutput(logprobs, entropy, values, hidden)


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

    float32 [B, R] each, on the host like the rollout; ``last_values`` [B] with ``values``.  If
    ``sharded``, models run one after another: each layer is gathered for its part of a forward
    pass, so all ranks run equally many.  Collective.
    """
    module, reference, device = models
    by_model, spare = [names], 0
    if sharded:
        passes = torch.tensor(len(groups), device=device)
        dist.all_reduce(passes, op=dist.ReduceOp.MAX)
        spare = int(passes) - len(groups)
        by_model = [{"logprobs", "entropy"}, {"values"}, {"ref_logprobs", "full_kl"}]
        if module.shared:  # one backbone computes both
            by_model = [by_model[0] | by_model[1], by_model[2]]
        if "full_kl" in names:  # needs policy and reference together
            by_model = [by_model[0] | by_model[-1], *by_model[1:-1]]
    rows = [torch.tensor(group) for group in groups]
    outputs: dict[str, Tensor] = {}
    for fields in filter(None, (fields & names for fields in by_model)):
        # In spare passes this rank only takes part in gathering weights for others.
        parts = [
            _compute_rows(models, rollout.rows(index), fields, settings)
            for index in [*rows, *[rows[-1][:1]] * spare]
        ]
        outputs |= _join_passes(parts[: len(rows)], torch.cat(rows), rollout.ids.device)
        if sharded:
            reshard([module, *(reference.separate_models if reference else [])])
    return outputs


def _join_passes(
    parts: Sequence[dict[str, Tensor]], order: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Join the outputs of all passes on ``device`` in row order; the host waits once."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    flat = torch.cat([x.flatten() for x in whole.values()]).to(device)
    outputs = {}
    sizes = [x.numel() for x in whole.values()]
    for (name, x), values in zip(whole.items(), flat.split(sizes), strict=True):
        outputs[name] = values.new_empty(x.shape)
        outputs[name][order] = values.view(x.shape)
    return outputs


def _compute_rows(
    models: Models, rollout: Rollout, names: set[str], settings: LearnerSettings
) -> dict[str, Tensor]:
    module, reference, device = models
    mask = rollout.response_mask  # [b, R]
    before = torch.arange(mask.shape[1], device=mask.device) <= mask.sum(1)[:, None]
    request = build_request(
        module.parts,
        rollout,
        mask,
        settings,
        device,
        value_slots=before if "values" in names else None,  # one slot after each response, too
        last_values=True,
        policy=bool(names & {"logprobs", "full_kl"}),
    )
    output: ForwardOutput = module(request)

    def read_reference() -> dict[str, Tensor]:
        assert reference is not None
        head = module.parts.head() if "full_kl" in names else None  # including the policy's adapter
        results = {}
        with reference.active() as parts:
            hidden = request.hidden(parts)
            if "ref_logprobs" in names:
                results["ref_logprobs"], _ = request.logprobs(parts, hidden)
            if head is not None and output.hidden is not None:
                constraints = request.constraints
                results["full_kl"] = linear_kl(
                    output.hidden, head, hidden, parts.head(), constraints=constraints
                )
        return results

    flat: dict[str, Tensor] = {}
    if "logprobs" in names and output.logprobs is not None and output.entropy is not None:
        flat |= {"logprobs": output.logprobs, "entropy": output.entropy}
    if names & {"ref_logprobs", "full_kl"} and reference is not None:
        flat |= call_within(next(iter(reference.separate_models), module.policy), read_reference)
    outputs = {name: request.place_tokens(x) for name, x in flat.items()}
    if "values" in names and output.values is not None:
        last = output.values[-len(rollout) :]
        outputs |= {"values": request.place_values(output.values), "last_values": last}
    return {name: x.float() for name, x in outputs.items()}


def reference_logprobs(
    reference: Reference, rollout: Rollout, settings: LearnerSettings, device: torch.device
) -> Tensor:
    """Compute the reference's log-probabilities of a rollout on the host: float32 [B, R]."""
    with reference.active() as parts:
        request = build_request(parts, rollout, rollout.response_mask, settings, device)
        logprobs, _ = request.logprobs(parts, request.hidden(parts))
    return request.place_tokens(logprobs)
