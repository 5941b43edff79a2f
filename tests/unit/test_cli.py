"""The command line: commands, help, flags and files."""

import re
import subprocess
import sys
import time

import pytest
import yaml

from kedge.cli.arguments import parse
from kedge.cli.main import COMMANDS, main
from kedge.cli.train.ppo import model_names
from kedge.errors import ConfigError

MODEL = ["--model_name_or_path", "m"]


def options(*flags, **kwargs):
    return parse(flags, prog="kedge ppo", **kwargs)


# -- the command itself ---------------------------------------------------------------------------


def test_help_names_every_command(capsys):
    from kedge import __version__

    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kedge {__version__}\n"


def test_recipes_is_another_name_of_init(tmp_path, capsys):
    assert main(["recipes", "verifier", "--output", str(tmp_path / "a.yaml")]) == 0
    assert (tmp_path / "a.yaml").is_file()


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from kedge.cli.main import main;"
        "main(['--help']);"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.perf_counter() - begin < 10


def test_python_m_kedge_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "pop"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "did you mean 'ppo'?" in done.stderr


def test_an_occupied_folder_and_an_unknown_rule_are_refused_before_any_weight_loads(
    tmp_path, rows, monkeypatch, capsys
):
    import kedge.cli.train.ppo

    monkeypatch.setattr(
        kedge.cli.train.ppo, "load_policy", lambda *_: pytest.fail("weights loaded")
    )
    flags = ["--model_name_or_path", str(tmp_path), "--dataset_name", str(rows)]
    flags += ["--reward_funcs", "math:fsum", "--output_dir", str(tmp_path / "run")]
    assert main(["ppo", *flags, "--algorithm", "kedge.algorithms:nope"]) == 2
    assert "has no attribute 'nope'" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoint-7").mkdir(parents=True)
    assert main(["ppo", *flags]) == 2
    assert "holds checkpoint-7 of an earlier run" in capsys.readouterr().err


