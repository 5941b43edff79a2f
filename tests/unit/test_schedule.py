"""When a run logs, evaluates and saves, and how long the learning rate warms up."""

import pytest

from kedge.config.ppo import PPOConfig
from kedge.config.schedule import build_schedule, warmup_iterations
from kedge.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    def make(**options):
        return PPOConfig(output_dir=str(tmp_path / "out"), **options)

    return make


@pytest.mark.parametrize(("steps", "want"), [(0, 0), (0.1, 2), (0.11, 3), (1, 1), (5, 5)])
def test_warm_up_in_updates_or_as_a_fraction(config, steps, want):
    assert warmup_iterations(config(warmup_steps=steps), 20) == want


def due(c, what, iterations=20):
    return [i for i in range(1, iterations + 1) if getattr(c, what)(i)]


def test_cadence_counts_updates(config):
    made = config(logging_steps=6, save_steps=0.25, eval_strategy="epoch", logging_first_step=True)
    c = build_schedule(made, iterations=20, iterations_per_epoch=2.5)
    assert due(c, "logs") == [1, 6, 12, 18, 20]
    assert due(c, "saves") == [5, 10, 15, 20]
    assert due(c, "evaluates") == [3, 5, 8, 10, 13, 15, 18, 20]
    assert due(c, "samples") == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    made = config(eval_strategy="steps", eval_steps=4, eval_delay=9)  # evaluation can start late
    c = build_schedule(made, iterations=20, iterations_per_epoch=None)
    assert due(c, "evaluates") == [12, 16, 20]


def test_cadence_can_be_silent(config):
    made = config(logging_strategy="no", save_strategy="no", num_sample_generations=0)
    c = build_schedule(made, iterations=20, iterations_per_epoch=None)
    assert [due(c, w) for w in ("logs", "saves", "evaluates", "samples")] == [[], [], [], []]
    with pytest.raises(ConfigError, match="needs a dataset with a length"):
        build_schedule(config(save_strategy="epoch"), iterations=20, iterations_per_epoch=None)
