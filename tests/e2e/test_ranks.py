"""Whole runs on two ranks, copied or sharded, sharing engines or a policy: the numbers of one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small import PROMPTS, small
from tests.ranks import leave, run_ranks

ROWS = 4


def work(folder: str, out: str) -> None:
    """What each process does."""
    from tests.e2e.test_resume import trainer

    made = trainer(
        Path(folder),
        per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
        num_mini_batches=2,
        learning_rate=1e-3,
        adam_epsilon=1e-3,  # Adam would blow rounding up to the size of the learning rate
        logging_steps=1,
        max_lag=int(os.environ.get("MAX_LAG", "0")),
        **{"value_source": "copy", "freeze_value_attention": True, "num_value_epochs": 2},
        **{"value_learning_rate": 1e-2, "scale_rewards": "running"},
    )
    made.train()
    keys = ("objective/kl", "objective/scores", "loss/policy_avg", "loss/value_avg", "grad_norm")
    keys += ("val/num_eos_tokens", "val/ratio_var", "val/explained_variance", "policy/entropy_avg")
    rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    leave(rows, out)


def launch(
    folder: Path, world: int, *, file: str = __file__, job: Any = work, **env: str
) -> list[dict[str, Any]]:
    """Run a job of this file, or a file like it, in ``world`` processes; what the first wrote."""
    out = folder / "rows.json"
    folder.mkdir(exist_ok=True, parents=True)
    name = [job.__name__] if file == __file__ else []
    strict = ("-W", "error::UserWarning:torch")
    run_ranks(world, *strict, file, folder / "run", out, *name, timeout=600, **env)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_two_ranks_copied_or_sharded_give_the_numbers_of_one(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", 1)
    two = launch(tmp_path / "two", 2)
    sharded = launch(tmp_path / "sharded", 2, ACCELERATE_USE_FSDP="true")
    assert len(one) == 6
    assert abs(one[-1]["objective/kl"]) > 1e-3  # the policy moved
    for a, b, c in zip(one, two, sharded, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
        assert c == pytest.approx(a, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_sharded_policy_is_sampled_ahead_from_a_whole_copy(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", 1, MAX_LAG="1")
    sharded = launch(tmp_path / "sharded", 2, ACCELERATE_USE_FSDP="true", MAX_LAG="1")
    assert abs(one[-1]["objective/kl"]) > 1e-3
    for a, b in zip(one, sharded, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)


STEPS = 10


def train_on_shared_engines(folder: str, out: str) -> None:
    """What each process does."""
    from tests.on_ray.jobs import AsDone

    options = {
        "output_dir": folder,
        "total_episodes": 2 * ROWS * STEPS,
        "num_ppo_epochs": 1,
        "max_lag": 2,
        "response_length": 16,
        "in_flight_weight_updates": os.environ["IN_FLIGHT"] == "1",
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "eval_dataset": PROMPTS[:4],
    }
    first = AsDone(options, engine="here", end=os.environ["END"])()
    rows, *second = AsDone(options, engine="here", resume=True)()
    if os.environ["RANK"] == "0":
        # Without what came after the checkpoint that it resumed from.
        pairs = zip(first[1], second[0], strict=True)
        trained = [a[: STEPS - len(b)] + b for a, b in pairs]
        scored = [a["scored"] + b["scored"] for a, b in zip(first[2], second[1], strict=True)]
        Path(out).write_text(json.dumps([[rows, trained, scored]]))
    leave()


def check_shares(rows: list[dict[str, Any]], trained: list[Any], scored: list[int]) -> None:
    """Every prompt was trained on once, within the bound, and the ranks had equal shares."""
    assert [row["episode"] for row in rows] == [2 * ROWS * n for n in range(1, STEPS + 1)]
    ages = {age for rank in trained for x in rank for age in x[4]}
    assert {0} < ages <= {0, 1, 2}
    source = small(per_device_train_batch_size=2 * ROWS).engine.source
    want = [
        " ".join(map(str, b.ids[i][b.mask[i]].tolist()))
        for b in map(source.batch, range(STEPS))
        for i in range(2 * ROWS)
    ]
    got = [text for rank in trained for prompts, *_ in rank for text in prompts]
    assert sorted(got) == sorted(want)
    texts = {x for rank in trained for a, b, *_ in rank for x in zip(a, b, strict=True)}
    assert len(texts) == 13  # columns follow their prompts
    for rank, iterations in enumerate(trained):
        assert [x[2] for x in iterations] == [list(range(rank * ROWS, (rank + 1) * ROWS))] * STEPS
    totals = [sum(x[3] for x in iterations) for iterations in trained]
    assert max(totals) <= 1.1 * min(totals)
    assert sum(scored) >= 2 * ROWS * STEPS
    assert min(scored) > 0.2 * sum(scored)  # each rank scores


@pytest.mark.slow
@pytest.mark.parametrize(("in_flight", "end"), [("0", "reward"), ("1", "stop")])
def test_two_learners_share_three_engines(tmp_path: Path, in_flight: str, end: str) -> None:
    """They evaluate between iterations, end in the middle of the run and resume."""
    (found,) = launch(tmp_path, 2, job=train_on_shared_engines, IN_FLIGHT=in_flight, END=end)
    check_shares(*found)


GROUP_ROWS = 16


def first_word(completions: list[str], **_: Any) -> list[float]:
    """Rarely differs between responses to one prompt."""
    return [float(text.split()[:1] == ["w5"]) for text in completions]


def train_on_resampled_groups(folder: str, out: str) -> None:
    """What each process does."""
    from kedge import GRPOConfig, GRPOTrainer
    from kedge.testing import tiny_policy
    from tests.e2e.small import PROMPTS, QUIET, VOCAB
    from tests.on_ray.jobs import local_engines
    from tests.unit.text_toys import word_tokenizer

    shared = os.environ.get("ENGINES") == "shared"
    made = GRPOTrainer(
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GROUP_ROWS // int(os.environ["WORLD_SIZE"]),
            **{"num_generations": 4, "total_episodes": 5 * GROUP_ROWS, "dynamic_sampling": 3},
            **{"response_length": 3, "learning_rate": 1e-3},
            adam_epsilon=1e-3,  # Adam would blow rounding up to the size of the learning rate
            **QUIET,
            max_lag=int(os.environ.get("MAX_LAG", "0")),
        ),
        model=tiny_policy("gpt_neox", vocab_size=VOCAB),
        processing_class=word_tokenizer(),
        reward_funcs=[first_word],
        train_dataset=PROMPTS,
        **({"rollout_engine": local_engines()} if shared else {}),
    )
    asked = []
    generate = made.engine.rollout_engine.generate
    made.engine.rollout_engine.generate = lambda *a, **k: (
        asked.append(len(a[0])),
        generate(*a, **k),
    )[1]
    made.train()
    keys = ("objective/scores", "loss/policy_avg", "grad_norm", "rollout/resampled_groups")
    rows = [{k: row[k] for k in keys} for row in made.state.log_history if "grad_norm" in row]
    rank = os.environ["RANK"]
    Path(out).with_suffix(f".{rank}").write_text(json.dumps(asked))
    leave(rows, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "max_lag"),
    [({"ENGINES": "shared"}, "1"), ({"ACCELERATE_USE_FSDP": "true"}, "0")],
    ids=["shared engines", "sharded policy"],
)
def test_dynamic_sampling(tmp_path: Path, env: dict[str, str], max_lag: str) -> None:
    one = launch(tmp_path / "one", 1, job=train_on_resampled_groups, MAX_LAG=max_lag)
    two = launch(tmp_path / "two", 2, job=train_on_resampled_groups, MAX_LAG=max_lag, **env)
    assert len(one) == 5
    assert sum(row["rollout/resampled_groups"] for row in one) > 5
    assert any(row["grad_norm"] > 0 for row in one)
    for a, b in zip(one, two, strict=True):
        names = ("objective/scores", "loss/policy_avg", "grad_norm")
        assert b["rollout/resampled_groups"] == a["rollout/resampled_groups"]
        assert [b[n] for n in names] == pytest.approx([a[n] for n in names], rel=1e-3, abs=1e-5)
    rounds = [json.loads((tmp_path / "two" / f"rows.{rank}").read_text()) for rank in (0, 1)]
    assert len(rounds[0]) != len(rounds[1])  # else this shows nothing


def refuse_own_shards(folder: str, out: str) -> None:
    """What each process does."""
    from datasets import Dataset, IterableDataset

    from kedge.records.errors import DataError

    rows = PROMPTS[:12][int(os.environ["RANK"]) :: 2]
    table = Dataset.from_list(rows)
    longer = Dataset.from_list(rows * 2 if os.environ["RANK"] == "0" else rows)
    stream: IterableDataset = table.to_iterable_dataset()
    options = {"output_dir": folder, "per_device_train_batch_size": 2, "max_steps": 1}
    options["total_episodes"] = None
    said = []
    for given in (
        {"train_dataset": table},
        {"train_dataset": longer},
        {"train_dataset": stream},
        {"eval_dataset": table, "eval_strategy": "steps"},
    ):
        with pytest.raises(DataError) as error:
            small(**options, **given)
        said.append(str(error.value).partition(" which")[0])
    leave(said, out)


@pytest.mark.slow
def test_ranks_with_their_own_shards_are_refused(tmp_path: Path) -> None:
    said = launch(tmp_path, 2, job=refuse_own_shards)
    names = ["train_dataset"] * 3 + ["eval_dataset"]
    assert said == [f"{name} differs between the 2 processes," for name in names]


if __name__ == "__main__":
    globals()[sys.argv[3]](*sys.argv[1:3])
