"""Whole runs from the command line, on models of a few thousand weights."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kedge.cli.main import main
from tests import processes

from .cli_flags import flags, logged

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_reward_function_with_dataset_columns_and_evaluation(folders, tmp_path):
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "2"]
    assert main(["ppo", *flags(folders, tmp_path, *more, "--do_train", "--do_eval")]) == 0
    assert 0 < logged(tmp_path)[0]["objective/scores"] <= 1
    assert {"model.safetensors", "tokenizer_config.json"} <= {p.name for p in tmp_path.iterdir()}
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["eval_objective/scores"] <= 1
    table = (tmp_path / "eval_completions" / "step-000002.jsonl").read_text().splitlines()
    assert len({json.loads(row)["query"] for row in table}) == len(table) == 4


def test_evaluation_alone_trains_nothing(folders, tmp_path):
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "2", "--do_eval"]
    assert main(["ppo", *flags(folders, tmp_path, *more)]) == 0
    assert not (tmp_path / "model.safetensors").exists()


def test_the_kl_of_an_untrained_policy_is_zero_in_evaluation(folders, tmp_path):
    """Evaluation samples nearly greedily; its KL is still that of the policy that trains."""
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "1"]
    assert main(["ppo", *flags(folders, tmp_path, *more, "--eval_on_start")]) == 0
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["eval_objective/kl"] == pytest.approx(0.0, abs=1e-4)


def test_stopping_and_going_on(folders, tmp_path, capsys):
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "2", "--save_steps", "1"]
    assert main(["ppo", *flags(folders, tmp_path, *more)]) == 0
    assert main(["ppo", *flags(folders, tmp_path, *more)]) == 2
    assert "holds checkpoint-1, checkpoint-2 of an earlier run" in capsys.readouterr().err
    again = [*more, "--resume_from_checkpoint", str(tmp_path / "checkpoint-1")]
    assert main(["ppo", *flags(folders, tmp_path, *again)]) == 0
    assert [row["step"] for row in logged(tmp_path)] == [1, 2]
    assert main(["ppo", *flags(folders, tmp_path, *more, "--overwrite_output_dir")]) == 0


@pytest.mark.parametrize(
    ("number", "code", "start"),
    [(signal.SIGINT, 130, "python -m kedge"), (signal.SIGTERM, 128 + signal.SIGTERM, "kedge")],
)
def test_the_line_printed_after_a_signal_resumes_the_run(folders, tmp_path, number, code, start):
    script = tmp_path / "bin" / "kedge"
    script.parent.mkdir()
    script.write_text("import sys\nfrom kedge.cli.main import main\nsys.exit(main())\n")
    more = [
        "--reward_funcs",
        f"{folders}/rewards.py:long",
        "--save_steps",
        "1000",
        "--max_lag",
        "1",
    ]
    given = flags(folders, tmp_path, *more)
    first = [str(script)] if start == "kedge" else ["-m", "kedge"]
    process = processes.start(*first, "ppo", *given, "--max_steps", "1000")
    rows = tmp_path / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (rows.is_file() and len(rows.read_text().splitlines()) > 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    (kept,) = tmp_path.glob("checkpoint-*")
    step = int(kept.name.split("-")[1])
    assert 2 < step < 1000
    assert f"kedge: stopped after iteration {step} of 1000; to resume from {kept}:\n" in said
    assert not (tmp_path / "model.safetensors").exists()
    (printed,) = [line for line in said.splitlines() if line.endswith("--resume_from_checkpoint")]
    assert printed.strip().startswith(f"{start} ppo ")
    words = shlex.split(printed.replace("--max_steps 1000", f"--max_steps {step + 1}"))
    if start == "kedge":
        done = processes.run(str(script), *words[1:])
    else:  # an interpreter of its own: what is first in its path matters
        env = os.environ | processes.PATHS
        done = subprocess.run(
            [sys.executable, *words[1:]], env=env, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "iterations: 1000 in the checkpoint" in done.stderr
    out = done.stdout
    assert f"kedge: resuming from {kept} (iteration {step} of {step + 1})\n" in out
    assert (
        f"kedge: the run is in {tmp_path}; `kedge report {tmp_path}` writes a report of it\n" in out
    )
    assert [row["step"] for row in logged(tmp_path)] == list(range(1, step + 2))


def test_a_reward_that_fails_is_mended_and_the_run_goes_on(folders, tmp_path, capsys, caplog):
    score = "    return [len(c.split()) / 5 for c in completions]\n"
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = []\n\ndef mine(completions, **others):\n    calls.append(1)\n"
        "    if len(calls) > 2:\n        raise KeyError('answer')\n" + score
    )
    out = tmp_path / "out"
    given = flags(folders, out, "--reward_funcs", f"{file}:mine", "--max_steps", "4")
    assert main(["ppo", *given]) == 2
    assert "kedge ppo: error: reward function mine raised KeyError" in capsys.readouterr().err
    assert f"Fix the cause and resume from {out / 'checkpoint-2'} with train(" in caplog.text
    file.write_text("def mine(completions, **others):\n" + score)
    assert main(["ppo", *given, "--resume_from_checkpoint"]) == 0
    assert [row["step"] for row in logged(out)] == [1, 2, 3, 4]


def test_an_adapter(folders, tmp_path):
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "1", "--use_peft"]
    assert main(["ppo", *flags(folders, tmp_path, *more, "--lora_r", "2")]) == 0
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--reward_funcs", "{0}/rewards.py:broken"], "broken"),
        (["--reward_funcs", "{0}/rewards.py:absent"], "has no function 'absent'"),
        (["--reward_funcs", "{0}/none.py:f"], "cannot import"),
        (["--reward_model_path", "{0}/nothing"], "cannot load the"),
        (["--reward_model_path", "{0}/policy", "--no_dummy_reward"], "has no score head"),
        (["--no_dummy_reward"], "no reward is given: add --reward_model_path, --reward_funcs"),
        (["--reward_funcs", "{0}/rewards.py:none"], "the 4 responses in this batch could be sc"),
        (["--sft_model_path", "{0}/nothing"], "cannot load the model '{0}/nothing'"),
        (["--num_mini_batches", "3"], "num_mini_batches=3 does not divide the batch of 4"),
        (["--batch_size", "7"], "batch_size=7"),
        (["--max_prompt_length", "1"], "longer than max_prompt_length=1"),
        (["--report_to", "nowhere"], "report_to='nowhere'"),
        (["--stop_token_id", "999"], "999"),
        (["--dataset_prompt_column", "answer"], "dataset_prompt_column='answer' does not exist"),
    ],
)
def test_mistakes_are_one_line(folders, tmp_path, capfd, more, message):
    more = [m.format(folders) for m in more]
    assert main(["ppo", *flags(folders, tmp_path, "--max_steps", "1", *more)]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    (error,) = [line for line in lines if line.startswith("kedge ppo: error: ")]
    assert message.format(folders) in error
    assert len(lines) - lines.index(error) <= 6  # and the frames of the user's own code, if any
