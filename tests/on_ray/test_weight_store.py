"""Weights in Ray's object store: one copy for all engines, in their dtype, none kept."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch

from kedge.ext.ray import engine as ray_engine
from kedge.ext.ray.actor import SharedArgument
from kedge.ext.ray.engine import (
    HostedEngine,
    RayEngine,
    StoredWeights,
    stage_weights,
    store_weights,
)
from kedge.ext.vllm import weights as weight_files
from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.learner.learner_state import WeightCopier
from kedge.models.fingerprint import WeightsCopy, fingerprint, policy_weights
from kedge.records.errors import SyncError
from kedge.records.types import Receipt
from kedge.rollout.liveness import WorkerLimits
from kedge.testing import tiny_policy
from tests.on_ray.clusters import local, needs_ray
from tests.storages import PrivateBytes

pytestmark = needs_ray


@pytest.fixture(autouse=True, scope="module")
def cluster() -> None:
    local()


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each object that is put into the store."""
    import ray

    sizes: list[int] = []
    put = ray.put

    def counted(bucket: Any) -> Any:
        sizes.append(sum(x.nbytes for *_, x in bucket))
        return put(bucket)

    monkeypatch.setattr(ray, "put", counted)
    return sizes


def test_weights_come_back_bit_for_bit_or_in_the_dtype_of_the_engines(puts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    want = {
        "matrix": torch.randn(7, 5, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "low": torch.randn(9, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "whole": torch.arange(4),
    }
    first, second = (StoredWeights.put(want.items(), dtype) for dtype in (None, torch.bfloat16))
    found, low = dict(first.tensors()), dict(second.tensors())
    assert list(found) == list(want)
    assert fingerprint(found) == fingerprint(want)
    assert low["whole"].dtype == torch.int64
    assert torch.equal(low["matrix"], want["matrix"].bfloat16())
    assert puts[1] == 2 * (35 + 24 + 9 + 1) + 8 * 4
    again = dict(first.tensors())  # readers map the store and hold no copy
    assert found["matrix"].data_ptr() == again["matrix"].data_ptr()


def test_a_tied_weight_is_stored_once(puts: list[int]) -> None:
    model = tiny_policy("qwen2", tie_word_embeddings=True)
    spec = PolicyTemplate.of(model)
    stored = store_weights(policy_weights(model), None)
    found = dict(spec.payload(dict(stored.tensors())).named)  # in the engine
    assert sum(puts) == sum(4 * p.numel() for p in model.parameters())
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.parametrize(("engines", "most"), [(1, 1), (4, 2)])
def test_an_engine_drops_its_weights_before_it_loads_others(
    engines: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    stored: weakref.WeakSet[Any] = weakref.WeakSet()
    held: list[int] = []

    class Bucket:
        """Stands in for a reference to an object in the store."""

    class PretendActor:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def call(self, method: str, *_: Any, **__: Any) -> Receipt:
            held.append(len(stored))
            return Receipt(version=0, fingerprint="")

    def put(_: Any) -> Bucket:
        bucket = Bucket()
        stored.add(bucket)
        return bucket

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray_engine, "Actor", PretendActor)
    options: dict[str, Any] = {"options": {}, "limits": WorkerLimits()}
    first = StoredWeights.put([("w", torch.zeros(8))])
    model = SharedArgument(int, engines)
    stored.clear()
    made = [RayEngine("engine", HostedEngine, model, first, {}, **options) for _ in range(engines)]
    for version in range(1, 4):
        weights = WeightsCopy()
        weights.stored = StoredWeights.put([("w", torch.full((8,), float(version)))])
        for engine in made:
            engine.load_weights(weights, version)
        del weights
        assert len(stored) == 1
    assert max(held) == most


def test_what_actors_are_built_from_stays_in_the_store_until_all_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    put, objects = ray.put, list[Any]()
    monkeypatch.setattr(ray, "put", lambda x: (objects.append(x), put(x))[1])
    argument = SharedArgument(lambda: "meta_model", 3)
    first = {argument.reference() for _ in range(3)}
    assert (len(first), objects) == (1, ["meta_model"])
    assert argument._reference is None
    assert ray.get(argument.reference()) == "meta_model"  # for an actor that is restarted
    assert argument._reference is None
    assert len(objects) == 2


def test_an_adapter_is_sent_alone(puts: list[int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_policy("llama"), config)
    store_weights(policy_weights(model), None)
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(puts) == 4 * adapter
    assert adapter < sum(p.numel() for p in model.parameters()) / 2


def test_a_sync_holds_one_bucket_besides_the_store(
    puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, width = 1 << 20, 1 << 16  # bytes, numbers of a weight
    monkeypatch.setattr(weight_files, "BUCKET", bucket)
    policy = torch.nn.ModuleList([torch.nn.Linear(width, 1, bias=False) for _ in range(64)])
    stage = partial(stage_weights, dtype=torch.bfloat16)
    with PrivateBytes() as held:
        staged: Any = WeightCopier(dtype=torch.bfloat16, stage=stage)(policy)
        for _ in range(16):  # engines, which all read the same
            assert store_weights(staged, torch.bfloat16) is staged.stored
    assert held.most <= 2 * bucket == 2 * width * 64 / 4  # with the workspace of the fingerprint
    assert held.now() <= bucket / 2
    assert puts == [bucket] * 8
    assert staged.fingerprint == fingerprint(policy_weights(policy))


def test_a_full_store_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def full(_: Any) -> Any:
        raise ray.exceptions.ObjectStoreFullError("no room")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(SyncError, match=r"keep those that they have.*larger object_store_memory"):
        stage_weights([("w", torch.ones(3))])
