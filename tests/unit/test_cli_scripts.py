"""Printed commands, launch files and every algorithm, run from the command line."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.testing import tiny_reward_model
from tests import processes

from .cli_flags import SMALL, flags, logged
from .text_toys import word_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


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
        *("--add_r1_style_format_reward", "--non_stop_penalty", "--penalty_reward_value", "-7"),
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
