"""When a run shows samples and writes token rows."""

import pytest

from kedge.config.ppo import PPOConfig
from kedge.reporting.responses import IntervalSchedule


@pytest.mark.parametrize(
    ("options", "iterations", "samples", "tokens"),
    [
        ({"logging_steps": 6}, 20, [*range(2, 21, 2)], [1, 6, 12, 18, 20]),
        ({"logging_steps": 0.25, "num_sample_generations": 2}, 20, [10, 20], [1, 5, 10, 15, 20]),
        ({"logging_strategy": "epoch"}, 10, [*range(1, 11)], [1, 3, 5, 8, 10]),
        ({"logging_strategy": "no", "num_sample_generations": 0}, 20, [], []),
        ({"logging_steps": 1, "num_sample_generations": 0}, 1000, [], [1, *range(10, 1001, 10)]),
        ({"log_token_rows": 0, "num_sample_generations": 1}, 20, [20], []),
    ],
)
def test_cadence(tmp_path, options, iterations, samples, tokens):
    config = PPOConfig(output_dir=str(tmp_path), **options)
    schedule = IntervalSchedule(config, iterations=iterations, iterations_per_epoch=2.5)
    done = range(1, iterations + 1)
    assert [i for i in done if schedule.samples(i)] == samples
    assert [i for i in done if schedule.writes_tokens(i)] == tokens
