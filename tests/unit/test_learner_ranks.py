"""Two processes give the numbers of one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig

from kedge.algorithms import ppo
from kedge.learner.learner_state import WeightCopier
from kedge.learner.reference import AdapterReference, frozen_copy
from kedge.loop.stages import micro_batches
from kedge.models.fingerprint import fingerprint, full_tensor, policy_weights
from kedge.models.load import load_policy
from kedge.models.peft import with_adapter
from kedge.records.types import PromptBatch, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy, tiny_reward_model
from tests.learners import VOCAB, arguments, experience, learner, random_head, rollout
from tests.ranks import leave, run_ranks

SHARDED = {
    "sharded": {"ACCELERATE_USE_FSDP": "true"},
    "sharded shared": {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"},
    "sharded adapter": {"ACCELERATE_USE_FSDP": "true"},
}
HALF = {"bf16 whole": {}, "bf16 sharded": {"ACCELERATE_USE_FSDP": "true"}}


def launch(world: int, mode: str, folder: Path) -> dict:
    """Run this file in ``world`` processes; what rank 0 wrote."""
    out = folder / f"{mode}-{world}.json"
    run_ranks(world, __file__, mode, out, **(SHARDED | HALF).get(mode, {}))
    return json.loads(out.read_text())


def precision(mode: str) -> str:
    return "bf16" if "bf16" in mode else "no"


def count_gathers() -> dict[str, int]:
    """Numbers that FSDP gathers from now on, by their type."""
    gathered: dict[str, int] = {}
    names = ("all_gather_single", "all_gather_into_tensor")  # of torch 2.13, and before
    name = next(n for n in names if hasattr(torch.distributed, n))
    gather = getattr(torch.distributed, name)

    def count(output, *args, **named):
        kind = str(output.dtype)
        gathered[kind] = gathered.get(kind, 0) + output.numel()
        return gather(output, *args, **named)

    setattr(torch.distributed, name, count)
    return gathered


def build(mode: str, rank: int):
    torch.manual_seed(rank)  # a head made from other random numbers on each rank
    value = random_head(32) if "shared" in mode else "model"
    if "shared" in mode and rank == 0:
        torch.nn.init.constant_(value.summary.weight, 0.05)
    policy = tiny_policy(vocab_size=VOCAB, tie_word_embeddings="shared" in mode)
    reference = frozen_copy(policy)
    if "adapter" in mode:
        torch.manual_seed(3)
        top = None if "sharded" in mode else [1]  # the layer below is computed once per batch
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=top)
        policy = with_adapter(policy, lora)
        reference = AdapterReference(policy)
    # A large epsilon: Adam's first steps would blow rounding up to the size of the rate.
    args = arguments(adam_epsilon=1e-2, lr_scheduler_type="linear")
    return learner(
        policy=policy, reference=reference, value=value, max_grad_norm=1.0, args=args,
        gradient_checkpointing="shared" not in mode, precision=precision(mode),
    )  # fmt: skip


def wrapped(found):
    dtype = torch.bfloat16 if found.low_precision else None
    return found.wrap_engine(EmbeddedEngine(found.policy, pad_id=0, autocast=dtype))


def run(mode: str, out: str) -> None:
    """What each process does: three optimizer steps on its rows of one batch of six."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision(mode))
    rank, world = accelerator.process_index, accelerator.num_processes
    found = build(mode, rank)
    assert found.sharded == (world > 1 and "sharded" in mode)
    # Without shards, ranks may hold different numbers of rows, and so of micro-batches.
    parts = [range(3), range(3, 6)] if "sharded" in mode else [range(4), range(4, 6)]
    mine = torch.tensor(list({1: [range(6)], 2: parts}[world][rank]))
    batch, algo = experience(rollout(6)).rows(mine), ppo(vf_coef=0.5)
    whole = rollout(6)
    prompts = PromptBatch(
        ids=whole.prompts.ids[mine], mask=whole.prompts.mask[mine], group=mine, row=mine
    )
    engine = wrapped(found)
    note: list = []
    if "bf16" in mode:
        gathered = count_gathers()
        kinds = {"values": True, "reference": False, "full_kl": False}
        said = found.compute_logprobs(rollout(6).rows(mine), **kinds)
        copies = WeightCopier(first_only=True, dtype=torch.bfloat16)(found.policy)
        assert copies.fingerprint == found.fingerprint()  # of float32
        assert {x.dtype for x in copies.values()} <= {torch.bfloat16}
        note.append(gathered.copy() | {"logprobs": float(found.all_reduce(said.logprobs.sum()))})
    for i in range(4):
        if i == 2:  # go on in another learner
            state, found = found.state_dict(), build(mode, rank)
            found.load_state_dict(state)
            engine = wrapped(found)
        drawn = engine.generate(prompts, sampling=Sampling(max_new_tokens=9), seed=i)
        said = found.compute_logprobs(drawn, values=True, reference=True, full_kl=True)
        sums = [said.logprobs, said.ref_logprobs, said.values, said.full_kl, drawn.ids.double()]
        note.append({str(j): float(found.all_reduce(x.sum())) for j, x in enumerate(sums)})
        step = micro_batches(batch, torch.arange(len(batch)), algo, 1, found.all_reduce)
        note.append(found.optimizer_step(step, algo.loss, only_value=i == 0))
        found.advance_version()
    receipt = engine.load_weights({}, found.version)
    assert receipt.fingerprint == found.fingerprint()
    whole = {name: full_tensor(p) for name, p in policy_weights(found.policy).items()}
    assert found.fingerprint() == fingerprint(whole)  # although no rank gathered anything
    weights = {name: x.flatten().double().tolist() for name, x in found.weights().items()}
    found.save(Path(out + "-policy"), Path(out + "-value"))
    leave({"metrics": note, "weights": weights}, out)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["separate", "shared", "adapter", *SHARDED])
def test_two_ranks_give_the_numbers_of_one(mode, tmp_path):
    one, two = (launch(world, mode, tmp_path) for world in (1, 2))
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        # Sums over tokens, some of which all but cancel: single precision leaves some 1e-6.
        assert a == pytest.approx(b, rel=1e-4, abs=5e-6)
    for name, x in one["weights"].items():
        y = torch.tensor(two["weights"][name])
        torch.testing.assert_close(torch.tensor(x), y, atol=2e-5, rtol=1e-4, msg=name)
    if "adapter" not in mode:
        saved = [
            dict(load_policy(str(tmp_path / f"{mode}-{n}.json-policy")).named_parameters())
            for n in (1, 2)
        ]
        for name, x in saved[0].items():
            assert list(x.shape) == list(saved[1][name].shape)
            torch.testing.assert_close(x, saved[1][name], atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_layers_are_gathered_in_bf16_and_summed_in_float32(tmp_path):
    """What is not in layers, embedding and head, is gathered in float32."""
    (first, *one), (gathered, *two) = (
        launch(world, mode, tmp_path)["metrics"] for world, mode in zip((1, 2), HALF, strict=True)
    )
    models = tiny_policy(vocab_size=VOCAB), tiny_reward_model(vocab_size=VOCAB)
    layers = [sum(p.numel() for p in m.model.layers.parameters()) for m in models]
    rest = [sum(p.numel() for p in m.parameters()) for m in models]
    assert gathered["torch.bfloat16"] == sum(layers)
    assert gathered["torch.float32"] == pytest.approx(sum(rest) - sum(layers), abs=32)  # padding
    # Matrices are what autocast makes of float32 ones; norms are 1 until they train.
    assert gathered["logprobs"] == pytest.approx(first["logprobs"], rel=1e-6)
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=5e-3, abs=3e-2)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
