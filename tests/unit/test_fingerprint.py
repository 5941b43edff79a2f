import pytest
import torch

from kedge.models.fingerprint import checksum, fingerprint, policy_weights
from kedge.testing import tiny_policy


def weights(dtype=torch.float32, n=300_000):
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(n, generator=generator).to(dtype),
        "b": torch.randn(3, 5, generator=generator).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("index", [0, 16_383, 262_143, 262_144, 299_999])
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
        {"a": a.view(500, 600).t().reshape(-1), "b": b},
    ]
    assert len({fingerprint(x) for x in [w, *other]}) == 1 + len(other)


def test_layout_in_memory_does_not_matter():
    w = weights()["a"].view(500, 600)
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


@pytest.mark.parametrize("rows", [0, 1, 3, 700, 23_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_checksums_of_shards_add_up_to_that_of_the_whole(rows, ranks):
    whole = torch.randn(rows, 51, generator=torch.Generator().manual_seed(rows))
    chunk = max(-(-rows // ranks), 1)
    parts = [checksum(x, i * chunk * 51) for i, x in enumerate(whole.split(chunk))]
    assert int(sum(parts)) % 2**32 == int(checksum(whole)) % 2**32


def test_exchanged_chunks_rows_and_words_show():
    whole = torch.randn(5_000, 256, generator=torch.Generator().manual_seed(0))
    orders = [[1, 0, 2, 3, 4], [0, 3, 2, 1, 4]]
    others = [whole.view(5, 1000, 256)[order].view_as(whole) for order in orders]
    chunks = whole.view(-1)[: 4 * 2**18].view(4, -1)  # of the checksum
    others.append(torch.cat([chunks[[1, 0, 2, 3]].flatten(), whole.view(-1)[4 * 2**18 :]]))
    others += [whole[[0, 2, 1, *range(3, 5_000)]], whole[:, [1, 0, *range(2, 256)]]]
    sums = {int(checksum(x)) for x in [whole, *others]}
    assert len(sums) == 1 + len(others)
