"""Callbacks see the events, the state and the control that transformers.Trainer gives them."""

import json
import math

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from kedge.checkpoint import checkpoint
from kedge.records.errors import CheckpointError, ConfigError
from kedge.records.types import StepReport
from kedge.reporting.trackers import build_tables
from kedge.trainers.hf_callbacks import Callbacks, merge_rows, reporting_callbacks
from tests.unit.callback_runs import Memory, Run, Spy, StopAt, args
from tests.unit.text_toys import rollout_of

# Since 5.4, transformers evaluates after the last step of seven, too.
LAST = (7,) if Version(transformers.__version__) >= Version("5.4") else ()

# ---------------------------------------------------------------------- order and kwargs


def test_events_come_in_the_order_of_the_transformers_trainer(tmp_path):
    spy = Spy()
    arguments = args(
        tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2
    )
    Run(arguments, [spy], max_steps=3).train()
    step = ["on_step_begin", "on_optimizer_step", "on_step_end", "on_log"]
    evaluate = ["on_log", "on_evaluate"]
    assert spy.events == [
        *("on_init_end", "on_train_begin", "on_epoch_begin"),
        *step,
        *(*step, *evaluate, "on_save", "on_epoch_end"),
        *("on_epoch_begin", *step, *(evaluate if LAST else ())),
        *("on_save", "on_epoch_end", "on_train_end"),
    ]
    assert spy.seen["on_step_end"]["model"] == "the model"
    assert spy.seen["on_evaluate"]["metrics"] == {"eval_objective/scores": 0.0}
    assert spy.seen["on_log"]["logs"]["epoch"] == 1.5
    assert {"optimizer", "lr_scheduler", "processing_class", "train_dataloader"} <= {
        *spy.seen["on_log"]
    }


def test_the_optimizer_itself_fires_the_event_before_its_step(tmp_path):
    spy = Spy()
    callbacks = Callbacks(args(tmp_path), [spy])
    callbacks.start(model="the model")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    callbacks.watch(optimizer, "schedule")
    optimizer.step()
    assert spy.events == ["on_init_end", "on_pre_optimizer_step"]
    assert spy.seen["on_pre_optimizer_step"]["optimizer"] is optimizer
    assert spy.seen["on_pre_optimizer_step"]["lr_scheduler"] == "schedule"


def test_state_counts_steps_epochs_and_episodes(tmp_path):
    state = Run(args(tmp_path), max_steps=3, steps_per_epoch=2.0).train().state
    assert isinstance(state, TrainerState)
    assert (state.global_step, state.max_steps, state.num_train_epochs) == (3, 3, 2)
    assert (state.epoch, state.episode, state.train_batch_size) == (1.5, 24, 8)
    assert [row["step"] for row in state.log_history] == [1, 2, 3]
    assert state.log_history[1]["objective/scores"] == 2.0


def test_a_dataset_smaller_than_a_batch_ends_a_pass_every_step(tmp_path):
    spy = Spy()
    Run(args(tmp_path), [spy], max_steps=3, steps_per_epoch=0.4).train()
    assert spy.events.count("on_epoch_begin") == spy.events.count("on_epoch_end") == 3


# -------------------------------------------------------------------------------- control


def test_callbacks_can_ask_for_log_evaluation_and_save(tmp_path):
    class Ask(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                control.should_log = control.should_evaluate = control.should_save = True

    run = Run(args(tmp_path, logging_strategy="no"), [Ask]).train()
    assert (run.evaluated_at, run.saved) == ([2], [2])
    assert [row["step"] for row in run.memory.rows] == [2, 2, 4]


def test_a_returned_control_is_used(tmp_path):
    class Fresh(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            new = type(control)(should_training_stop=True)
            assert new is not control
            return new

    assert Run(args(tmp_path), [Fresh]).train().state.global_step == 1


def test_should_epoch_stop_is_refused_aloud(tmp_path):
    class Skip(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 1

    with pytest.warns(UserWarning, match="should_epoch_stop, which has no effect"):
        run = Run(args(tmp_path), [Skip]).train()
    assert run.state.global_step == 4


def test_a_flag_set_on_another_rank_counts_here(tmp_path):
    run = Run(args(tmp_path))
    run.learner.world_size, run.learner.all_reduce = 2, lambda x: x + torch.tensor([1.0, 0, 0, 0])
    assert run.train().state.global_step == 1


# -------------------------------------------------------------------------------- cadence


@pytest.mark.parametrize(
    ("kwargs", "logged", "evaluated", "saved"),
    [
        ({"logging_steps": 1, "eval_strategy": "no"}, [1, 2, 3, 4, 5, 6, 7], [], []),
        ({"logging_steps": 3, "logging_first_step": True}, [1, 3, 6, 7], [], []),
        ({"logging_steps": 0.5}, [4, 7], [], []),
        ({"logging_strategy": "epoch"}, [2, 4, 6, 7], [], []),
        ({"logging_strategy": "no"}, [7], [], []),
        ({"logging_steps": 9, "eval_strategy": "steps", "eval_steps": 3}, None, [3, 6, *LAST], []),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, None, [4, *LAST], []),
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 4}, None, [4, 6, *LAST], []),
        ({"eval_strategy": "epoch", "eval_on_start": True}, None, [0, 2, 4, 6, 7], []),
        ({"save_strategy": "steps", "save_steps": 3}, None, [], [3, 6, 7]),
        ({"save_strategy": "steps", "save_steps": 0.5}, None, [], [4, 7]),
        ({"save_strategy": "epoch"}, None, [], [2, 4, 6, 7]),
    ],
)
def test_cadence(tmp_path, kwargs, logged, evaluated, saved):
    run = Run(args(tmp_path, **kwargs), max_steps=7).train()
    assert logged is None or [row["step"] for row in run.memory.rows] == logged
    assert (run.evaluated_at, run.saved) == (evaluated, saved)
    assert [checkpoint.parse_step(p) for p in checkpoint.checkpoints(tmp_path)] == saved


