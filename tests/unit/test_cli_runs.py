"""Whole runs from the command line: mistakes, signals, scripts, launch files, algorithms."""

import importlib.util
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
from kedge.testing import tiny_reward_model
from tests import processes

from .text_toys import word_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--per_device_train_batch_size", "4", "--num_ppo_epochs", "1", "--response_length", "5"),
    *("--logging_steps", "1", "--num_sample_generations", "0", "--disable_tqdm"),
    "--dummy_reward",
]


def flags(folders, out, *more):
    return [
        *("--model_name_or_path", str(folders / "policy")),
        *("--dataset_name", str(folders / "data"), "--output_dir", str(out)),
        *SMALL,
        *more,
    ]


def logged(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "objective/scores" in row]


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


def test_a_severe_finding_ends_a_run_that_can_be_resumed(folders, tmp_path, capfd, caplog):
    """The fourth row is the first that the doctor judges."""
    (tmp_path / "dead.py").write_text("dead = lambda completions, **_: [1.0] * len(completions)")
    out, reward = tmp_path / "run", f"{tmp_path}/dead.py:dead"
    words = flags(folders, out, "--reward_funcs", reward, "--max_steps", "6", "--stop_on_finding")
    assert main(["ppo", *words]) == 1
    assert "dead reward (so far, at iteration 4 of 6): all scores of a batch" in caplog.text
    stopped = "kedge: stopped after iteration 4 of 6 by stop_on_finding (dead reward); "
    assert stopped in capfd.readouterr().err
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-4"]
    assert main(["ppo", *words, "--resume_from_checkpoint"]) == 0
    assert [row["step"] for row in logged(out)] == [1, 2, 3, 4, 5, 6]


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


def test_an_adapter(folders, tmp_path):
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "1", "--use_peft"]
    assert main(["ppo", *flags(folders, tmp_path, *more, "--lora_r", "2")]) == 0
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--reward_funcs", "{0}/rewards.py:broken"], "broken"),
        (["--sft_model_path", "{0}/nothing"], "the model '{0}/nothing' cannot be loaded"),
    ],
)
def test_mistakes_are_one_line(folders, tmp_path, capfd, more, message):
    more = [m.format(folders) for m in more]
    assert main(["ppo", *flags(folders, tmp_path, "--max_steps", "1", *more)]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    (error,) = [line for line in lines if line.startswith("kedge ppo: error: ")]
    assert message.format(folders) in error
    assert len(lines) - lines.index(error) <= 6  # and the frames of the user's own code, if any


# -- scripts and launch files ---------------------------------------------------------------------


def run(*command):
    done = processes.run(*map(str, command))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


LATER = """--dataset_name {0}/data --dataset_train_split descriptiveness --sft_model_path {0}/policy
    --reward_model_path {0}/policy --missing_eos_penalty 1.0"""


@pytest.mark.parametrize("more", ["--non_eos_penalty", LATER], ids=["first", "later"])
def test_the_printed_commands_of_ppo(folders, tmp_path, more):
    """As printed by the first version and the later one, with a local model and fewer episodes."""
    printed = f"""
        --learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --output_dir {tmp_path}
        --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 64
        --model_name_or_path {folders}/policy {more.format(folders)}
    """
    out = run(ROOT / "examples" / "scripts" / "ppo" / "ppo.py", *printed.split())
    assert "the trained model is in" in out


def test_two_processes_share_one_batch(folders, tmp_path):
    out = run(
        *("-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"),
        ROOT / "examples" / "accelerate_configs" / "cpu_2.yaml",
        ROOT / "examples" / "scripts" / "ppo" / "ppo_tldr.py",
        *("--dataset_name", folders / "data", "--output_dir", tmp_path),
        *("--learning_rate", "3e-6", "--per_device_train_batch_size", "4"),
        *("--gradient_accumulation_steps", "2", "--total_episodes", "16", "--stop_token", "eos"),
        *("--model_name_or_path", folders / "policy", "--sft_model_path", folders / "policy"),
        *("--reward_model_path", folders / "reward", "--local_rollout_forward_batch_size", "4"),
        *("--missing_eos_penalty", "1.0", "--logging_steps", "1"),
    )
    assert out.count("the trained model is in") == 1
    assert [row["episode"] for row in logged(tmp_path)] == [16]  # one update of 4 x 2 x 2


def test_a_reward_model_with_code_of_its_own(folders, tmp_path, capfd):
    own = tmp_path / "own"
    tiny_reward_model(vocab_size=32).save_pretrained(own)
    word_tokenizer().save_pretrained(own)
    config = json.loads((own / "config.json").read_text())
    base = config["architectures"][0]
    family = base.removesuffix("ForSequenceClassification")
    config["architectures"] = ["OwnForSequenceClassification"]
    config["model_type"] = "own"
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForSequenceClassification": "own.OwnForSequenceClassification",
    }
    (own / "config.json").write_text(json.dumps(config))
    (own / "own.py").write_text(
        f"from transformers import AutoModel, {family}Config, {family}Model, {base}\n\n\n"
        f"class OwnConfig({family}Config):\n    model_type = 'own'\n\n\n"
        f"class OwnForSequenceClassification({base}):\n    config_class = OwnConfig\n\n\n"
        f"class OwnModel({family}Model):\n    config_class = OwnConfig\n\n\n"
        "AutoModel.register(OwnConfig, OwnModel)\n"
    )
    run = flags(folders, tmp_path / "out", "--reward_model_path", str(own), "--max_steps", "1")
    assert main(["ppo", *run]) != 0
    assert "trust_remote_code" in capfd.readouterr().err
    assert main(["ppo", *run, "--trust_remote_code"]) == 0
    assert len(logged(tmp_path / "out")) == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_launch_files_of_deepspeed_give_the_numbers_of_one_process(folders, tmp_path, stage):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    script = ROOT / "examples" / "scripts" / "ppo" / "ppo_tldr.py"

    def train(out, rows, *launch):
        run(
            *(*launch, script, "--dataset_name", folders / "data", "--output_dir", out),
            *("--learning_rate", "3e-3", "--per_device_train_batch_size", str(rows)),
            *("--total_episodes", "32", "--stop_token", "eos", "--response_length", "5"),
            *("--model_name_or_path", folders / "policy", "--use_cpu", "--logging_steps", "1"),
            *("--reward_model_path", folders / "reward", "--missing_eos_penalty", "1.0"),
        )
        return [(r["objective/kl"], r["loss/value_avg"]) for r in logged(out)]

    config = ROOT / "examples" / "accelerate_configs" / f"deepspeed_zero{stage}.yaml"
    two = train(
        tmp_path / "two",
        4,
        *("-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file", config),
        *("--num_processes", "2", "--mixed_precision", "no"),
    )
    one = train(tmp_path / "one", 8)
    assert two == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in one]
    assert abs(one[-1][0]) > 0.01


