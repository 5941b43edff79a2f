"""A rollout engine from a function of prompts: TRL's ``rollout_func``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.environments.episode import pad_rows, stack_rows
from kedge.errors import RolloutError
from kedge.types import PromptBatch, Receipt, Rollout, Sampling

RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]
_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class FunctionRollouts:
    """Calls ``rollout_func(prompts, trainer)``, which samples by itself.

    The function gets the raw prompts of this process, one per row (a prompt with several responses
    is repeated), and returns a dict with one entry per row in each of:

        prompt_ids, completion_ids   token ids
        logprobs                     of the completion tokens as sampled; None: not recorded
        env_mask (optional)          1 for tokens of the policy, 0 for those of an environment
        others                       columns for reward functions

    Args:
        function: the function.
        trainer: returns the function's second argument.
        pad_id: token id that pads rows.
    """

    shares_weights = True  # the function reads the weights from the trainer

    def __init__(self, function: RolloutFunc, trainer: Callable[[], Any], *, pad_id: int) -> None:
        self._function, self._trainer, self._pad = function, trainer, pad_id
        self._version = 0

    @property
    def logprob_kind(self) -> Literal["sampled", "raw", "none"]:
        """Those that the function returns."""
        return "sampled"

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Receipt | None:
        """Record the version; the function reads the weights itself."""
        self._version = version
        return None

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        """Call the function and build a rollout from its completions.

        Raises:
            RolloutError: a field is missing, or has the wrong number of rows or tokens.
        """
        raw = list(prompts.columns.get("prompt", []))
        output = dict(self._function(raw, self._trainer()))
        _check(output, len(prompts))
        completions = [[int(i) for i in ids] for ids in output.pop("completion_ids")]
        masks, logprobs = output.pop("env_mask", None), output.pop("logprobs")
        batch = stack_rows(
            prompts,
            [[int(i) for i in ids] for ids in output.pop("prompt_ids")],
            prompts.group,
            self._pad,
        )
        device, width = prompts.ids.device, max(map(len, completions))
        mask = pad_rows([[True] * len(ids) for ids in completions], width, torch.bool, False)
        behavior = None
        if logprobs is not None:
            behavior = pad_rows(logprobs, width, torch.float32, 0.0).to(device)
        trained = mask if masks is None else pad_rows(masks, width, torch.bool, False)
        ended = [ids[-1] in sampling.stop_ids for ids in completions]
        return Rollout(
            prompts=replace(batch, columns={**prompts.columns, **output}),
            ids=pad_rows(completions, width, torch.int64, self._pad).to(device),
            loss_mask=trained.to(device),
            response_mask=mask.to(device),
            terminated=torch.tensor(ended, device=device),
            version=torch.full((len(prompts),), self._version, device=device),
            behavior_logprobs=behavior,
        )


def _check(output: Mapping[str, Any], rows: int) -> None:
    missing = [name for name in _REQUIRED if name not in output]
    if missing:
        raise RolloutError(
            f"rollout_func must return {', '.join(_REQUIRED)}; missing: {', '.join(missing)}"
        )
    for name, values in output.items():
        if values is not None and len(values) != rows:
            raise RolloutError(
                f"rollout_func returned {len(values)} entries of {name!r} for {rows} prompts; it"
                " must return one per prompt that it gets"
            )
    for i, ids in enumerate(output["completion_ids"]):
        if not len(ids):
            raise RolloutError(f"rollout_func returned no token for prompt {i}")
        for name in ("env_mask", "logprobs"):
            values = output.get(name)
            if values is not None and len(values[i]) != len(ids):
                raise RolloutError(
                    f"rollout_func returned {len(values[i])} entries of {name!r} for the"
                    f" {len(ids)} tokens of completion {i}"
                )
