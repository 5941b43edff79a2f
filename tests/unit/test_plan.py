"""Batch sizes: every one derived once, errors that name what would fit."""

import pytest

from kedge.errors import ConfigError
from kedge.loop.batch_sizes import compute_batch_sizes


def test_the_sizes_of_a_run():
    plan = compute_batch_sizes(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        world_size=2,
        num_mini_batches=6,
        num_ppo_epochs=4,
        num_generations=2,
        total_episodes=100,
    )
    assert plan.local_rows == 12
    assert plan.batch_size == 24
    assert (plan.local_prompts, plan.prompts) == (6, 12)
    assert (plan.local_mini_rows, plan.mini_batch_size) == (2, 4)
    assert plan.micro_rows == 2  # never more than an optimizer step has
    assert plan.micro_batches == 1
    assert plan.iterations == 5  # ceil(100 / 24)
    assert plan.episodes == 120
    assert plan.optimizer_steps_per_iteration == 24
    assert plan.optimizer_steps == 120
    assert plan.derived() == {
        "world_size": 2,
        "num_total_batches": 5,
        "micro_batch_size": 4,
        "local_batch_size": 12,
        "batch_size": 24,
        "local_mini_batch_size": 2,
        "mini_batch_size": 4,
    }


def test_micro_batches_cover_a_step_that_they_do_not_divide():
    plan = compute_batch_sizes(
        per_device_train_batch_size=5,
        gradient_accumulation_steps=3,
        num_mini_batches=1,
        max_steps=1,
    )
    assert (plan.local_mini_rows, plan.micro_rows, plan.micro_batches) == (15, 5, 3)
    plan = compute_batch_sizes(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_mini_batches=2,
        max_steps=1,
    )
    assert (plan.local_mini_rows, plan.micro_rows, plan.micro_batches) == (6, 4, 2)


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({"total_episodes": 1}, 1),
        ({"total_episodes": 8}, 1),
        ({"total_episodes": 9}, 2),
        ({"max_steps": 3, "dataset_rows": 1000}, 3),
        ({"max_steps": 3, "total_episodes": 1000}, 3),
        ({"max_steps": 300, "total_episodes": 17}, 3),
        ({"num_train_epochs": 3.0, "dataset_rows": 8}, 3),
        ({"num_train_epochs": 3.0, "dataset_rows": 9}, 4),
        ({"num_train_epochs": 0.1, "dataset_rows": 240}, 3),
        ({"num_train_epochs": 1.0, "dataset_rows": 2}, 1),  # smaller than a batch: D7
        ({"num_train_epochs": 1.0, "dataset_rows": 8, "num_generations": 2}, 2),
    ],
)
def test_when_a_run_ends(options, iterations):
    assert compute_batch_sizes(per_device_train_batch_size=8, **options).iterations == iterations


def test_an_epoch_uses_every_prompt_once():
    plan = compute_batch_sizes(
        per_device_train_batch_size=8, num_generations=4, dataset_rows=5, max_steps=1
    )
    assert plan.iterations_per_epoch == 2.5


BAD = [
    (
        {"per_device_train_batch_size": 12, "num_mini_batches": 5, "num_generations": 2},
        "num_mini_batches=5 does not divide the batch of 12 samples (6 prompts x 2 each); "
        "nearest that do: 4, 6",
    ),
    (
        {
            "per_device_train_batch_size": 6,
            "gradient_accumulation_steps": 2,
            "world_size": 2,
            "num_mini_batches": 24,
        },
        "num_mini_batches=24 does not divide the batch of 12 samples on each of the 2 ranks "
        "(12 prompts x 1 each); nearest that do: 12",
    ),
    (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 3},
        "num_generations=3 does not divide the batch of 8 samples (per_device_train_batch_size=4 "
        "x gradient_accumulation_steps=2); nearest that do: 2, 4",
    ),
    (
        {"per_device_train_batch_size": 3, "num_generations": 2, "min_group": 2},
        "num_generations=2 does not divide the batch of 3 samples (per_device_train_batch_size=3 "
        "x gradient_accumulation_steps=1); nearest that do: 3",
    ),
    (
        {"per_device_train_batch_size": 1, "num_generations": 2, "min_group": 2},
        "nearest that do: none; raise per_device_train_batch_size",
    ),
    (
        {"per_device_train_batch_size": 8, "min_group": 2},
        "num_generations=1 must be at least 2: this algorithm compares responses to the same "
        "prompt",
    ),
    (
        {"per_device_train_batch_size": 8, "num_train_epochs": 0.0, "dataset_rows": 8},
        "num_train_epochs=0.0 must be above 0",
    ),
    ({"per_device_train_batch_size": 8}, "set total_episodes or max_steps"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ConfigError) as error:
        compute_batch_sizes(**options)
    assert message in str(error.value)
