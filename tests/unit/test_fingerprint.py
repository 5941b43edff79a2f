import hashlib

import pytest
import torch

from kedge.backends.hf import fingerprint as module
from kedge.backends.hf.fingerprint import fingerprint, policy_weights
from kedge.testing import tiny_policy


def weights(dtype=torch.float32, n=40_000):
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(n, generator=generator).to(dtype),
        "b": torch.randn(3, 5, generator=generator).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("index", [0, 16_383, 16_384, 39_999])
def test_the_smallest_change_of_any_weight_shows(dtype, index):
    before = weights(dtype)
    after = weights(dtype)
    bits = after["a"].view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[index] += 1
    assert fingerprint(before) == fingerprint(weights(dtype))
    assert fingerprint(before) != fingerprint(after)


def test_order_of_names_does_not_matter():
    w = weights()
    assert fingerprint(w) == fingerprint(reversed(w.items()))


def test_names_shapes_and_types_do():
    w = weights()
    a, b = w.values()
    other = [
        {"a": a, "c": b},
        {"a": a},
        {"a": a, "b": b.view(5, 3)},
        {"a": a, "b": b.view(torch.int32)},
        {"a": a.view(200, 200).t().reshape(-1), "b": b},
        {"a": torch.cat([a[16_384:32_768], a[:16_384], a[32_768:]]), "b": b},  # blocks exchanged
        {"a": a.flip(0), "b": b},
    ]
    assert len({fingerprint(x) for x in [w, *other]}) == 1 + len(other)


def test_layout_in_memory_does_not_matter():
    w = weights()["a"].view(200, 200)
    assert fingerprint({"w": w}) == fingerprint({"w": w.t().contiguous().t()})


def test_empty_scalar_and_boolean_tensors():
    odd = {"e": torch.zeros(0), "s": torch.tensor(1.0), "m": torch.tensor([True, False])}
    flipped = odd | {"m": torch.tensor([False, False])}
    assert fingerprint(odd) != fingerprint(flipped)
    assert fingerprint({}) == fingerprint({})


def test_policy_weights_are_those_that_train():
    model = tiny_policy("gpt2")
    assert set(policy_weights(model)) == {name for name, _ in model.named_parameters()}
    model.requires_grad_(False)
    model.transformer.ln_f.weight.requires_grad_(True)
    assert set(policy_weights(model)) == {"transformer.ln_f.weight"}


@pytest.mark.parametrize("rows", [0, 1, 3, 700, 2300])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums_of_shards_make_the_fingerprint_of_the_whole(rows, ranks, monkeypatch):
    whole = torch.randn(rows, 51, generator=torch.Generator().manual_seed(rows))
    chunk, factors = -(-rows // ranks), module._factors(torch.device("cpu"))
    shards = []
    for rank in range(ranks):
        begin, end = (min(r * chunk, rows) for r in (rank, rank + 1))
        shards.append(module._sum_shard(whole[begin:end], begin * 51, factors))
    head = f"w {tuple(whole.shape)} {whole.dtype}"
    local = iter([[("w", shard)] for shard in shards])

    def all_gather(out, mine):
        out[:] = [mine, *(_ints(next(local)[0][1]) for _ in range(ranks - 1))]

    monkeypatch.setattr(module.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(module.dist, "all_gather_object", all_gather)
    next(local)
    (line,) = module._join_shards([(head, shards[0])])
    digest = hashlib.blake2b(line.encode(), digest_size=8).hexdigest()
    assert digest == fingerprint({"w": whole})


def _ints(x):
    return [(x.first, int(x.head), int(x.rows), x.last, int(x.tail))]
