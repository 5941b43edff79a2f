"""Weights by vLLM's own weight transfer: what it is told, what it loads, what receipts say."""

from __future__ import annotations

import threading

import pytest
import torch

from kedge.records.errors import RolloutError, SyncError
from tests.contract.embedded import prompts
from tests.contract.engines import PAD, needs_vllm, policy, trained
from tests.contract.test_vllm_families import SAMPLING, learner_says, shaken

KINDS = {"own head": ("llama", {}), "tied head": ("qwen2", {"tie_word_embeddings": True})}


class Sent:
    """A vLLM in this process, which is sent its weights."""

    def __init__(self, model):
        from kedge.ext.vllm import PolicyTemplate, VLLMEngine
        from kedge.ext.vllm.weights import NcclGroup
        from tests.contract.relay import Relayed, info

        spec = PolicyTemplate.of(model)
        self.service = Relayed(spec, trained(model), {"kv_cache_memory_bytes": 2**26})
        self.calls = []
        self.engine = VLLMEngine(self, spec, pad_id=PAD)
        about = {"gpus": 1, "address": "127.0.0.1", "limit": 60.0, "device": torch.device("cpu")}
        self.group, self.process = NcclGroup(spec.payload, **about), "this one"
        self.group.info = lambda workers: info()

    def __getattr__(self, name):
        return getattr(self.service, name)

    def load(self, payload, version):
        self.group.send([self], payload.weights)
        self.service.finish_load(version)

    def transfer(self, method, **about):
        self.calls.append((method, about))
        self.service.transfer(method, **about)


class TestTransfer:
    pytestmark = needs_vllm

    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_arrive_and_are_sampled_from(self, kind, monkeypatch):
        from tests.contract import relay

        family, config = KINDS[kind]
        model = policy(family, **{"initializer_range": 0.1} | config)
        sent = Sent(model)
        for version in (1, 2):
            sent.calls.clear()
            receipt = sent.engine.load_weights(shaken(model), version)
            assert receipt.version == version
            assert receipt.gap < 1e-5
            if version == 1:
                method, about = sent.calls.pop(0)
                assert method == "init_weight_transfer_engine"
                assert about["init_info"].items() >= {"rank_offset": 1, "world_size": 2}.items()
            names = [method for method, _ in sent.calls]
            assert names == ["start_weight_update", "update_weights", "finish_weight_update"]
            told = sent.calls[1][1]["update_info"]
            assert "lm_head.weight" in told["names"]
            assert set(told["dtype_names"]) == {"float32"}
            rollout = sent.engine.generate(prompts(), sampling=SAMPLING, seed=version)
            assert rollout.policy_version.tolist() == [version] * 6
            gap = (rollout.behavior_logprobs - learner_says(model, rollout)).abs().max()
            assert gap < 1e-4
        monkeypatch.setattr(relay, "SPOILT", ["lm_head.weight"])
        with pytest.raises(SyncError, match="after loading version 3"):
            sent.engine.load_weights(shaken(model), 3)
        with pytest.raises(
            SyncError, match=r"vLLM failed at update_weights.*must be called before"
        ):
            sent.transfer(
                "update_weights", update_info={"names": [], "dtype_names": [], "shapes": []}
            )
        sent.engine.close()

    def test_the_group_of_gpus_is_named_as_vllm_wants_it(self):
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from kedge.ext.vllm.weights import NcclGroup

        about = {"address": "10.0.0.1", "limit": 60.0, "device": torch.device("cpu")}
        info = NcclGroup(dict, gpus=4, **about).info(4)
        assert WeightTransferTrainerFactory._registry[info.backend]().init_info_cls is type(info)
        assert (info.master_address, info.world_size, info.is_sender) == ("10.0.0.1", 5, True)
        assert 0 < info.master_port < 2**16
        assert info.packed


def test_what_takes_too_long_is_left_behind():
    from kedge.ext.vllm.weights import run_with_timeout

    end = threading.Event()
    with pytest.raises(RolloutError, match=r"sending took longer than 0.1 s .* latest checkpoint"):
        run_with_timeout(0.1, end.wait, "sending")
    end.set()
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(60, lambda: 1 / 0, "sending")
    assert run_with_timeout(60, lambda: 3, "sending") == 3


@pytest.mark.parametrize(
    ("device", "gpus", "want"), [("cpu", 1, False), ("cuda", 0.5, False), ("cuda", 2, True)]
)
def test_nccl_needs_gpus_of_their_own_on_both_sides(device, gpus, want):
    from kedge.ext.vllm.weights import use_nccl

    class Weight(torch.Tensor):
        is_cuda = device == "cuda"

    weights = {"a": torch.zeros(1).as_subclass(Weight)}
    assert use_nccl(weights, gpus=gpus, adapter=False) is want