def test_rows_between_two_logs_are_averaged(tmp_path):
    run = Run(args(tmp_path, logging_steps=4)).train()
    (row,) = run.memory.rows
    assert row["objective/scores"] == (1 + 2 + 3 + 4) / 4
    assert (row["episode"], row["lr"], row["epoch"]) == (32.0, 0.125, 2.0)
    assert row["eps"] == 32.0 / 4  # the clock ticks once per update


def test_merging_rows_keeps_extremes_and_skips_what_is_absent():
    rows = [
        {"completions/min_length": 4.0, "rollout/lag_max": 1.0, "val/ratio": 1.0, "lr": 2.0},
        {"completions/min_length": 2.0, "rollout/lag_max": 2.0, "rewards/a": 7.0, "lr": 1.0},
        {"completions/max_length": 9.0, "rollout/lag_max": 1.0, "val/ratio": 3.0},
    ]
    assert merge_rows(rows) == {
        "completions/min_length": 2.0,
        "rollout/lag_max": 2.0,
        "val/ratio": 2.0,
        "lr": 1.0,
        "rewards/a": 7.0,
        "completions/max_length": 9.0,
    }


# ---------------------------------------------------------------------- best and stopping

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "metric_for_best_model": "eval_objective/scores",
    "greater_is_better": True,
}


def test_early_stopping_works(tmp_path):
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    arguments = args(
        tmp_path, **BEST, save_strategy="steps", save_steps=1, load_best_model_at_end=True
    )
    run = Run(arguments, [stop], max_steps=9, evals=[1.0, 3.0, 2.0, 2.5, 9.0]).train()
    assert run.state.global_step == 4
    assert run.state.best_metric == 3.0
    assert run.state.best_global_step == 2
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_save_strategy_best_saves_improvements_alone(tmp_path):
    arguments = args(tmp_path, **(BEST | {"greater_is_better": False}), save_strategy="best")
    run = Run(arguments, max_steps=5, evals=[3.0, math.nan, 4.0, 2.0, 2.0]).train()
    assert run.saved == [1, 4]


def test_an_unknown_best_metric_is_named(tmp_path):
    arguments = args(tmp_path, **(BEST | {"metric_for_best_model": "scores"}))
    with pytest.raises(ConfigError, match=r"'scores' must be a metric .* eval_objective/scores"):
        Run(arguments).train()


# -------------------------------------------------------------------------------- measures


@pytest.mark.parametrize(
    ("include", "want"), [("no", None), ("all", 2 * 2 * 16), (True, 64), ("non_padding", 2 * 2 * 9)]
)
def test_tokens_are_counted_over_all_ranks(tmp_path, include, want):
    run = Run(args(tmp_path, include_num_input_tokens_seen=include))
    logging = run.begin()
    run.learner.world_size, run.learner.all_reduce = 2, lambda x: 2 * x
    for step in (1, 2):
        logging.on_step_begin(step - 1)
        rollout = rollout_of([([3], [3] * 2), ([3] * 3, [3] * 3)], extra=1)
        logging.on_step_end(StepReport(step=step, metrics={}, rollout=rollout, reward_output=None))
    assert run.state.num_input_tokens_seen == (want or 0)
    assert run.memory.rows[-1].get("num_input_tokens_seen") == want


def test_peak_memory_is_logged_when_asked(tmp_path):
    row = Run(args(tmp_path, skip_memory_metrics=False)).train().memory.rows[-1]
    assert 50 < row["memory/peak_cpu"] < 1e6  # MiB of a process that has imported torch
    assert "memory/peak_cpu" not in Run(args(tmp_path)).train().memory.rows[-1]


# ------------------------------------------------------------------------ state and resume


class Counter(TrainerCallback, ExportableState):
    def __init__(self, by=1):
        self.by, self.count = by, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += self.by

    def state(self):
        return {"args": {"by": self.by}, "attributes": {"count": self.count}}


