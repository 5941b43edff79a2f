"""Around the classic step: sampling, data, logging, saving."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kedge.ext.trl.classic import LengthSampler
from kedge.records.errors import CheckpointError
from tests.classic_models import bart, gpt2, letters, lora, samples, t5, trainer

pytestmark = pytest.mark.filterwarnings("ignore:the KL to the reference")
QUERIES = [torch.tensor(x) for x in ([3, 4, 5], [6, 7], [8, 9, 10, 11], [12], [13, 14, 15])]
DRAW = {"do_sample": True, "top_k": 0.0, "top_p": 1.0, "min_length": -1}


@pytest.mark.parametrize("make", [gpt2, t5, bart])
def test_a_list_gives_what_each_query_gives(make: Any) -> None:
    found = trainer(make())
    greedy = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 1}
    together = found.generate(QUERIES, batch_size=2, return_prompt=False, **greedy)
    for query, row in zip(QUERIES, together, strict=True):
        (alone,) = found.generate(query, return_prompt=False, **greedy)
        assert torch.equal(alone[: len(row)], row)
    if make is gpt2:
        with_prompt = found.generate(QUERIES, batch_size=5, **greedy)
        for query, row, whole in zip(QUERIES, together, with_prompt, strict=True):
            assert torch.equal(whole, torch.cat([query, row]))
    else:
        assert all(int(row[0]) == found.model.config.decoder_start_token_id for row in together)


def test_one_query() -> None:
    found = trainer(gpt2())
    assert found.generate(QUERIES[0], max_new_tokens=4, **DRAW).shape[0] == 1
    with pytest.raises(
        ValueError, match=r"query_tensor must be one query of .* got shape \(1, 3\)"
    ):
        found.generate(QUERIES[0][None], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"query_tensor\[0\] must have .* got shape \(0,\)"):
        found.generate([QUERIES[0][:0]], max_new_tokens=4)


def test_an_end_token_inside_the_query_ends_nothing() -> None:
    found = trainer(gpt2())
    query = torch.tensor([3, 0, 5])
    (whole,) = found.generate([query], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert torch.equal(whole[:3], query)
    assert len(whole) == 6


def test_responses_end_with_their_first_end_token() -> None:
    found = trainer(gpt2())
    with torch.no_grad():
        found.model.pretrained_model.transformer.wte.weight[0] *= 20  # end tokens are likely
    rows = found.generate(QUERIES * 4, return_prompt=False, max_new_tokens=12, **DRAW)
    assert any(0 in r for r in rows)
    assert all(0 not in r[:-1] for r in rows)


def test_responses_end_with_any_end_token_of_the_generation_config() -> None:
    found = trainer(gpt2())
    found.model.pretrained_model.generation_config.eos_token_id = list(range(5, 28, 2))
    rows = found.generate(QUERIES * 4, return_prompt=False, max_new_tokens=12, **DRAW)
    ends = [[i for i, token in enumerate(r.tolist()) if token >= 5 and token % 2] for r in rows]
    assert any(ends)
    assert all(not e or e[0] == len(r) - 1 for e, r in zip(ends, rows, strict=True))  # no padding


def test_lengths_are_drawn_per_chunk() -> None:
    found = trainer(gpt2())
    drawn = iter([2, 3, 4])
    rows = found.generate(
        QUERIES,
        length_sampler=lambda: next(drawn),
        batch_size=2,
        return_prompt=False,
        eos_token_id=27,
        do_sample=False,
    )
    limits = [2, 2, 3, 3, 4]
    assert [len(r) <= n for r, n in zip(rows, limits, strict=True)] == [True] * 5
    np.random.seed(0)
    lengths = {LengthSampler(2, 5)() for _ in range(100)}
    assert lengths == {2, 3, 4}
    with pytest.raises(ValueError, match="min_value < max_value, got 3 and 3"):
        LengthSampler(3, 3)


@pytest.mark.parametrize("adapter", [False, True])
def test_responses_of_the_reference(adapter: bool) -> None:
    found = trainer(gpt2(), learning_rate=0.1, peft_config=lora() if adapter else None)
    greedy = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    before = found.generate(QUERIES, **greedy)
    found.step(*samples())
    own, reference = found.generate(QUERIES, generate_ref_response=True, **greedy)
    assert all(torch.equal(a, b) for a, b in zip(reference, before, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    again = found.generate(QUERIES, **greedy)  # the adapter is back
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))


def words(n: int = 21) -> Any:
    from datasets import Dataset

    rows = [" ".join(chr(97 + (i + j) % 26) for j in range(1 + i % 3)) for i in range(n)]
    return Dataset.from_dict({"query": rows, "extra": list(range(n))})


def test_batches_of_a_dataset() -> None:
    found = trainer(gpt2(), dataset=words())
    batches = list(found.dataloader)
    assert len(batches) == 2  # 21 rows, 8 a step
    assert set(batches[0]) == {"query", "input_ids"}
    tok = letters(28)
    for batch in batches:
        for text, ids in zip(batch["query"], batch["input_ids"], strict=True):
            assert ids.tolist() == tok.encode(text)
    kept = trainer(gpt2(), dataset=words(), remove_unused_columns=False)
    assert "extra" in next(iter(kept.dataloader))
    own = trainer(gpt2()).prepare_dataloader(words(), len)
    assert list(own) == [8, 8]


def test_datasets_that_cannot_work() -> None:
    from datasets import Dataset

    with pytest.raises(ValueError, match="has 3 rows, fewer than batch_size=8"):
        trainer(gpt2(), dataset=words(3))
    with pytest.raises(ValueError, match=r"must have a text column 'query' .* its columns: text"):
        trainer(gpt2(), dataset=Dataset.from_dict({"text": ["a"] * 9}))


def run(found: Any, steps: int) -> None:
    """Generate, score by the share of one letter, step: everything random is drawn on the way."""
    for _ in range(steps):
        shift = random.randrange(3) + int(np.random.randint(3))
        queries = [torch.tensor([2 + shift, 3 + i]) for i in range(8)]
        responses = found.generate(queries, return_prompt=False, max_new_tokens=5, **DRAW)
        found.step(queries, responses, [(r == 5).float().mean() for r in responses])


def state(found: Any) -> list[Tensor]:
    held = [p.detach().clone() for p in found.model.parameters()]
    for p in found.model.parameters():
        held += [x.clone() for x in found.optimizer.state.get(p, {}).values()]
    numbers = [found.kl_ctl.value, found.running.mean, found.running.std, random.random()]
    return [*held, torch.tensor([*numbers, np.random.rand()]), torch.rand(2)]


@pytest.mark.parametrize("make", [gpt2, t5])
def test_saved_and_loaded_runs_go_on_bit_for_bit(make: Any, tmp_path: Path) -> None:
    options = {"use_score_scaling": True, "horizon": 50.0, "sgd": None}
    whole = trainer(make(), **options)
    run(whole, 4)
    a = state(whole)
    half = trainer(make(), **options)
    run(half, 2)
    folder = half.save_state(tmp_path)
    assert folder.name == "checkpoint-2"
    resumed = trainer(make(), **options)
    run(resumed, 1)  # other weights, another random state
    resumed.load_state(tmp_path)
    assert resumed.current_step == 2
    run(resumed, 2)
    b = state(resumed)
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_states_of_other_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        trainer(gpt2()).load_state(tmp_path)
    trainer(gpt2()).save_state(tmp_path)
    with pytest.raises(CheckpointError, match="the reference differs from that of the checkpoint"):
        trainer(gpt2(1)).load_state(tmp_path)


def test_what_save_pretrained_writes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kedge.ext.trl.classic import AutoModelForCausalLMWithValueHead

    found = trainer(gpt2())
    found.step(*samples())
    found.save_pretrained(tmp_path / "mine")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "mine")
    for (name, p), q in zip(found.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    assert torch.equal(plain.lm_head.weight, found.model.pretrained_model.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "mine").eos_token_id == 0
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "# mine" in card
    assert "| learning_rate | 0.001 |" in card
    assert "AutoModelForCausalLMWithValueHead.from_pretrained('mine')" in card


class Api:
    """Takes what is pushed."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, set[str]]] = []

    def create_repo(self, **options: Any) -> Any:
        return None

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> None:
        self.pushed.append((repo_id, {p.name for p in Path(folder_path).iterdir()}))


