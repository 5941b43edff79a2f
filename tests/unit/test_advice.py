"""What a trainer says once at its start about settings that train, but seldom well."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kedge import GRPOConfig, PPOConfig, RLOOConfig
from kedge.trainers.assembly.run import LARGE, advise
from tests.e2e.small import small


@dataclass
class Sized:
    """A module's parameters, without their memory."""

    trained: int
    frozen: int = 0

    def parameters(self):
        sizes = ((self.trained, True), (self.frozen, False))
        return [
            nn.Parameter(torch.empty(n, device="meta"), requires_grad=grad) for n, grad in sizes
        ]


def given(config, *, trained=LARGE, frozen=0, batch_size=512, iterations=9, **options):
    args = config(output_dir=None, use_cpu=True, **options)
    sizes = SimpleNamespace(batch_size=batch_size, iterations=iterations)
    return " | ".join(advise(args, Sized(trained, frozen), sizes))


def test_the_default_learning_rate_of_ppo_is_high_for_a_large_model():
    text = given(PPOConfig)
    assert "learning_rate=5e-05 with num_ppo_epochs=4 is high for 300 million" in text
    assert "learning_rate=3e-6 (Huang et al. 2024, arXiv:2403.17031); `kedge init`" in text
    assert "3e-6" in given(RLOOConfig)
    assert given(PPOConfig, learning_rate=3e-6) == ""
    assert given(PPOConfig, num_ppo_epochs=1) == ""
    assert given(PPOConfig, trained=LARGE - 1) == ""
    assert given(PPOConfig, trained=10**6, frozen=LARGE) == ""  # an adapter


def test_a_batch_of_eight_is_small_for_a_large_model():
    text = given(PPOConfig, learning_rate=3e-6, batch_size=8)
    assert text.startswith("an iteration has 8 responses")
    assert "512" in text
    assert given(PPOConfig, trained=10**6, batch_size=8) == ""
    assert given(PPOConfig, learning_rate=3e-6, batch_size=17) == ""


def test_a_learning_rate_of_one_is_too_high_for_any_model():
    assert "learning_rate=1 is far too high" in given(PPOConfig, learning_rate=1.0, trained=10)
    assert given(PPOConfig, learning_rate=1e-2, trained=10) == ""


def test_episodes_that_do_not_fill_the_last_batch_are_named():
    text = given(PPOConfig, total_episodes=4, batch_size=8, trained=10)
    assert (
        text == "total_episodes=4 is not a multiple of the 8 responses of an iteration: the"
        " run has 8"
    )
    assert given(PPOConfig, total_episodes=16, batch_size=8, trained=10) == ""


@pytest.mark.filterwarnings("ignore")
def test_the_clip_of_gspo():
    assert given(GRPOConfig) == ""
    sequence = {"importance_sampling_level": "sequence", "loss_type": "grpo", "trained": 10}
    text = given(GRPOConfig, **sequence)
    assert "epsilon=0.2 with importance_sampling_level='sequence' hardly ever clips" in text
    assert "epsilon=3e-4, epsilon_high=4e-4" in text
    assert given(GRPOConfig, **sequence, epsilon=3e-4, epsilon_high=4e-4) == ""


def test_a_warmup_of_the_value_that_never_ends():
    text = given(PPOConfig, value_warmup_steps=9, trained=10)
    assert text.startswith("value_warmup_steps=9 covers all 9 iterations")
    assert given(PPOConfig, value_warmup_steps=8, trained=10) == ""


def test_a_trainer_says_it_once(caplog, monkeypatch):
    monkeypatch.setattr("kedge.trainers.assembly.run.LARGE", 1)
    with caplog.at_level(logging.WARNING):
        trainer = small(max_steps=2)
        trainer.train()
    texts = [r.getMessage() for r in caplog.records if "recommended:" in r.getMessage()]
    assert [text.split()[0] for text in texts] == ["learning_rate=0.003", "an"]
    caplog.clear()
    monkeypatch.undo()
    small()
    assert not [r for r in caplog.records if "recommended:" in r.getMessage()]


def test_the_first_iteration_is_reported_whatever_is_logged(tmp_path, capsys, caplog):
    rate = {"learning_rate": 0.3, "num_ppo_epochs": 4, "save_strategy": "steps", "save_steps": 3}
    options = {"output_dir": str(tmp_path), "total_episodes": 12, "logging_steps": 10} | rate
    small(**options).train()
    lines = capsys.readouterr().out.splitlines()
    assert "kedge: preflight passed; 3 iterations of 4 responses, 4 optimizer steps each" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/3", "3/3"]
    (warning,) = [r.getMessage() for r in caplog.records if "first iteration" in r.getMessage()]
    assert int(warning.split("clipped ")[1].split("%")[0]) >= 25
    assert "lower learning_rate=0.3, or num_ppo_epochs=4" in warning
    small(**options).train(resume_from_checkpoint=True)
    out = capsys.readouterr().out
    assert "(iteration 3 of 3); nothing is left to train\n" in out