def test_a_resumed_run_logs_what_the_uninterrupted_one_logs(tmp_path):
    settings = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 4}
    whole = Run(args(tmp_path / "a", **settings), max_steps=8).train()
    half = Run(args(tmp_path / "b", **settings), [StopAt(4)], max_steps=8).train()
    assert half.state.global_step == 4
    rest = Run(args(tmp_path / "b", **settings), max_steps=8)
    rest.train(resume=tmp_path / "b" / "checkpoint-4")

    def rows(run):
        return [{k: v for k, v in r.items() if k != "eps"} for r in run.state.log_history]

    assert rows(rest) == rows(whole)
    assert [r["step"] for r in rest.memory.rows] == [6, 8]
    assert rest.memory.rows[-1]["eps"] == (64 - 32) / 4  # of this process alone


def test_callbacks_get_their_state_back_when_asked(tmp_path, logged):
    saving = {"save_strategy": "steps", "save_steps": 4}
    Run(args(tmp_path, **saving), [Counter(2), Counter(5)]).train()
    for restore, counts in ((True, [8, 20]), (False, [0, 0])):
        arguments = args(tmp_path, **saving, restore_callback_states_from_checkpoint=restore)
        callbacks = Callbacks(arguments, [Counter(2), Counter(5)])
        callbacks.restore(tmp_path / "checkpoint-4")
        found = [c for c in callbacks.handler.callbacks if isinstance(c, Counter)]
        assert [c.count for c in found] == counts
        assert [c.by for c in found] == [2, 5]
    callbacks = Callbacks(args(tmp_path, restore_callback_states_from_checkpoint=True))
    with logged("not in this run: Counter"):
        callbacks.restore(tmp_path / "checkpoint-4")


def test_trainer_state_is_readable_by_transformers(tmp_path):
    Run(args(tmp_path, save_strategy="steps", save_steps=4)).train()
    data = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    for name in ("episode", "pending", "num_tokens", "loss_sum", "initial_scores"):
        del data[name]
    state = TrainerState(**data)
    assert state.global_step == 4
    assert len(state.log_history) == 4


def test_another_rank_restores_what_rank_0_wrote_but_stays_itself(tmp_path):
    Run(args(tmp_path, save_strategy="steps", save_steps=4)).train()
    memory = Memory()
    callbacks = Callbacks(args(tmp_path), tracker=memory, rank=3, local_rank=1)
    callbacks.restore(tmp_path / "checkpoint-4")
    assert callbacks.state.global_step == 4
    assert not callbacks.state.is_world_process_zero
    assert not callbacks.state.is_local_process_zero
    callbacks.log({"lr": 1.0})
    assert memory.rows == []


def test_a_damaged_trainer_state_is_named(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*trainer_state.json"):
        Callbacks(args(tmp_path)).restore(tmp_path)


def test_add_pop_and_remove(tmp_path):
    callbacks = Callbacks(args(tmp_path), [Counter])
    extra = StopAt(3)
    callbacks.add(extra)
    assert callbacks.handler.pop_callback(Counter).by == 1
    assert callbacks.handler.pop_callback(Counter) is None
    callbacks.handler.remove_callback(extra)
    assert [type(c).__name__ for c in callbacks.handler.callbacks] == ["DefaultFlowCallback"]


# ------------------------------------------------------------------------------ report_to


def test_tensorboard_gets_the_rows(tmp_path):
    run = Run(args(tmp_path, report_to="tensorboard"), max_steps=2).train()
    assert [type(c).__name__ for c in run.callbacks.handler.callbacks][1] == "TensorBoardCallback"
    run.callbacks.begin(max_steps=2, epochs=1, batch_size=8)  # opens the writer again
    build_tables(run.callbacks.handler.callbacks).table("completions", [{"query": "q"}], step=2)
    run.callbacks.fire("on_train_end")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [e.value for e in events.Scalars("train/objective/scores")] == [1.0, 2.0]
    (text,) = events.Tensors("completions/text_summary")
    assert b"| q |" in text.tensor_proto.string_val[0]


def test_report_to():
    for nothing in (None, "none", [], ["none"]):
        assert reporting_callbacks(nothing) == []
    assert "TensorBoardCallback" in [type(c).__name__ for c in reporting_callbacks("all")]
    with pytest.raises(ConfigError, match=r"report_to='wandb' .*pip install 'kedge-rl\[wandb\]'"):
        reporting_callbacks(["wandb"])
    with pytest.raises(ConfigError, match="report_to='wandbb'"):
        reporting_callbacks("wandbb")


# ----------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize("bad", [print, "EarlyStopping", 3, dict])
def test_what_is_no_callback_is_named(tmp_path, bad):
    with pytest.raises(ConfigError, match=r"a callback must be a transformers.TrainerCallback"):
        Callbacks(args(tmp_path), [bad])
    with pytest.raises(ConfigError, match=r"transformers.TrainerCallback"):
        Callbacks(args(tmp_path)).add(bad)