@pytest.mark.parametrize("script", ["rloo", "rloo_tldr"])
def test_the_printed_commands_of_rloo(folders, tmp_path, script):
    """As printed, with local folders and fewer episodes."""
    printed = f"""
        --dataset_name {folders / "data"} --dataset_train_split descriptiveness
        --learning_rate 3e-6 --output_dir {tmp_path}
        --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --total_episodes 32
        --model_name_or_path {folders / "policy"} --reward_model_path {folders / "reward"}
        --missing_eos_penalty 1.0 --num_ppo_epochs 2 --num_mini_batches 2 --stop_token eos
        --kl_coef 0.03 --local_rollout_forward_batch_size 16 --response_length 5
        --logging_steps 1
    """
    out = run(ROOT / "examples" / "scripts" / "rloo" / f"{script}.py", *printed.split())
    assert "the trained model is in" in out
    rows = logged(tmp_path)
    assert [row["episode"] for row in rows] == [16, 32]  # batches of 8 x 2
    assert rows[0]["objective/kl_coef"] == 0.03


@pytest.mark.parametrize("name", ["ppo_1b", "ppo_6.9b", "rloo_1b"])
def test_recipes_of_published_runs_on_tiny_models(folders, tmp_path, name):
    """All flags of the file; models, data, sizes and launch file are ours."""
    own = [
        *("--model_name_or_path", folders / "policy", "--sft_model_path", folders / "policy"),
        *("--reward_model_path", folders / "reward", "--dataset_name", folders / "data"),
        *("--dataset_test_split", "train", "--output_dir", tmp_path, "--use_cpu"),
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"),
        *("--total_episodes", "16", "--response_length", "5", "--logging_steps", "1"),
    ]
    environment = os.environ | {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "LAUNCH_CONFIG": "examples/accelerate_configs/single_gpu.yaml",
    }
    script = ROOT / "scripts" / "train" / "tldr" / f"{name}.sh"
    command = ["bash", *map(str, (script, *own))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["episode"] for row in logged(tmp_path)] == [8, 16]


def test_the_path_of_open_instruct(tmp_path):
    script = ROOT / "open_instruct" / "ppo_vllm_thread_ray_gtrl.py"
    assert "--dataset_mixer_list" in run(script, "--help", "all")


@pytest.mark.parametrize("command", ["ppo", "rloo", "grpo"])
def test_the_usual_mixture_of_rewards(folders, tmp_path, command):
    """0.5 x the model + 3 x the verifier that a row names; -7 where a response did not stop."""
    lines = [
        {"prompt": f"w{i} w{i + 1}", "dataset": "string_contains", "ground_truth": "w"}
        for i in range(3, 20)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    group = [] if command == "ppo" else ["--num_generations", "2"]
    made = [
        *(command, "--model_name_or_path", str(folders / "policy")),
        *("--dataset_name", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out")),
        *(*SMALL, "--max_steps", "1", "--per_device_train_batch_size", "16", *group),
        *("--reward_model_path", str(folders / "reward"), "--reward_model_multiplier", "0.5"),
        *("--apply_verifiable_reward", "--verification_reward", "3"),
        *("--add_r1_style_format_reward", "--non_eos_penalty", "--penalty_reward_value", "-7"),
        *("--stop_token", "eos", "--temperature", "1", "--save_rollouts", str(tmp_path / "rows")),
    ]
    assert main(made) == 0
    row = logged(tmp_path / "out")[0]
    stopped = row["val/num_eos_tokens"] / 16
    assert 0 < stopped < 1
    assert {"rewards/reward", "rewards/verifiable", "rewards/r1_style_format"} <= set(row)
    assert row["log/verifiable_correct_rate"] == row["rewards/verifiable"]
    assert row["objective/scores"] < -7 * (1 - stopped) + 3.5 * stopped + 0.5


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "remax"])
def test_learning_rules_by_name(folders, tmp_path, name):
    more = ["--reward_model_path", str(folders / "reward"), "--algorithm", name]
    group = ["--num_generations", "2"] if name.endswith("baseline") else []
    made = flags(folders, tmp_path, "--max_steps", "2", *more, *group)
    assert main(["ppo", *made]) == 0
    assert "loss/value_avg" not in logged(tmp_path)[0]  # none of them has a value model


@pytest.mark.parametrize("file", [*(ROOT / "examples" / "accelerate_configs").glob("*.yaml")])
def test_accelerate_reads_the_launch_files(file):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(file)).num_processes >= 1
