"""The rollout engines that the contract is checked on, each started once."""

from __future__ import annotations

import functools
import importlib.util
from pkgutil import resolve_name

import pytest
import torch

from kedge.config.rollout_engines import find_engine
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.rollout.engines import EngineInputs
from kedge.rollout.liveness import WorkerLimits
from kedge.testing import ScriptedRollouts, tiny_policy
from tests.on_ray.clusters import local, needs_ray

PAD = 0
has_vllm = importlib.util.find_spec("vllm") is not None
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(not has_vllm, reason="vLLM is not installed (make vllm)"),
]


def scripted():
    generator = torch.Generator().manual_seed(1)
    step = torch.randint(0, 64, (64, 12), generator=generator).tolist()
    return ScriptedRollouts([step] * 8)


def embedded():
    return EmbeddedEngine(tiny_policy("llama", initializer_range=0.3), pad_id=PAD, chunk_rows=4)


def embedded_copy():
    model = tiny_policy("gpt2", initializer_range=0.3)
    return EmbeddedEngine(model, pad_id=PAD, shares_weights=False)


def policy(family="llama", **config):
    """A policy of head size 32, which vLLM runs on CPUs."""
    return tiny_policy(family, **{"initializer_range": 0.3, "heads": 1, **config})


def trained(model):
    """A copy of all weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def vllm_of(family="llama", **config):
    """An engine in this process; one for each kind of policy.

    Built again after another engine of the process was closed, which ends vLLM's process groups.
    """
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if not model_parallel_is_initialized():
        _vllm_of.cache_clear()
    return _vllm_of(family, **config)


@functools.cache
def _vllm_of(family, **config):
    from kedge.ext.vllm import InProcess, PolicyTemplate, VLLMEngine

    model = policy(family, **config)
    spec = PolicyTemplate.of(model)
    return VLLMEngine(InProcess(spec, trained(model)), spec, pad_id=PAD)


@functools.cache
def server_of():
    """A server of our own, ended with the tests."""
    from kedge.ext.vllm import PolicyTemplate, VLLMEngine
    from kedge.ext.vllm.server import Server

    model = policy(max_positions=1024)  # long enough to receive weights while it samples
    spec = PolicyTemplate.of(model)
    limits = WorkerLimits(heartbeat=0.5, patience=5.0)
    options = {"async_scheduling": False}  # as with weights in flight
    return VLLMEngine(Server.start(spec, trained(model), options, limits=limits), spec, pad_id=PAD)


def vllm_server():
    engine = server_of()
    engine.load_weights(trained(policy()), 0)
    return engine


def vllm():
    engine = vllm_of()
    engine.load_weights(trained(policy()), 0)
    return engine


def build_named(args, model, **options):
    """The engines in actors that a config names."""
    return resolve_name(find_engine(args).build)(EngineInputs(policy=model, **options), args)


@functools.cache
def ray_embedded_of():
    """Two embedded engines in actors."""
    from kedge.config.ppo import PPOConfig

    local()
    asked = {"rollout_engine": "ray", "ray_engine": "embedded", "vllm_num_engines": 2}
    args = PPOConfig(output_dir="unused", **asked)
    return build_named(args, policy(), pad_id=PAD, chunk_rows=4)


def ray_embedded():
    engine = ray_embedded_of()
    engine.load_weights(trained(policy()), 0)
    return engine


@functools.cache
def ray_vllm_of():
    """A vLLM in an actor."""
    from kedge.config.ppo import PPOConfig

    local()
    args = PPOConfig(output_dir="unused", rollout_engine="ray")
    return build_named(args, policy(), pad_id=PAD)


def ray_vllm():
    engine = ray_vllm_of()
    engine.load_weights(trained(policy()), 0)
    return engine


ENGINES = [
    scripted,
    embedded,
    embedded_copy,
    pytest.param(vllm, marks=needs_vllm),
    pytest.param(vllm_server, marks=needs_vllm),
    pytest.param(ray_embedded, marks=needs_ray),
    pytest.param(ray_vllm, marks=[*needs_ray, *needs_vllm]),
]


def weights_of(engine):
    """What to send to an engine so that it samples from what it samples from now."""
    if engine.shares_weights:
        return {}
    if isinstance(engine, EmbeddedEngine):
        return dict(engine.model.named_parameters())
    return trained(policy())
