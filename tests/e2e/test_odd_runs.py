"""What a run does with bad input that is not an error, and with what reward functions record."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.records.errors import ConfigError, KedgeError, RewardError, SyncError
from kedge.records.types import PromptBatch, Rollout, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy, tiny_reward_model
from tests.e2e.small import PROMPTS, VOCAB, length_reward, rows, small
from tests.unit.text_toys import neox_reward


def boom(completions: list[str], **_: Any) -> list[float]:
    raise ZeroDivisionError("division by zero")


class Liar:
    """An engine whose log-probabilities are of another distribution."""

    shares_weights, logprob_kind = True, "sampled"

    def __init__(self, honest: Any) -> None:
        self.honest = honest

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        colder = replace(sampling, temperature=sampling.temperature * 2)
        return self.honest.generate(prompts, sampling=colder, seed=seed)

    def load_weights(self, weights: Any, version: int) -> Any:
        return self.honest.load_weights(weights, version)


def test_an_engine_that_samples_another_distribution_fails_the_preflight() -> None:
    trainer = small()
    trainer.engine.rollout_engine = Liar(trainer.engine.rollout_engine)
    learner = trainer.engine.learner
    learner.settings = replace(learner.settings, reuse_behavior_logprobs=False)
    with pytest.raises(
        KedgeError, match="log-probabilities of rollout engine and learner differ by"
    ):
        trainer.train()


class Raw(EmbeddedEngine):
    """Records log-probabilities of the model, which the temperature does not change."""

    logprob_kind = "raw"

    def generate(self, prompts: PromptBatch, *, sampling: Sampling, seed: int) -> Rollout:
        rollout = super().generate(prompts, sampling=sampling, seed=seed)
        shift = 0.0 if sampling.temperature == 1.0 else 0.5  # about what 0.5 changes here
        assert rollout.behavior_logprobs is not None
        return replace(rollout, behavior_logprobs=rollout.behavior_logprobs - shift)


@pytest.mark.parametrize("lag", [0, 1])
def test_raw_log_probabilities_are_compared_where_they_are_those_of_sampling(lag: int) -> None:
    def run(**options: Any) -> list[dict[str, Any]]:
        model = tiny_policy("gpt_neox", vocab_size=VOCAB)
        engine = Raw(model, pad_id=1, shares_weights=False)
        options = {"learning_rate": 0.0, "total_episodes": 12, "max_lag": lag} | options
        trainer = small(model=model, rollout_engine=engine, **options)
        trainer.train()
        return rows(trainer)

    log = run(temperature=1.0)
    assert [row["val/ratio"] for row in log] == pytest.approx([1.0] * 3, abs=1e-5)
    assert log[0]["rollout/logprob_gap"] < 1e-5
    for options in ({"sampler_correction": "truncate"}, {"sampler_correction": "ratio"}, {}):
        if options or lag:
            with pytest.raises(ConfigError, match="needs log-probabilities of the distribution"):
                run(temperature=0.5, **options)
        else:
            log = run(temperature=0.5)
            assert [row["val/ratio"] for row in log] == pytest.approx([1.0] * 3, abs=1e-5)
            assert not any("rollout/logprob_gap" in row for row in log)  # it would be 0.5


class Mute(EmbeddedEngine):
    """Keeps its first weights, and reports nothing."""

    def load_weights(self, weights: Any, version: int) -> Any:
        self._version = version


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_that_may_have_old_weights_must_report_them(lag: int) -> None:
    model = tiny_policy("gpt_neox", vocab_size=VOCAB)
    engine = Mute(model, pad_id=1, shares_weights=False)
    trainer = small(model=model, rollout_engine=engine, max_lag=lag)
    with pytest.raises(SyncError, match="must return a"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_dataset_smaller_than_a_batch_repeats() -> None:
    trainer = small(train_dataset=PROMPTS[:1], per_device_train_batch_size=4)
    assert trainer.train().global_step == 2


def test_bad_input_leaves_the_models_as_they_were() -> None:
    model = tiny_policy("gpt_neox", vocab_size=VOCAB)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KedgeError):
        small(model=model, reward_model=None, reward_funcs=boom).train()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_schedules_begin_with_the_policy() -> None:
    trainer = small(
        total_episodes=32,
        value_warmup_steps=4,
        warmup_steps=2,
        num_ppo_epochs=1,
        adaptive_kl=True,
        kl_target=100.0,
    )
    trainer.train()
    log, rate = rows(trainer), 3e-3
    assert [row["lr"] for row in log] == pytest.approx([0, 0, 0, 0, 0, rate / 2, rate, rate / 2])
    assert [row["lr/value"] for row in log][:4] == pytest.approx([0, rate / 2, rate, rate * 5 / 6])
    coefficients = [row["objective/kl_coef"] for row in log]
    assert coefficients[:5] == [coefficients[0]] * 5
    assert coefficients[5] < coefficients[4]


@pytest.mark.parametrize("position", ["last", "after_last"])
def test_a_batch_with_nothing_to_teach_is_not_scaled_up(position: str, tmp_path: Path) -> None:
    """Whitened by its own deviation, noise would have a deviation of 1, as with TRL's rule."""
    batches = itertools.count()

    def reward(completions: list[str], **_: Any) -> list[float]:
        spread = 0.05 if next(batches) else 10.0
        return [1.0 + spread * (-1) ** i for i in range(len(completions))]

    trainer = small(
        output_dir=str(tmp_path),
        reward_model=None,
        reward_funcs=[reward],
        score_position=position,
        learning_rate=1e-6,
        kl_coef=0.0,
    )
    trainer.train()
    raw, used = (
        [row[f"val/{name}advantage_std"] for row in rows(trainer)] for name in ("raw_", "")
    )
    assert raw[0] > 1
    assert raw[1] < 0.5
    expected = [1.0, raw[1] if position == "last" else 1.0]
    assert used == pytest.approx(expected, rel=0.03)


