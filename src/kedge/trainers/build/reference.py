"""A reference that computes in workers of its own."""

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
    """Refuse reference workers that would have nothing to do, before any weight is loaded.

    Raises:
        ConfigError: naming the option, its value and the way out.
    """
    asked = f"ray_ref_workers={settings.rollout.ray.ref_workers}"
    if not settings.rollout.ray.ref_workers:
        return
    if not algorithm.needs_reference:
        raise ConfigError(f"{asked}, but this run has no KL to a reference; set it to 0")
    if algorithm.needs_full_kl:
        raise ConfigError(
            f"{asked} compute log-probabilities of the sampled tokens, and kl_estimator='full'"
            " needs those of the whole vocabulary; set ray_ref_workers=0, or another estimator"
        )
    how = loading_options(given) if isinstance(given.ref_model, str) else {}
    if any(x for name, x in how.items() if name != "trust_remote_code"):
        raise ConfigError(
            f"{asked} load the reference themselves, without model_init_kwargs; give ref_model as a"
            " loaded model"
        )
    adapted = given.peft_config is not None or hasattr(given.model, "peft_config")
    if given.ref_model is None and (adapted or given.args.ref_adapter_name is not None):
        raise ConfigError(
            f"{asked}, but the reference is the policy's own base with another adapter or none, and"
            " costs no memory; set it to 0, or give a ref_model"
        )


def build_remote_reference(
    given: TrainerInputs,
    settings: RunSettings,
    policy: nn.Module,
    how: LearnerSettings,
    accelerator: Accelerator,
) -> RemoteReference | None:
    """The workers that the options ask for, with the given reference or the policy as it is now.

    Raises:
        ConfigError: they cannot be started, or ranks would hold different references.
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
    found = gather_object([fingerprint(dict(model.named_parameters()))])
    if len(set(found)) > 1:
        raise ConfigError(
            "the ranks hold different references; seed what initializes the model, or"
            " give ref_model"
        )
