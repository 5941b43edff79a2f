"""Builds the reference model as remote Ray workers."""

from __future__ import annotations

import copy
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from kedge.algorithms import Algorithm
from kedge.backends.hf.fingerprint import fingerprint
from kedge.backends.hf.reference import RemoteReference
from kedge.backends.hf.settings import LearnerSettings
from kedge.config.resolve import RunSettings
from kedge.errors import ConfigError
from kedge.trainers.build.inputs import TrainerInputs, trusts
from kedge.trainers.build.models import loading_options
from kedge.trainers.build.rollout import DTYPES


def check_reference(given: TrainerInputs, settings: RunSettings, algorithm: Algorithm) -> None:
    """Check the options of reference workers before any weight is loaded.

    Raises:
        ConfigError: names the option, its value and the fix.
    """
    option = f"ray_ref_workers={settings.rollout.ray.ref_workers}"
    if not settings.rollout.ray.ref_workers:
        return
    if not algorithm.needs_reference:
        raise ConfigError(f"{option} needs a KL term, and this run has none; set it to 0")
    if algorithm.needs_full_kl:
        raise ConfigError(
            f"{option}: reference workers compute log-probabilities of the sampled tokens only, but"
            " kl_estimator='full' needs the whole vocabulary; set ray_ref_workers=0, or another"
            " estimator"
        )
    loading = loading_options(given) if isinstance(given.ref_model, str) else {}
    if any(x for name, x in loading.items() if name != "trust_remote_code"):
        raise ConfigError(
            f"{option}: reference workers load the reference without model_init_kwargs; pass"
            " ref_model as a loaded model"
        )
    adapted = given.peft_config is not None or hasattr(given.model, "peft_config")
    if given.ref_model is None and (adapted or given.args.ref_adapter_name is not None):
        raise ConfigError(
            f"{option} has no benefit: the reference is the policy's base model, which needs no"
            " extra memory; set it to 0, or pass a ref_model"
        )


def build_remote_reference(
    given: TrainerInputs,
    settings: RunSettings,
    policy: nn.Module,
    how: LearnerSettings,
    accelerator: Accelerator,
) -> RemoteReference | None:
    """Start the reference workers, with ``ref_model`` or a copy of the initial policy.

    Raises:
        ConfigError: they cannot be started, or ranks hold different references.
    """
    options = settings.rollout
    if not options.ray.ref_workers:
        return None
    from kedge.backends.ray.reference import ray_reference

    model: Any = given.ref_model
    if model is None:
        model = policy
    if isinstance(model, nn.Module):
        model = copy.deepcopy(model).requires_grad_(False).cpu()
        _check_equal(model, accelerator)
    return ray_reference(
        model,
        how,
        options,
        autocast=DTYPES[settings.learner.precision],
        quick=not given.args.torch_compile,
        trust=trusts(given.args),
    )


def _check_equal(model: nn.Module, accelerator: Accelerator) -> None:
    if accelerator.num_processes == 1:
        return
    fingerprints = gather_object([fingerprint(dict(model.named_parameters()))])
    if len(set(fingerprints)) > 1:
        raise ConfigError(
            "the reference must be the same on all ranks; seed the initialization of the model, or"
            " pass ref_model"
        )
