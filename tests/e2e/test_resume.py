"""N + N updates are 2N updates, bit for bit, through kills, damage and recordings."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from kedge import PPOConfig, PPOTrainer
from kedge.checkpoint import checkpoint
from kedge.checkpoint.checkpoint import write_manifest
from kedge.records.errors import CheckpointError
from kedge.testing import tiny_policy
from tests import processes
from tests.e2e.small import PROMPTS
from tests.unit.callback_runs import StopAt
from tests.unit.text_toys import neox_reward, word_tokenizer

Outcome = tuple[dict[str, torch.Tensor], list[dict[str, Any]]]
# Not numbers of the run: how fast it was.
TIMED = ("eps", "tokens_per_second", "time/", "train_runtime", "train_s", "step_time")


def trainer(
    folder: Path,
    *callbacks: Any,
    eval_dataset: Any = None,
    seed_of_policy: int = 3,
    width: int = 16,
    prompts: Any = PROMPTS,
    **changes: Any,
) -> PPOTrainer:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "total_episodes": 4 * 6,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "response_length": 5,
        "learning_rate": 3e-3,
        "logging_steps": 2,
        "save_steps": 3,
        "adaptive_kl": True,
        "num_sample_generations": 0,
        "stop_token": "eos",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    reward = neox_reward(vocab=32)
    return PPOTrainer(
        PPOConfig(**options | changes),
        word_tokenizer(),
        tiny_policy("llama", vocab_size=32, hidden_size=width, seed=seed_of_policy),
        reward_model=reward,
        train_dataset=prompts,
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )


def outcome(made: PPOTrainer) -> Outcome:
    """Every number of a run: weights of policy and value, optimizer state, logged rows."""
    rows = [
        {k: v for k, v in row.items() if not k.startswith(TIMED)} for row in made.state.log_history
    ]
    weights = {f"policy.{k}": v.clone() for k, v in made.model.state_dict().items()}
    weights |= {f"value.{k}": v.clone() for k, v in made.value_model.state_dict().items()}
    for i, one in made.optimizer.state_dict()["state"].items():
        weights |= {f"optimizer.{i}.{k}": torch.as_tensor(v).clone() for k, v in one.items()}
    return weights, rows


def assert_same(found: PPOTrainer, want: Outcome) -> None:
    (weights, rows), (others, other_rows) = outcome(found), want
    assert weights.keys() == others.keys()
    assert [k for k in weights if not weights[k].equal(others[k])] == []
    assert rows == other_rows


@functools.cache
def whole_run(max_lag: int = 0, **changes: Any) -> Outcome:
    """What a run that is never interrupted comes to."""
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(Path(folder), save_strategy="no", max_lag=max_lag, **changes)
        made.train()
        return outcome(made)


# Cut in the value warm-up, after which the policy's schedule begins.
CRITIC = {"value_source": "copy", "freeze_value_attention": True, "num_value_epochs": 2}
CRITIC |= {"value_warmup_steps": 4, "warmup_steps": 1, "lr_scheduler_type": "cosine"}
CRITIC |= {"scale_rewards": "running"}
BONUS = {"entropy_coef": 0.1}


@pytest.mark.parametrize("changes", [{}, {"max_lag": 2}, {"train_layers": 1, **BONUS}, CRITIC])
def test_n_plus_n_is_two_n(tmp_path: Path, changes: dict[str, Any]) -> None:
    first = trainer(tmp_path / "cut", StopAt(3), **changes)
    first.train()
    assert first.state.global_step == 3
    second = trainer(tmp_path / "cut", **changes)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6
    assert_same(second, whole_run(**changes))


def test_a_run_that_is_done_says_so_and_rates_are_of_this_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(tmp_path / "whole")
    assert made.train().metrics["train_samples_per_second"] > 0
    assert "nothing to train" not in caplog.text
    again = made.train()
    assert "all 6 iterations are done, nothing to train" in caplog.text
    assert again.global_step == 6
    assert again.metrics["train_samples_per_second"] == 0


def reshape_a_moment(folder: Path) -> None:
    """With a manifest that fits: loading it would make the fused optimizer write out of bounds."""
    file = folder / "state-learner.optimizer.safetensors"
    tensors = load_file(file)
    name = next(n for n, x in tensors.items() if n.endswith("exp_avg") and x.dim() == 2)
    save_file(tensors | {name: tensors[name][:1].clone()}, file)
    (folder / "manifest.json").unlink()
    write_manifest(folder)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, logged: Any
) -> None:
    first = trainer(tmp_path / "cut", StopAt(4), save_steps=1)
    first.train()
    damaged = tmp_path / "cut" / "checkpoint-4" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(bytes(data))
    reshape_a_moment(tmp_path / "cut" / "checkpoint-3")
    second = trainer(tmp_path / "cut", save_steps=2)
    with logged("is damaged") as caught:
        second.train(resume_from_checkpoint=True)
    told = caught.text
    assert "checkpoint-4 is damaged: model.safetensors" in told
    moment = r"optimizer/state/\d+/exp_avg must be .*, got torch.float32 \(1, 16\) \(of the weight "
    assert re.search(rf"checkpoint-3 is damaged: .*{moment}.*Resuming from .*checkpoint-2", told)
    assert_same(second, whole_run())
    with pytest.raises(
        CheckpointError, match=r"checkpoint-9 does not exist; existing checkpoints: "
    ):
        trainer(tmp_path / "cut").train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-9"))


class FailAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("in the middle of an update")


def test_an_exception_in_mid_update_saves_nothing(tmp_path: Path) -> None:
    failing = trainer(tmp_path / "cut", FailAt(5), save_strategy="epoch")
    with pytest.raises(RuntimeError, match="in the middle of an update"):
        failing.train()
    assert [checkpoint.parse_step(p) for p in checkpoint.checkpoints(tmp_path / "cut")] == [4]
    second = trainer(tmp_path / "cut", save_strategy="epoch")
    second.train(resume_from_checkpoint=True)
    assert_same(second, whole_run())


def test_the_best_model_is_loaded_after_the_last_save(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="objective/kl",
        greater_is_better=False,
        eval_dataset=PROMPTS[:4],
    )
    made.train()
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    ended = {step: policy_in(tmp_path / f"checkpoint-{step}") for step in (4, 6)}
    assert not ended[4].equal(ended[6])
    assert made.model.get_input_embeddings().weight.equal(ended[4])


def policy_in(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight


def test_other_settings_reference_and_prompts_are_listed_on_resume(
    tmp_path: Path, logged: Any
) -> None:
    trainer(tmp_path, StopAt(3)).train()
    changed = trainer(tmp_path, learning_rate=1e-3, weight_decay=0.1, logging_steps=1)
    with logged(r"learning_rate: 0.003 in the checkpoint, 0.001 now"):
        changed.train(resume_from_checkpoint=True)
    rates = [row["lr"] for row in changed.state.log_history if "lr" in row]
    assert rates[-3:] == pytest.approx([1e-3 * left / 6 for left in (3, 2, 1)])  # the new ones
    groups = changed.engine.learner.optimizer.param_groups
    assert max(group["weight_decay"] for group in groups) == 0.1
    # A run that goes on with the trained model as `model` would be held to that.
    other = trainer(tmp_path, seed_of_policy=9, prompts=PROMPTS[:-1])
    said = "prompts: not those of the checkpoint; reference: not that of the checkpoint, so the KL"
    with logged(said):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.smoke
@pytest.mark.usefixtures("curves")
def test_the_files_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: Any
) -> None:
    made = trainer(tmp_path / "run", save_total_limit=1)
    capsys.readouterr()
    made.train()
    shown = capsys.readouterr()
    assert shown.err == ""  # no bars of other libraries in between
    *table, last = shown.out.splitlines()
    table = [line for line in table if not line.startswith("kedge: ")]
    assert [line.split()[:2] for line in table] == [["step", f"{n}/6"] for n in (1, 2, 4, 6)]
    assert "kedge report" in last
    made.save_model()
    made.create_model_card()
    folder = tmp_path / "run"
    assert [checkpoint.parse_step(p) for p in checkpoint.checkpoints(folder)] == [6]
    expected = {"config.json", "model.safetensors", "tokenizer.json", "trainer_state.json"}
    assert expected <= {p.name for p in (folder / "checkpoint-6").iterdir()}
    assert (folder / "checkpoint-6" / "value_model").is_dir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6, 6]  # the last is the summary
    assert "train_runtime" in rows[-1]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "## Results" in (folder / "README.md").read_text()
    assert not [p for p in folder.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".pkl")]
    log = folder / "metrics.jsonl"  # killed after the last checkpoint, before the last row
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    trainer(folder, save_total_limit=1).train(resume_from_checkpoint=True)
    again = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in again] == [2, 4, 6, 6]
    assert again[-1]["train_loss"] == rows[-1]["train_loss"]
    assert again[-1].keys() == rows[-1].keys()
    said = r"checkpoint-6: weight 0 of .* policy has shape \(32, 16\), this run's has \(32, 32\)"
    with pytest.raises(CheckpointError, match=said), logged("resum"):
        trainer(folder, width=32).train(resume_from_checkpoint=True)


def test_a_replayed_run_ends_where_the_recorded_one_did(tmp_path: Path) -> None:
    recorded = trainer(tmp_path / "a", save_rollouts=str(tmp_path / "rec"), save_strategy="no")
    recorded.train()
    replayed = trainer(tmp_path / "b", replay_rollouts=str(tmp_path / "rec"), save_strategy="no")
    replayed.train()
    assert_same(replayed, outcome(recorded))


KILLED = """
    import os, signal
    from pathlib import Path
    from tests.e2e.test_resume import StopAt, trainer
    from kedge.checkpoint import checkpoint

    real, calls = checkpoint.write_manifest, []

    def dying(folder):
        calls.append(folder)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        real(folder)

    checkpoint.write_manifest = dying
    trainer(Path(os.environ["RUN"]), save_steps=2).train()
"""


@pytest.mark.slow
def test_a_run_killed_while_saving_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run = tmp_path / "cut"
    done = processes.run("-c", textwrap.dedent(KILLED), env=os.environ | {"RUN": str(run)})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [checkpoint.parse_step(p) for p in checkpoint.checkpoints(run)] == [2]
    assert (run / ".saving-checkpoint-4").is_dir()
    second = trainer(run, save_steps=2)
    second.train(resume_from_checkpoint=True)
    assert not (run / ".saving-checkpoint-4").exists()
    assert_same(second, whole_run())


def test_a_run_made_longer_goes_on_from_the_line_to_its_new_end(
    tmp_path: Path, logged: Any
) -> None:
    trainer(tmp_path, logging_steps=1, save_steps=6).train()
    longer = trainer(tmp_path, logging_steps=1, save_steps=6, total_episodes=4 * 12)
    with logged("iterations: 6 in the checkpoint, 12 now"):
        longer.train(resume_from_checkpoint=True)
    rates = [row["lr"] for row in longer.state.log_history if "lr" in row]
    assert rates[6:] == pytest.approx([3e-3 * (12 - step) / 12 for step in range(6, 12)])
