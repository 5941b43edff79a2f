"""The command line: commands, help, flags, files, datasets, algorithms, rewards."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import yaml
from docs.generate import command_flags

from kedge import GRPOConfig
from kedge.cli import quick
from kedge.cli.arguments import parse
from kedge.cli.data import Splits, load_prompts
from kedge.cli.main import commands, main, run_command
from kedge.cli.options import find_reward, model_names
from kedge.cli.ppo import (
    build_rewards,
    command_to_repeat,
    load_algorithm,
    resume_point,
)
from kedge.ext.before_rl.reward_command import load_scorer
from kedge.ext.plan.command import plan
from kedge.models.load import _hub_problem, check_source
from kedge.records.errors import ConfigError, DataError
from kedge.rewards.build import check_sources

MODEL = ["--model_name_or_path", "m"]


def options(*flags, **kwargs):
    return parse(flags, prog="kedge ppo", **kwargs)


# -- the command itself ---------------------------------------------------------------------------


def test_help_names_every_command(capsys):
    from kedge import __version__

    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in commands())
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", ["--help", "--kl_coff 0.1", "--max_steps x", "--config {file}"])
def test_help_and_wrong_flags_are_answered_before_torch_is_imported(words, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rat: 1e-5")
    argv = ["ppo", *words.format(file=file).split()]
    code = f"import sys, kedge.cli.main as m; code = m.main({argv})\n"
    code += "assert not {'torch', 'transformers'} & {*sys.modules}; sys.exit(code)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == (0 if words == "--help" else 2), run.stderr
    assert words == "--help" or run.stderr.startswith("kedge ppo: error: ")


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("ppo", "seed: 1\nloss_type: dapo\nbeta: 0", "loss_type, beta belong to kedge grpo: run"),
        (
            "grpo",
            "{vf_coef: 1, lam: 1, gamma: 1, cliprange_value: 1}",
            "vf_coef, lam, gamma and 1 more",
        ),
        ("rloo", "beta: 0", "run kedge grpo --config {}; it is called kl_coef here"),
        ("ppo", "beta1: 0", "unknown option beta1"),
        ("rloo", "vf_coef: 0.1", "vf_coef belongs to kedge ppo and kedge async-ppo: run kedge ppo"),
        ("grpo", "wandb_entity: me", "wandb_entity belongs to kedge async-ppo: run"),
    ],
)
def test_a_file_of_another_command_names_it(command, content, message, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    assert main([command, "--config", str(file)]) == 2
    assert message.format(file) in capsys.readouterr().err


def test_flags_and_help_are_those_of_the_parsers():
    written = json.loads(quick.FILE.read_text())
    if written["transformers"] != transformers.__version__:
        pytest.skip("another release of transformers has other fields")
    assert quick.FILE.read_text() == command_flags(), "python docs/generate.py"


def test_python_m_kedge_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kedge", "pop"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "did you mean 'ppo'?" in done.stderr


def test_an_occupied_folder_and_an_unknown_rule_are_refused_before_any_weight_loads(
    tmp_path, rows, monkeypatch, capsys
):
    import kedge.cli.ppo

    monkeypatch.setattr(kedge.cli.ppo, "load_policy", lambda *_: pytest.fail("weights loaded"))
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


def test_reward_functions_alone_need_no_reward_model():
    made = options(*MODEL, "--reward_funcs", "a.py:f", "b:g")
    assert made.script.reward_funcs == ["a.py:f", "b:g"]
    assert model_names(made).reward is None
    assert model_names(options(*MODEL, "--dummy_reward")).reward == "m"


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
        (["--learn", "1"], "unknown flag --learn"),
        (["--learning_rate", "fast"], "argument --learning_rate/--learning-rate: invalid float"),
        (["--kl_estimator", "k9"], "argument --kl_estimator/--kl-estimator: invalid choice: 'k9'"),
        (["stray"], "'stray'"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "none.yaml"], "--config none.yaml: there is no such file"),
        (["--load_in_4bit"], "need --use_peft"),
        (["--lora_r", "4"], "lora_r needs --use_peft"),
        (["--use_peft", "--lora_dropout", "0.1"], "lora_dropout=0.1 must be 0"),
        (["--use_peft", "--load_in_4bit", "--load_in_8bit"], "are both set"),
    ],
)
def test_mistakes_in_flags(flags, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        options(*MODEL, "--output_dir", "x", *flags)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "run_name: caf\u00e9".encode("latin-1"),
        b"run_name: 2024-13-45",
        b"seed: !!int abc",
        b"seed: !!float x",
        b"a: " + b"[" * 5000,
        b"seed: " + b"1" * 6000,
        b"environment_kwargs: {a: !!binary aGk=}",
        b"environment_kwargs: {a: !!set {b}}",
        b"environment_kwargs: &a {x: *a}",
        b"a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + b"".join(
            b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefghij"
        ),
    ],
)
def test_files_that_are_not_what_they_look_like(content, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        options(*MODEL, "--output_dir", "x", "--config", str(file))


def test_a_date_in_a_file_is_text(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("run_name: 2024-12-24")
    made = options(*MODEL, "--output_dir", "x", "--config", str(file))
    assert made.config.run_name == "2024-12-24"


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


@pytest.mark.filterwarnings("ignore:unclosed file.*csv:ResourceWarning")  # of datasets 3.0
@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "txt"])
def test_prompts_from_a_file(tmp_path, rows, suffix):
    import datasets

    data = datasets.Dataset.from_json(str(rows), cache_dir=str(tmp_path / "cache"))
    file = tmp_path / f"p.{suffix}"
    if suffix in ("json", "jsonl"):
        data.to_json(file)
    elif suffix == "csv":
        data.to_csv(file)
    elif suffix == "parquet":
        data.to_parquet(file)
    else:
        file.write_text("\n".join(data["prompt"]))
    train, test = load_prompts(options(*MODEL, "--dataset_name", str(file)))
    assert test is None
    assert list(train["prompt"]) == [f"Day {i}" for i in range(30)]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", ""), ("b.jsonl", "\n\n"), ("c.csv", ""), ("d.csv", "prompt\n"), ("e.json", "[]")],
)
def test_an_empty_file_has_no_rows(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} has no rows, or"):
        Splits(str(tmp_path / name)).load("train")


def test_evaluation_prompts_from_another_file(tmp_path, rows, capsys):
    (tmp_path / "held.jsonl").write_text('{"prompt": "Night 1"}\n')
    flags = [*MODEL, "--dataset_name", str(rows), "--eval_dataset_name", f"{tmp_path}/held.jsonl"]
    train, test = load_prompts(options(*flags, "--eval_strategy", "steps", "--eval_steps", "5"))
    assert (len(train), list(test["prompt"])) == (30, ["Night 1"])
    assert "no split" not in capsys.readouterr().err  # a file has none
    (tmp_path / "saved").mkdir()
    (tmp_path / "held.jsonl").rename(tmp_path / "saved" / "train.jsonl")
    assert len(Splits(f"{tmp_path}/saved").load("test")) == 1
    assert "saved has no split 'test'; all of its rows are read" in capsys.readouterr().err
    (tmp_path / "saved" / "train.jsonl").rename(tmp_path / "held.jsonl")
    with pytest.raises(DataError, match=r"held.jsonl needs an evaluation: add --eval_strategy"):
        load_prompts(options(*flags))


def test_prompts_from_folders(tmp_path, rows):
    import datasets

    data = datasets.Dataset.from_json(str(rows), cache_dir=str(tmp_path / "cache"))
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(saved)
    splits = Splits(str(saved))
    assert (len(splits.load("train")), len(splits.load("test"))) == (30, 3)
    one = tmp_path / "one"
    data.save_to_disk(one)
    assert len(Splits(str(one)).load("train")) == 30
    files = tmp_path / "files"
    (files / "data").mkdir(parents=True)
    data.select(range(20)).to_parquet(files / "data" / "train-00000-of-00002.parquet")
    data.select(range(20, 30)).to_parquet(files / "data" / "train-00001-of-00002.parquet")
    data.select(range(4)).to_json(files / "data" / "test.jsonl")
    splits = Splits(str(files))
    assert list(splits.load("train")["prompt"])[-1] == "Day 29"
    assert len(splits.load("test")) == 4
    with pytest.raises(DataError, match="has no split 'dev'; its splits: test, train"):
        splits.load("dev")


def test_a_single_split_stands_for_any(rows, capsys):
    made = options(*MODEL, "--dataset_name", str(rows), "--dataset_train_split", "descriptiveness")
    train, _ = load_prompts(made)
    assert len(train) == 30
    assert "has no split 'descriptiveness'; all of its rows are read" in capsys.readouterr().err


def test_evaluation_prompts_are_a_split_or_held_out(tmp_path, rows, capsys):
    flags = [*MODEL, "--dataset_name", str(rows), "--output_dir", str(tmp_path / "o")]
    train, test = load_prompts(options(*flags, "--eval_strategy", "steps", "--eval_steps", "5"))
    assert (len(train), len(test)) == (27, 3)
    assert list(test["prompt"]) == ["Day 27", "Day 28", "Day 29"]
    assert "holding out the last 3 prompts" in capsys.readouterr().err


def test_another_column_and_a_quick_look(tmp_path):
    file = tmp_path / "q.jsonl"
    lines = [json.dumps({"question": f"q{i}", "prompt": "no", "answer": i}) for i in range(200)]
    file.write_text("\n".join(lines))
    flags = [*MODEL, "--dataset_name", str(file), "--prompt_column"]
    train, _ = load_prompts(options(*flags, "question", "--sanity_check"))
    assert (len(train), train[7]) == (100, {"prompt": "q7", "answer": 7})
    with pytest.raises(
        DataError, match="--prompt_column nothing does not exist; columns: question, "
    ):
        load_prompts(options(*flags, "nothing"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "--dataset_name is required"),
        ("./nowhere", "the file or folder does not exist"),
        ("nowhere.jsonl", "the file or folder does not exist"),
        ("EMPTY", "must be a folder with .json"),
        ("BROKEN", "broken.json has no rows, or is not readable as json: "),
        ("ODD", "must be one of .json"),
    ],
)
def test_datasets_that_cannot_be_read(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{nonsense")
    (tmp_path / "odd.xyz").write_text("?")
    places = {"EMPTY": "empty", "BROKEN": "broken.json", "ODD": "odd.xyz"}
    if name in places:
        name = str(tmp_path / places[name])
    flags = [] if name is None else ["--dataset_name", name]
    with pytest.raises(DataError, match=re.escape(message)):
        load_prompts(options(*MODEL, *flags))


def test_without_a_network_a_wrong_name_is_named_at_once(rows, tmp_path, monkeypatch, caplog):
    """One request instead of five with pauses, which took 51 s; the thing stands first."""
    asked = []

    def head(*_, **__):
        asked.append(1)
        raise ConnectionError("no network")

    monkeypatch.setattr("kedge.models.load.get_session", lambda: SimpleNamespace(head=head))
    _hub_problem.cache_clear()
    monkeypatch.chdir(tmp_path)
    Path("r.py").write_text("def ok(completions, **_):\n    return [1.0]\n")
    none = "cannot be loaded: there is no folder {} here, and the hub cannot be reached"
    model, data = options("--model_name_or_path", "runs/nope", "--dummy_reward"), "data/nope"
    for call, message in (
        (lambda: plan(model), "the model 'runs/nope' " + none.format("runs/nope")),
        (lambda: check_sources(None, "ok"), "reward model 'ok' " + none.format("ok")),
        (
            lambda: check_sources(None, "r.py"),
            "'r.py' names no function; write r.py:ok (it has ok)",
        ),
        (lambda: Splits(data), "the dataset 'data/nope' " + none.format(data)),
        (lambda: load_scorer("nope", None), "the model 'nope' " + none.format("nope")),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            call()
    assert len(asked) == 1
    monkeypatch.setattr("kedge.models.load.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("kedge.models.load.constants.HF_HUB_OFFLINE", False)
    Path("models--x--cached/snapshots").mkdir(parents=True)
    check_source("x/cached", "the model")
    assert "set HF_HUB_OFFLINE=1 to read the cache at once" in caplog.text
    _hub_problem.cache_clear()


def test_models_that_are_missing_or_have_no_use_are_named(rows):
    with pytest.raises(ConfigError, match="--model_name_or_path is required"):
        model_names(options("--dataset_name", str(rows)))
    with pytest.raises(ConfigError, match="the model '/no/such' cannot be loaded"):
        plan(options("--model_name_or_path", "/no/such", "--dummy_reward"))
    grpo = options(*MODEL, "--value_model_path", "v", config=GRPOConfig)
    with pytest.raises(ConfigError, match="--value_model_path v: this algorithm has no value mo"):
        model_names(grpo)


def test_an_algorithm_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from kedge import ppo\n\nrule = ppo(lam=0.5)\n\n\ndef make():\n    return ppo()\n\nn = 3\n"
    )
    assert load_algorithm(None) is None
    assert load_algorithm("ppo") is None
    assert load_algorithm(f"{file}:rule").name == "ppo"
    assert load_algorithm(f"{file}:make").name == "ppo"
    with pytest.raises(ConfigError, match=r"mine.py:n must be a kedge\.Algorithm .* got int"):
        load_algorithm(f"{file}:n")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(FileNotFoundError"):
        load_algorithm(f"{tmp_path}/none.py:rule")
    with pytest.raises(ConfigError, match="has no attribute 'other'"):
        load_algorithm(f"{file}:other")
    file.write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(ZeroDivisionError: division"):
        load_algorithm(f"{file}:rule")


@pytest.mark.parametrize("spec", ["nonsense", "remaxx", ":rule", "mine.py:", "a b:c"])
def test_an_algorithm_that_there_is_not_names_those_that_there_are(spec):
    with pytest.raises(ConfigError, match=f"--algorithm {spec}.*reinforce_pp_baseline, remax, fi"):
        load_algorithm(spec)


def test_control_codes_of_an_error_do_not_reach_the_terminal(capsys):
    def fails(argv):
        raise ConfigError("the server said\n\x1b[31mred\x07 é")

    assert run_command(fails, [], name="kedge") == 2
    assert capsys.readouterr().err == "kedge: error: the server said \\x1b[31mred\\x07 é\n"


def test_options_of_an_algorithm():
    made = load_algorithm("reinforce_pp", '{"baseline": true, "reward_clip_range": [-1, 1]}')
    assert made.name == "reinforce_pp_baseline"
    assert made.min_group == 2
    assert load_algorithm("kedge.algorithms:grpo", '{"importance_sampling_level": "sequence"}').name


@pytest.mark.parametrize(
    ("rule", "given", "message"),
    [
        ("remax", '{"lam": 0.9}', "unexpected keyword argument 'lam'"),
        (
            "reinforce_pp",
            '{"loss_kl_estimator": "k9"}',
            "loss_kl_estimator must be one of k1, k2, k3, abs, got 'k9'",
        ),
        ("reinforce_pp", "[1]", "must be a JSON object"),
        ("reinforce_pp", "beta=1", "must be a JSON object"),
        (None, '{"lam": 0.9}', "needs --algorithm"),
        ("tests.unit.text_toys:word_tokenizer", None, "must be a kedge.Algorithm"),
    ],
)
def test_bad_options_of_an_algorithm(rule, given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_algorithm(rule, given)


# -- rewards --------------------------------------------------------------------------------------

FUNCS = ["--reward_funcs", "mine.py:f"]


@pytest.mark.parametrize(
    ("flags", "model", "names", "weights"),
    [
        ([*FUNCS], False, ["mine.py:f"], None),
        (["--apply_verifiable_reward"], False, ["verifiable"], [10.0]),
        (
            "--reward_model_path m --reward_model_multiplier 0.5 --apply_verifiable_reward "
            "--verification_reward 3 --add_r1_style_format_reward "
            "--r1_style_format_reward 2 --reward_funcs mine.py:f",
            True,
            ["mine.py:f", "verifiable", "r1_style_format"],
            [0.5, 1.0, 3.0, 2.0],
        ),
    ],
)
def test_reward_flags(flags, model, names, weights):
    given = flags.split() if isinstance(flags, str) else flags
    made = options(*MODEL, *given)
    assert find_reward(made, "m") == ("m" if model else None)
    functions, factors = build_rewards(made, model=model)
    assert [f if isinstance(f, str) else f.__name__ for f in functions] == names
    assert factors == weights


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--verification_reward 3", "--verification_reward needs --apply_verifiable"),
        ("--r1_style_format_reward 3", "needs --add_r1_style_format_reward"),
        ("--reward_model_path m --reward_model_multiplier 0", "leaves out the model"),
        ("--reward_model_multiplier 2", "needs --reward_model_path"),
        (
            "--apply_verifiable_reward --reward_weights 1",
            "--reward_weights and --apply_verifiable_reward both set",
        ),
    ],
)
def test_reward_flags_that_contradict(flags, message):
    made = options(*MODEL, *flags.split())

    def read():
        find_reward(made, "m")
        build_rewards(made, model=False)

    with pytest.raises(ConfigError, match=re.escape(message)):
        read()


def test_a_model_without_weight_is_not_loaded(tiny):
    flags = ["--model_name_or_path", str(tiny), "--reward_model_path", "/no/such"]
    more = ["--reward_model_multiplier", "0", "--apply_verifiable_reward"]
    assert model_names(options(*flags, *more)).reward is None


def test_where_to_resume_alone_means_the_newest():
    for given, place in ((None, None), ("True", True), ("false", None), ("a/c-2", "a/c-2")):
        assert resume_point(given) == place
    alone = parse(["--resume_from_checkpoint", "--max_steps", "3"], prog="kedge ppo")
    assert resume_point(alone.config.resume_from_checkpoint) is True
    assert alone.config.max_steps == 3
    named = parse(["--resume_from_checkpoint=runs/a/checkpoint-2"], prog="kedge ppo")
    assert named.config.resume_from_checkpoint == "runs/a/checkpoint-2"


@pytest.mark.parametrize(
    ("typed", "want"),
    [
        ("/venv/bin/kedge ppo --x 'a b' --bf16", "kedge ppo --x 'a b' --bf16"),
        ("kedge ppo --resume_from_checkpoint True --x 1", "kedge ppo --x 1"),
        ("kedge ppo --resume-from-checkpoint=a --x 1", "kedge ppo --x 1"),
        ("kedge ppo --resume_from_checkpoint", "kedge ppo"),
        ("train/ppo.py --x 1", "python train/ppo.py --x 1"),
        ("kedge ppo --hub_token hf_123", None),
        ("/usr/bin/pytest -q", None),
        ("/kedge/__main__.py ppo --x 1", "python -m kedge ppo --x 1"),
    ],
)
def test_the_command_that_resumes(monkeypatch, typed, want):
    monkeypatch.setattr(sys, "argv", shlex.split(typed))
    module = SimpleNamespace(origin="/kedge/__main__.py", name="kedge.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module)
    assert command_to_repeat() == want
    monkeypatch.setenv("RANK", "0")
    assert command_to_repeat() is None  # a launcher's words
