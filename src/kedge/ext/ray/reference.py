"""The reference in Ray actors, computing in parallel with the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from kedge.ext.ray.pool import ActorPool
from kedge.learner.logprobs import reference_logprobs
from kedge.learner.reference import FrozenModel
from kedge.learner.settings import LearnerSettings
from kedge.models.backbone import supports_packing
from kedge.models.load import load_policy
from kedge.models.model import CausalParts
from kedge.ops.kernels import Kernels
from kedge.records.types import Rollout
from kedge.rollout.engines import without_columns


class ReferenceActor:
    """The reference inside an actor.

    ``quick``: use the learner's CPU kernels; ``trust``: custom code of the model may run.
    """

    def __init__(
        self,
        model: nn.Module | str,
        settings: LearnerSettings,
        *,
        autocast: torch.dtype | None,
        quick: bool,
        trust: bool,
    ) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy = load_policy(model, trust_remote_code=trust)
        self._reference = FrozenModel(policy)
        self._reference.model.to(self._device)
        self._settings, self._autocast = settings, autocast
        self._kernels = Kernels([policy] if quick else [])
        parts = self._reference.parts
        self._joins = quick and isinstance(parts, CausalParts) and supports_packing(parts.backbone)

    @torch.no_grad()
    def logprobs(
        self, rollout: Rollout, groups: Sequence[Sequence[int]], joined: bool
    ) -> list[Tensor]:
        """Log-probabilities (nats) of each group of rows: float32 [rows, R], on the CPU."""
        if isinstance(parts := self._reference.parts, CausalParts):
            self._reference.parts = replace(parts, packs_rows=joined and self._joins)
        device_type, dtype = self._device.type, self._autocast
        enabled = dtype is not None
        with self._kernels.active(), torch.autocast(device_type, dtype, enabled=enabled):
            logprobs = [
                reference_logprobs(self._reference, group, self._settings, self._device)
                for group in (rollout.rows(torch.tensor(rows)) for rows in groups)
            ]
        return [x.cpu() for x in logprobs]


class RayReference:
    """A reference that computes in actors.

    The workers share the passes of a batch; each pass has the rows that the learner would compute
    together, so the results equal those of a reference in the learner's process.  A worker that
    dies or hangs is restarted and repeats its share.
    """

    def __init__(self, pool: ActorPool) -> None:
        self._pool, self.workers = pool, pool.workers

    def begin(
        self, rollout: Rollout, groups: Sequence[Sequence[int]], *, joined: bool
    ) -> Callable[[], Tensor]:
        """Start to compute log-probabilities float32 [B, R], nats, of the sampled tokens.

        Each of ``groups`` of rows shares a forward pass, without padding if the learner's are
        ``joined``. The returned function waits for them.
        """
        import ray

        inputs = replace(rollout, prompts=without_columns(rollout.prompts), behavior_logprobs=None)
        rollout_ref = ray.put(inputs.to("cpu"))
        count = min(len(self.workers), len(groups))
        shares = [list(groups[k::count]) for k in range(count)]
        start = self._pool.threads.submit
        running = [
            (share, start(worker.call, "logprobs", rollout_ref, share, joined))
            for worker, share in zip(self.workers, shares, strict=False)
        ]

        def wait() -> Tensor:
            logprobs = torch.zeros(rollout.ids.shape)
            for share, future in running:
                for rows, values in zip(share, future.result(), strict=True):
                    logprobs[torch.tensor(rows)] = values
            return logprobs

        return wait

    def close(self) -> None:
        """Kill the workers and release their resources."""
        self._pool.close()
