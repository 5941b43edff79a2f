"""Whole runs from the command line, on models of a few thousand weights."""

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
from kedge.testing import tiny_policy, tiny_reward_model

from .text_toys import word_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--per_device_train_batch_size", "4", "--num_ppo_epochs", "1", "--response_length", "5"),
    *("--logging_steps", "1", "--num_sample_generations", "0", "--disable_tqdm"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, a reward model and prompts on disk."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = word_tokenizer()
    for name, model in [
        ("policy", tiny_policy(vocab_size=32)),
        ("reward", tiny_reward_model(vocab_size=32)),
    ]:
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "data").mkdir()
    lines = [json.dumps({"prompt": f"w{3 + i % 20} w{4 + i % 20}", "n": i}) for i in range(40)]
    (root / "data" / "train.jsonl").write_text("\n".join(lines))
    (root / "rewards.py").write_text(
        "def long(completions, n, **others):\n"
        "    assert all(isinstance(i, int) for i in n)\n"
        "    return [len(c.split()) / 5 for c in completions]\n\n\n"
        "def broken(completions, **others):\n"
        "    raise KeyError('answer')\n"
    )
    return root


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


def test_a_reward_model(folders, tmp_path, capfd):
    more = ["--reward_model_path", str(folders / "reward"), "--total_episodes", "8"]
    assert main(["ppo", *flags(folders, tmp_path, *more, "--stop_token", "eos")]) == 0
    assert f"the trained model is in {tmp_path}" in capfd.readouterr().out
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "tokenizer_config.json").is_file()
    assert [row["episode"] for row in logged(tmp_path)] == [4, 8]


def test_a_reward_function_with_dataset_columns_and_evaluation(folders, tmp_path):
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "2"]
    assert main(["ppo", *flags(folders, tmp_path, *more, "--do_train", "--do_eval")]) == 0
    assert 0 < logged(tmp_path)[0]["objective/scores"] <= 1
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
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_a_signal_writes_a_checkpoint_that_the_run_goes_on_from(
    folders, tmp_path, capsys, number, code
):
    more = [
        "--reward_funcs",
        f"{folders}/rewards.py:long",
        "--save_steps",
        "1000",
        "--max_lag",
        "1",
    ]
    given = flags(folders, tmp_path, *more)
    command = [sys.executable, "-m", "kedge.cli.main", "ppo", *given, "--max_steps", "1000"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    rows = tmp_path / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (rows.is_file() and len(rows.read_text().splitlines()) > 2):
        assert process.poll() is None, process.stderr.read()
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
    program, file, *again = shlex.split(printed)
    assert (program, Path(file).name, again[0]) == ("python", "main.py", "ppo")
    again[again.index("1000", again.index("--max_steps"))] = str(step + 1)
    with pytest.warns(UserWarning, match="iterations: 1000 in the checkpoint"):
        assert main(again) == 0
    out = capsys.readouterr().out
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


def test_an_algorithm_of_ones_own(folders, tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\nfrom kedge import ppo\n\n"
        "def quiet():\n    print('my own rule')\n    return replace(ppo(), name='quiet')\n"
    )
    more = ["--reward_funcs", f"{folders}/rewards.py:long", "--max_steps", "1"]
    out = tmp_path / "out"
    assert main(["ppo", *flags(folders, out, *more, "--algorithm", f"{file}:quiet")]) == 0
    assert "my own rule" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--reward_funcs", "{0}/rewards.py:broken"], "broken"),
        (["--reward_funcs", "{0}/rewards.py:absent"], "has no function 'absent'"),
        (["--reward_funcs", "{0}/none.py:f"], "cannot import"),
        (["--reward_model_path", "{0}/nothing"], "cannot load the"),
        (["--sft_model_path", "{0}/nothing"], "cannot load the model '{0}/nothing'"),
        (["--dtype", "bfloat16"], "bfloat16"),
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


def run(*command):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_printed_command_of_the_first_version(folders, tmp_path):
    """As printed, with a local folder for the model and fewer episodes."""
    printed = f"""
        --learning_rate 3e-6
        --num_ppo_epochs 1
        --num_mini_batches 1
        --output_dir {tmp_path}
        --per_device_train_batch_size 64
        --gradient_accumulation_steps 1
        --total_episodes 64
        --model_name_or_path {folders / "policy"}
        --non_eos_penalty
    """
    out = run(ROOT / "examples" / "scripts" / "ppo" / "ppo.py", *printed.split())
    assert "the trained model is in" in out


def test_the_printed_command_of_the_later_version(folders, tmp_path):
    printed = f"""
        --dataset_name {folders / "data"}
        --dataset_train_split descriptiveness
        --learning_rate 3e-6
        --num_ppo_epochs 1
        --num_mini_batches 1
        --output_dir {tmp_path}
        --per_device_train_batch_size 64
        --gradient_accumulation_steps 1
        --total_episodes 64
        --model_name_or_path {folders / "policy"}
        --sft_model_path {folders / "policy"}
        --reward_model_path {folders / "policy"}
        --missing_eos_penalty 1.0
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


SPELLINGS = {
    "older": "--rloo_k 4 --num_ppo_epochs 2 --response_length 5",
    "newer": "--num_generations 4 --num_iterations 2 --max_completion_length 5",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rloo_in_both_spellings(folders, tmp_path, spelling):
    code = main(
        [
            *("rloo", "--model_name_or_path", str(folders / "policy")),
            *("--dataset_name", str(folders / "data"), "--output_dir", str(tmp_path)),
            *("--per_device_train_batch_size", "8", "--max_steps", "2", "--logging_steps", "1"),
            *("--reward_model_path", str(folders / "reward"), "--num_sample_generations", "0"),
            *("--reward_funcs", f"{folders}/rewards.py:long", *SPELLINGS[spelling].split()),
        ]
    )
    assert code == 0
    rows = logged(tmp_path)
    assert len(rows) == 2
    assert {"rewards/reward", "rewards/long", "objective/uniform_groups"} <= set(rows[0])


def test_grpo_from_the_command_line(folders, tmp_path, capfd):
    flags_of = [
        *("grpo", "--model_name_or_path", str(folders / "policy")),
        *("--dataset_name", str(folders / "data"), "--output_dir", str(tmp_path)),
        *("--per_device_train_batch_size", "8", "--max_completion_length", "5", "--beta", "0.04"),
        *("--num_generations", "4", "--max_steps", "2", "--logging_steps", "1"),
        *("--reward_funcs", f"{folders}/rewards.py:long", "--num_sample_generations", "0"),
    ]
    assert main(flags_of) == 0
    assert [row["episode"] for row in logged(tmp_path)] == [8, 16]
    assert main([*flags_of, "--value_model_path", str(folders / "reward")]) == 2
    assert "has no value model" in capfd.readouterr().err


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