def test_push_to_hub() -> None:
    api, found = Api(), trainer(gpt2())
    found.push_to_hub("me/mine", api=api)
    ((repo, files),) = api.pushed
    assert repo == "me/mine"
    assert files >= {"model.safetensors", "value_head.safetensors", "tokenizer.json", "README.md"}
    found.model.push_to_hub("me/model", api=api)
    assert api.pushed[1][0] == "me/model"


def test_push_if_best() -> None:
    api = Api()
    where = {"repo_id": "me/best", "api": api}
    found = trainer(gpt2(), push_to_hub_if_best_kwargs=where, compare_steps=2)
    queries, responses, _ = samples()
    for score in (9.0, 1.0, 9.0, 0.5, 9.0, 2.0):  # every second one is looked at
        found.step(queries, responses, [torch.tensor(score)] * 8)
    assert len(api.pushed) == 2  # at 1.0 and at 2.0
    assert found.highest_reward == 2.0


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = trainer(gpt2(), log_with="tensorboard", project_kwargs={"logging_dir": str(tmp_path)})
    queries, responses, scores = samples()
    batch = {"query": ["q|" + str(i) for i in range(8)], "response": ["r"] * 8, "own": range(8)}
    for _ in range(2):
        stats = found.step(queries, responses, scores)
        found.log_stats(stats, batch, scores, columns_to_log=["query", "own"])
    found.accelerator.end_training()
    (folder,) = {p.parent for p in tmp_path.rglob("events*") if p.parent.name == "trl"}
    seen = EventAccumulator(str(folder)).Reload()
    assert [e.step for e in seen.Scalars("objective/kl")] == [1, 2]
    mean = float(torch.stack(scores).mean())
    assert seen.Scalars("env/reward_mean")[0].value == pytest.approx(mean)
    assert {"ppo/policy/ratio", "env/reward_dist"} <= set(seen.Tags()["histograms"])
    text = seen.Tensors("game_log/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| query | own | reward |" in text
    assert "| q&#124;3 | 3 |" in text


def test_what_log_stats_refuses(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    found = trainer(gpt2(), log_with="tensorboard", project_kwargs={"logging_dir": str(tmp_path)})
    with pytest.raises(ValueError, match="missing: gold; available: query"):
        found.log_stats({}, {"query": []}, [torch.ones(())], columns_to_log=["gold"])
    with pytest.raises(ValueError, match="must have equal lengths, got 1 rewards"):
        found.log_stats({}, {"query": [], "response": []}, [torch.ones(())])
    with pytest.warns(UserWarning, match="no table of responses is logged"):
        found.log_stats({}, {}, [torch.ones(())])
