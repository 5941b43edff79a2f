"""What callbacks measure, keep and restore, and where rows are reported."""

import json

import pytest
import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from kedge.errors import CheckpointError, ConfigError
from kedge.loop.hooks import StepReport
from kedge.reporting.base import Memory
from kedge.reporting.trackers import build_tables
from kedge.trainers.run.hf_callbacks import Callbacks, reporting_callbacks
from kedge.types import PromptBatch, Rollout
from tests.unit.callback_runs import Run, StopAt, args

# -------------------------------------------------------------------------------- measures


def rollout_of(prompt_lengths, response_lengths):
    def mask(lengths, width):
        return torch.arange(width) < torch.tensor(lengths)[:, None]

    n, P, R = len(prompt_lengths), 4, 6
    prompts = PromptBatch(
        ids=torch.zeros(n, P, dtype=torch.long),
        mask=mask(prompt_lengths, P).flip(1),
        group=torch.arange(n),
        row=torch.arange(n),
    )
    present = mask(response_lengths, R)
    return Rollout(
        prompts=prompts,
        ids=torch.zeros(n, R, dtype=torch.long),
        loss_mask=present,
        response_mask=present,
        terminated=present[:, 0],
        version=torch.zeros(n),
    )


@pytest.mark.parametrize(
    ("include", "want"), [("no", None), ("all", 2 * 2 * 20), (True, 80), ("non_padding", 2 * 2 * 9)]
)
def test_tokens_are_counted_over_all_ranks(tmp_path, include, want):
    run = Run(args(tmp_path, include_num_input_tokens_seen=include))
    run.begin(4)
    run.learner.world_size, run.learner.total = 2, lambda x: 2 * x
    for step in (1, 2):
        run.on_step_begin(step - 1)
        rollout = rollout_of([1, 3], [2, 3])
        run.on_step_end(StepReport(step=step, metrics={}, rollout=rollout, reward_output=None))
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


def test_callbacks_get_their_state_back_when_asked(tmp_path):
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
    with pytest.warns(UserWarning, match="not in this run: Counter"):
        callbacks.restore(tmp_path / "checkpoint-4")


def test_trainer_state_is_readable_by_transformers(tmp_path):
    Run(args(tmp_path, save_strategy="steps", save_steps=4)).train()
    data = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    for name in ("episode", "pending", "num_tokens", "loss_sum"):
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
    build_tables(run.callbacks).table("completions", [{"query": "q"}], step=2)
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