def test_a_reward_model_that_prefers_unfinished_texts_is_named_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warnings(**changes: Any) -> list[str]:
        caplog.clear()
        model = tiny_reward_model(vocab_size=VOCAB)
        small(reward_model=model, reward_funcs=None, response_length=8, **changes).train()
        return [text for text in caplog.messages if "score higher cut in half" in text]

    (text,) = warnings()
    share = int(text.split("%")[0].rsplit(" ", 1)[1])
    assert 25 <= share <= 100
    assert warnings(non_eos_penalty=True, penalty_reward_value=-100.0) == []
    assert warnings(missing_eos_penalty=0.0) == [text]


def test_fewer_ends_at_a_rising_score_are_named_while_it_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("kedge.ext.report")  # whose rules name it

    def longer(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    sizes = {"per_device_train_batch_size": 16, "total_episodes": 320, "response_length": 24}
    trainer = small(reward_funcs=longer, reward_model=None, kl_coef=0.0, **sizes)
    seen: list[int] = []
    handler = caplog.handler
    emit = handler.emit

    def note(record: Any) -> None:
        if "fewer responses end" in record.getMessage():
            seen.append(trainer.state.global_step)
        emit(record)

    handler.emit = note  # type: ignore[method-assign]
    trainer.train()
    cut = [row["completions/truncated_ratio"] for row in rows(trainer)]
    assert cut[-1] > cut[0] + 0.2, cut
    assert len(seen) == 1
    assert seen[0] < len(cut)


@pytest.mark.parametrize(
    ("rate", "warned", "rise"), [(0.03, True, 0), (0.03, True, 1), (1e-5, False, 0)]
)
def test_steps_that_mask_much_are_named_when_the_policy_first_moves(
    rate: float, warned: bool, rise: int, caplog: pytest.LogCaptureFixture
) -> None:
    how = {"value_warmup_steps": 1, "policy_loss": "mask", "warmup_steps": rise}
    trainer = small(total_episodes=8 + 4 * rise, learning_rate=rate, **how)
    trainer.train()
    assert ("the policy's first iteration masked" in caplog.text) == warned
    assert rows(trainer)[0]["policy/clipfrac_avg"] == 0


@pytest.mark.parametrize(("factor", "times"), [(30, 1), (0, 0)])
def test_a_value_worse_than_the_mean_is_named_once(
    factor: int, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    value = neox_reward(vocab=VOCAB)
    value.score.weight.data.mul_(factor)
    scores = {"reward_model": None, "reward_funcs": length_reward, "kl_coef": 0.0, "lam": 1.0}
    trainer = small(**scores, value_model=value, value_learning_rate=0.0, total_episodes=64)
    trainer.train()
    assert caplog.text.count("the value was worse than the mean return") == times


def test_equal_returns_leave_nothing_to_explain() -> None:
    equal = {
        "reward_model": None,
        "reward_funcs": lambda completions, **_: [0.3] * len(completions),
    }
    trainer = small(**equal, kl_coef=0.0, lam_value=1.0, value_learning_rate=0.1)
    trainer.train()
    assert all("val/explained_variance" not in row for row in rows(trainer))


CALLS = "log/call"


def counting() -> Any:
    calls = iter(range(1, 100))

    def reward(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("call", next(calls))
        log_extra("words", [len(c.split()) for c in completions])
        return [float(len(c)) for c in completions]

    return reward


@pytest.mark.parametrize("options", [{"max_lag": 0}, {"max_lag": 1}, {"max_lag": 3}])
def test_a_row_of_metrics_has_the_records_of_its_own_batch(
    options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = small(
        reward_model=None, reward_funcs=[counting()], total_episodes=20, preflight=False, **options
    )
    trainer.train()
    assert [row[CALLS] for row in rows(trainer)] == [1, 2, 3, 4, 5]


def test_records_of_groups_that_were_scored_together_are_logged_once(tmp_path: Path) -> None:
    trainer = small(
        reward_model=None, reward_funcs=[counting()], total_episodes=20, preflight=False,
        max_lag=1, rollout_schedule="as_completed",
    )  # fmt: skip
    trainer.train()
    calls = [row[CALLS] for row in rows(trainer) if CALLS in row]  # with the first group taken
    assert calls
    assert all(a < b for a, b in itertools.pairwise(calls))


def test_extra_columns_reach_the_table_and_checkpoints(tmp_path: Path) -> None:
    trainer = small(
        **{"reward_model": None, "reward_funcs": [counting()], "output_dir": str(tmp_path)},
        **{"num_sample_generations": 1, "max_lag": 1, "save_strategy": "steps", "save_steps": 1},
    )
    trainer.train()
    tables = list((tmp_path / "completions").glob("*.jsonl"))
    assert tables
    assert all('"words":' in file.read_text().splitlines()[0] for file in tables)


def test_a_column_of_another_length_is_refused() -> None:
    def reward(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("words", [1])
        return [float(len(c)) for c in completions]

    with pytest.raises(
        RewardError,
        match=r"log_extra\('words', ...\) must get one value per completion: got 1 for 4",
    ):
        small(reward_model=None, reward_funcs=[reward]).train()


def test_functions_of_equal_names_are_scored_apart() -> None:
    def scores(name: str, value: float) -> Any:
        def function(completions: list[str], **_: Any) -> list[float]:
            return [value] * len(completions)

        function.__name__ = name
        return function

    functions = [scores("f", 1.0), scores("f", 1000.0), scores("f_2", 7.0)]
    trainer = small(reward_model=None, reward_funcs=functions, total_episodes=4)
    trainer.train()
    (row,) = rows(trainer)
    assert [row[f"rewards/{name}"] for name in ("f", "f_3", "f_2")] == [1.0, 1000.0, 7.0]
    assert row["objective/scores"] == 1008.0
