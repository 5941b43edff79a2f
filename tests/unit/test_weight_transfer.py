"""One transfer for all engines: one process group, one broadcast, one verification."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kedge.ext.vllm.policy_template import PolicyTemplate
from kedge.ext.vllm.weights import FanOut, NcclGroup, WeightPayload
from kedge.models.fingerprint import WeightsCopy, fingerprint
from kedge.records.errors import LostNodeError, RolloutError
from kedge.records.types import Receipt
from kedge.rollout.engines import ShardedEngine
from tests.contract.engines import policy, trained


class Engine:
    """The side of the transfer in a pretend engine: notes what it is asked."""

    def __init__(self) -> None:
        self.process: object = object()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def transfer(self, method: str, **named: Any) -> None:
        self.calls.append((method, named))


class Group(NcclGroup):
    """A group of engines of two GPUs each, without NCCL; counts broadcasts of each connection."""

    def __init__(self) -> None:
        super().__init__(
            lambda weights: WeightPayload((*weights.items(),)),
            **{"gpus": 2, "address": "", "limit": 60.0, "device": torch.device("cpu")},
        )
        self.broadcasts: list[int] = []

    def connect(self, client: FanOut, workers: int) -> Any:
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 1 + workers})
        self.client = client
        self.broadcasts.append(0)
        return self

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights([name for name, _ in self._source.payload.named])
        self.client.finish_weight_update()
        self.broadcasts[-1] += 1


WEIGHTS = {"w": torch.zeros(3)}


@pytest.mark.parametrize("count", [1, 4])
def test_weights_are_broadcast_once_for_all_engines(count: int) -> None:
    engines = [Engine() for _ in range(count)]
    group = Group()
    for _ in range(3):
        group.send(engines, WEIGHTS)
    assert group.broadcasts == [3]
    offsets = sorted(engine.calls[0][1]["init_info"]["rank_offset"] for engine in engines)
    assert offsets == [1 + 2 * i for i in range(count)]  # two GPUs each, after the learner
    for engine in engines:
        assert engine.calls[0][1]["init_info"]["world_size"] == 1 + 2 * count
        steps = [name.split("_")[0] for name, _ in engine.calls[1:]]
        assert steps == ["start", "update", "finish"] * 3


def test_the_group_is_formed_again_after_an_engine_was_restarted_or_lost() -> None:
    engines = [Engine(), Engine()]
    group = Group()
    group.send(engines, WEIGHTS)
    engines[1].process = object()
    group.send(engines, WEIGHTS)
    group.send(engines[:1], WEIGHTS)
    assert group.broadcasts == [1, 1, 1]
    told = [named["init_info"] for _, named in engines[0].calls if "init_info" in named]
    assert [info["world_size"] for info in told] == [5, 5, 3]


def test_an_engine_that_fails_is_an_error() -> None:
    class Fails(Engine):
        def transfer(self, method: str, **named: Any) -> None:
            if method == "update_weights":
                raise RolloutError("engine 1 is gone")

    with pytest.raises(RolloutError, match="engine 1 is gone"):
        Group().send([Engine(), Fails(), Engine()], WEIGHTS)


def test_engines_that_are_lost_before_a_broadcast_are_left_out() -> None:
    class Loads(Engine):
        shares_weights, logprob_kind = False, "sampled"

        def prepare(self, version: int) -> None:
            if self is lost:
                raise LostNodeError("engine 1: its node is lost")

        def load_weights(self, weights: Any, version: int) -> Receipt:
            return Receipt(version=version, fingerprint="")

    engines: list[Any] = [Loads() for _ in range(3)]
    lost = engines[1]
    sharded = ShardedEngine(engines, pad_id=0, send=Group().send)
    sharded.load_weights(WEIGHTS, 1)
    assert [len(engine.calls) for engine in engines] == [4, 0, 4]
    assert sharded.engines == [engines[0], engines[2]]


def test_calls_of_a_fan_out_run_at_the_same_time() -> None:
    """As they must: each blocks until all have joined the process group."""
    together = threading.Barrier(4)
    FanOut([lambda *_, **__: together.wait(30)] * 4, 1).update_weights({})  # type: ignore[list-item]


@pytest.mark.parametrize("count", [1, 4])
def test_what_engines_must_report_is_computed_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy()
    spec, calls = PolicyTemplate.of(model), []
    compute = PolicyTemplate.logprobs
    monkeypatch.setattr(
        PolicyTemplate,
        "logprobs",
        lambda *args, **named: calls.append(1) or compute(*args, **named),
    )
    first = WeightsCopy(trained(model))
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(lambda _: spec.expected(first), range(count)))
    assert len(calls) == 1
    assert all(expected is found[0] for expected in found)
    next(iter(first.values())).add_(1.0)  # training goes on
    second = WeightsCopy(first)
    assert spec.expected(second).fingerprint != found[0].fingerprint
    assert len(calls) == 2
    other = PolicyTemplate.of(policy(vocab_size=32))
    weights = WeightsCopy(trained(policy(vocab_size=32)))
    weights.expected = second.expected
    assert other.expected(weights).fingerprint == fingerprint(weights)
    assert len(calls) == 3