def test_errors_are_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.delenv("KEDGE_TRACEBACK", raising=False)
    assert main(["ppo", "--lerning_rate", "1"]) == 2
    err = capsys.readouterr().err
    assert err == (
        "kedge ppo: error: unknown flag --lerning_rate; the nearest is --learning_rate\n"
    )
    monkeypatch.setenv("KEDGE_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(["ppo", "--lerning_rate", "1"])


TRAINING = ["ppo", "plan ppo", "rloo", "grpo", "async-ppo", "sft", "reward"]


@pytest.mark.parametrize("command", TRAINING)
def test_help_of_a_command_shows_what_matters_first(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: kedge {command} ")
    flags = re.findall(r"^  --(\w+)", out, re.MULTILINE)
    assert flags[:2] == ["model_name_or_path", "dataset_name"]
    assert 9 < len(flags) < 26
    assert len(re.findall("--help all shows all .* flags", out)) == 1


@pytest.mark.parametrize("flags", [["--help", "all"], ["--help_all"]])
def test_help_of_a_command_lists_what_works_and_hides_what_does_not(flags, capsys):
    assert main(["ppo", *flags]) == 0
    out = capsys.readouterr().out
    assert "--kl_estimator {k1,k2,k3,abs,full}" in out
    assert "(default: k1)" in out
    assert "--kl-estimator" not in out  # understood, and not listed
    assert max(map(len, out.splitlines())) < 120
    assert "--warmup_ratio" not in out
    assert "--neftune_noise_alpha" not in out


def test_a_plan_without_prompts_says_so(capsys, tiny):
    command = ["plan", "ppo", "--model_name_or_path", str(tiny)]
    assert main(command) == 2
    assert "no reward is given: add --reward_model_path" in capsys.readouterr().err
    assert main([*command, "--reward_model_path", str(tiny), "--max_steps", "1"]) == 2
    assert "has no score head (it is LlamaForCausalLM)" in capsys.readouterr().err
    assert main([*command, "--dummy_reward"]) != 0
    assert "the length of the run is unknown" in capsys.readouterr().err


# -- flags ----------------------------------------------------------------------------------------

SEED_000 = """
    --learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --output_dir models/minimal/ppo
    --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000
    --model_name_or_path m --non_eos_penalty
"""
SEED_003 = """
    --dataset_name d --dataset_train_split descriptiveness --learning_rate 3e-6 --num_ppo_epochs 1
    --num_mini_batches 1 --output_dir models/minimal/ppo --per_device_train_batch_size 64
    --gradient_accumulation_steps 1 --total_episodes 10000 --model_name_or_path m
    --sft_model_path s --reward_model_path r --missing_eos_penalty 1.0
"""


def test_the_older_command_line():
    made = options(*SEED_000.split())
    assert made.config.non_eos_penalty is True
    assert made.config.per_device_train_batch_size == 64
    with pytest.raises(ConfigError, match=r"no reward is given: .* --dummy_reward"):
        model_names(made)
    names = model_names(options(*SEED_000.split(), "--dummy_reward"))
    assert (names.policy, names.tokenizer, names.reward) == ("m", "m", "m")


def test_the_newer_command_line():
    made = options(*SEED_003.split())
    assert made.config.missing_eos_penalty == 1.0
    assert made.script.dataset_train_split == "descriptiveness"
    names = model_names(made)
    assert (names.policy, names.tokenizer, names.reward) == ("s", "m", "r")


def test_reward_functions_alone_need_no_reward_model(capsys):
    made = options(*MODEL, "--reward_funcs", "a.py:f", "b:g")
    assert made.script.reward_funcs == ["a.py:f", "b:g"]
    assert model_names(made).reward is None
    assert "dummy" not in capsys.readouterr().err
    assert model_names(options(*MODEL, "--dummy_reward")).reward == "m"
    assert "using a dummy reward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--bf16"], "bf16", True),
        (["--bf16", "false"], "bf16", False),
        (["--no_gradient_checkpointing"], "gradient_checkpointing", False),
        (["--gradient_checkpointing", "false"], "gradient_checkpointing", False),
        (["--max-steps", "3"], "max_steps", 3),
        (["--no_shuffle_dataset"], "shuffle_dataset", False),
        (["--stop_token_ids", "0", "7"], "stop_token_ids", [0, 7]),
        ([], "stop_token", "eos"),
        (["--stop_token", "none"], "stop_token", None),
        (["--report_to", "tensorboard"], "report_to", ["tensorboard"]),
    ],
)
def test_flags(flags, name, value):
    made = options(*MODEL, "--output_dir", "x", *flags)
    assert getattr(made.config, name) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lerning_rate", "1"], "unknown flag --lerning_rate; the nearest is --learning_r"),
        (["--learn", "1"], "unknown flag --learn"),
        (["--learning_rate", "fast"], "argument --learning_rate/--learning-rate: invalid float"),
        (["--kl_estimator", "k9"], "argument --kl_estimator/--kl-estimator: invalid choice: 'k9'"),
        (["stray"], "'stray'"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "none.yaml"], "--config none.yaml: there is no such file"),
        (["--dataset_streaming"], "dataset_streaming=True is not supported"),
        (["--load_in_4bit"], "need --use_peft"),
        (["--lora_r", "4"], "lora_r needs --use_peft"),
        (["--use_peft", "--lora_dropout", "0.1"], "lora_dropout=0.1 must be 0"),
        (["--use_peft", "--load_in_4bit", "--load_in_8bit"], "are both set"),
        (["--lam", "3"], "lam=3.0 must be"),
        (["--label_smoothing_factor", "0.1"], "label_smoothing_factor=0.1 is not supported"),
    ],
)
def test_mistakes_in_flags(flags, message):
    with pytest.raises(ConfigError) as error:
        options(*MODEL, "--output_dir", "x", *flags)
    assert message in str(error.value)


# -- files ----------------------------------------------------------------------------------------


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "learning_rate": 1e-3,
                "kl_coef": "3e-2",  # what YAML 1.1 makes of a bare 3e-2
                "max_steps": -1,
                "stop_strings": ["end", "stop"],
                "bf16": False,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
                "output_dir": str(tmp_path),
                "run_name": None,
                "stop_token": None,  # which says something: "eos" is the default
            }
        )
    )
    made = options(*MODEL, "--config", str(file), "--learning_rate", "1e-4")
    assert made.config.learning_rate == 1e-4
    assert made.config.kl_coef == 0.03
    assert made.config.max_steps == -1
    assert made.config.stop_strings == ["end", "stop"]
    assert made.config.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert (made.config.run_name, made.config.stop_token) == (None, None)
    assert {"learning_rate", "kl_coef", "bf16"} <= made.given
    assert "run_name" not in made.given


def test_an_unknown_key_names_the_nearest_and_its_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lerning_rate: 1e-3\n")
    with pytest.raises(ConfigError) as error:
        options(*MODEL, f"--config={file}")
    assert str(error.value) == (
        f"{file}: unknown option lerning_rate; the nearest is learning_rate"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "must map names to values, got list"), ("a: [", "is not valid YAML")],
)
def test_a_file_that_is_no_mapping(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        options("--config", str(file))


def test_defaults_of_a_script_give_way_to_file_and_flags(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("")
    assert options("--config", str(file), *MODEL).given == {"model_name_or_path"}
    file.write_text("response_length: 7\n")
    defaults = {"response_length": 5, "max_prompt_length": 512}
    made = options(*MODEL, "--config", str(file), defaults=defaults)
    assert (made.config.response_length, made.config.max_prompt_length) == (7, 512)
    assert "max_prompt_length" not in made.given
