"""One transfer for all engines: one process group, one broadcast, one verification."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from kedge.errors import RolloutError
from kedge.rollout.vllm import policy_template
from kedge.rollout.vllm.nccl_transfer import EngineGroup, FanOut
from kedge.rollout.vllm.policy_template import PolicyTemplate
from kedge.rollout.vllm.weight_payload import WeightPayload
from tests.contract.engines import policy, trained

PAYLOAD = WeightPayload((("w", torch.zeros(3)),))


class Engine:
    """The side of the transfer in a pretend engine: notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, method: str, **named: Any) -> None:
        self.calls.append((method, named))


class Transfer:
    """What ``NcclTransfer`` does, without a process group; counts broadcasts."""

    made: ClassVar[list[Transfer]] = []

    def __init__(self, control: Any, world_size: int) -> None:
        self.control, self.broadcasts = control, 0
        control.init_weight_transfer_engine({"rank_offset": 1, "world_size": world_size})
        Transfer.made.append(self)

    def send(self, payload: WeightPayload) -> None:
        self.control.start_weight_update()
        self.control.update_weights([name for name, _ in payload.named])
        self.control.finish_weight_update()
        self.broadcasts += 1


def load(group: EngineGroup, engines: list[Engine]) -> list[BaseException | None]:
    """All engines load one version, each in a thread; their errors."""
    with ThreadPoolExecutor(len(engines)) as threads:
        calls = [threads.submit(partial(group.send, e, e, PAYLOAD)) for e in engines]
    return [call.exception() for call in calls]


@pytest.mark.parametrize("count", [1, 4])
def test_weights_are_broadcast_once_for_all_engines(count: int) -> None:
    Transfer.made.clear()
    engines = [Engine() for _ in range(count)]
    group = EngineGroup(count, 2, partial(Transfer, world_size=1 + 2 * count), limit=30.0)
    for _ in range(3):
        assert load(group, engines) == [None] * count
    (transfer,) = Transfer.made
    assert transfer.broadcasts == 3
    offsets = sorted(engine.calls[0][1]["init_info"]["rank_offset"] for engine in engines)
    assert offsets == [1 + 2 * i for i in range(count)]  # two GPUs each, after the learner
    for engine in engines:
        assert engine.calls[0][1]["init_info"]["world_size"] == 1 + 2 * count
        steps = [name.split("_")[0] for name, _ in engine.calls[1:]]
        assert steps == ["start", "update", "finish"] * 3


def test_the_group_is_formed_again_after_a_restart() -> None:
    Transfer.made.clear()
    engines = [Engine(), Engine()]
    group = EngineGroup(2, 1, partial(Transfer, world_size=3), limit=30.0)
    load(group, engines)
    group.reset()
    assert load(group, engines) == [None, None]
    assert [transfer.broadcasts for transfer in Transfer.made] == [1, 1]


def test_an_engine_that_fails_is_an_error_of_all() -> None:
    class Fails(Engine):
        def __call__(self, method: str, **named: Any) -> None:
            if method == "update_weights":
                raise RolloutError("engine 1 is gone")

    engines = [Engine(), Fails(), Engine()]
    group = EngineGroup(3, 1, partial(Transfer, world_size=4), limit=30.0)
    assert {str(error) for error in load(group, engines)} == {"engine 1 is gone"}


def test_an_engine_that_is_lost_before_the_others_arrive_does_not_keep_them_waiting() -> None:
    engines = [Engine(), Engine()]
    group = EngineGroup(2, 1, partial(Transfer, world_size=3), limit=30.0)
    threading.Timer(0.2, group.fail, [RolloutError("engine 1 was lost 4 times")]).start()
    begin = time.monotonic()
    with pytest.raises(RolloutError, match="engine 1 was lost 4 times"):
        group.send(engines[0], engines[0], PAYLOAD)
    assert time.monotonic() - begin < 10


def test_an_engine_that_does_not_come_is_an_error_in_bounded_time() -> None:
    engine = Engine()
    group = EngineGroup(2, 1, partial(Transfer, world_size=3), limit=0.1)
    with pytest.raises(RolloutError, match=r"not all of 2 engines were ready .* within 0.2 s"):
        group.send(engine, engine, PAYLOAD)


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
    first = trained(model)
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(lambda _: spec.expected(first), range(count)))
    assert len(calls) == 1
    assert all(expected is found[0] for expected in found)
    second = {name: x + 1e-2 for name, x in first.items()}
    assert spec.expected(second).fingerprint != found[0].fingerprint
    next(iter(second.values())).add_(1.0)  # the same tensors with other numbers
    assert len(calls) == 2
    assert spec.expected(second).fingerprint != spec.expected(first).fingerprint
    assert len(calls) == 4


def test_remembering_keeps_no_weights_alive() -> None:
    model = policy()
    weights = {name: x.clone() for name, x in trained(model).items()}
    PolicyTemplate.of(model).expected(weights)
    weights.clear()
    assert all(ref() is None for ref, _ in policy_template._LATEST.key[1:])
