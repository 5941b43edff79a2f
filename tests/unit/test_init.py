"""``kedge init``: the files are complete, pass ``kedge plan``, and the program trains."""

import itertools
import re
from pathlib import Path

import pytest
import yaml

from kedge import AsyncPPOConfig
from kedge.cli.main import main
from kedge.cli.tools.init import RECIPES, SIZES, SOURCES, settings
from kedge.testing import tiny_policy
from tests.environments.toys import TEMPLATE
from tests.unit.text_toys import neox_reward, word_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def show_settings(recipe, size):
    """Name, value and comment of the settings that have a source."""
    rows = [row for section in [*settings(recipe, size).values()][1:4] for row in section.items()]
    return [(name, f"{v:g}" if isinstance(v, float) else str(v), text) for name, (v, text) in rows]


@pytest.fixture
def models(tmp_path, monkeypatch):
    tokenizer = word_tokenizer(chat_template=TEMPLATE)
    tiny_policy("gpt_neox", vocab_size=32, max_positions=4096).save_pretrained(tmp_path / "m")
    neox_reward(vocab=32).save_pretrained(tmp_path / "r")
    for name in ("m", "r"):
        tokenizer.save_pretrained(tmp_path / name)
    rows = "".join(f'{{"prompt": "w{i} w4", "ground_truth": "1"}}\n' for i in range(3, 15))
    (tmp_path / "prompts.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tiny(file, **more):
    """The file with tiny models and other sizes, as a user would edit it."""
    names = {"model_name_or_path": "m", "reward_model_path": "r", "dataset_name": "prompts.jsonl"}
    names |= {"bf16": "false"} | more
    text = file.read_text()
    for name, value in names.items():
        text = re.sub(rf"^{name}: .*$", f"{name}: {value}", text, flags=re.MULTILINE)
    file.write_text(text)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("task", "algorithm"), RECIPES)
def test_the_file_passes_plan(task, algorithm, size, models, capsys):
    processes = "1" if size == "135m" else "8"
    words = ["init", task, "--algorithm", algorithm, "--model_size", size]
    assert main([*words, "--num_processes", processes]) == 0
    file = models / f"{task}.yaml"
    tiny(file)
    command = re.findall(r"^# kedge (plan .*)$", file.read_text(), flags=re.MULTILINE)[0]
    assert (command.split()[-2:] == ["--num_processes", "8"]) == (size != "135m")
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    batch = RECIPES[task, algorithm]["batches"][SIZES.index(size)]
    assert re.search(rf"batch\s+│ {batch:,} ", printed)
    assert re.search(r"^gradient_accumulation_steps: [1-9]", file.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(("task", "algorithm"), RECIPES)
def test_every_number_has_a_source_and_no_name_is_unknown(task, algorithm, models):
    assert main(["init", task, "--algorithm", algorithm]) == 0
    values = yaml.safe_load((models / f"{task}.yaml").read_text())
    assert isinstance(values["learning_rate"], float)  # YAML reads 1e-06 as a string
    for name, _, comment in show_settings(RECIPES[task, algorithm], "1b"):
        assert any(source in comment for source in (*SOURCES, "a guess")), name


def test_recipes_and_async_ppo_have_todays_values():
    table = PAGE.split("## Surprising defaults")[1].split("Some defaults")[0]
    rows = [re.findall("`(.+?)`", line) for line in table.splitlines() if line.startswith("| `")]
    used = {x: {f"{getattr(AsyncPPOConfig, x):g}"} for x in ("learning_rate", "adam_epsilon")}
    for recipe, size in itertools.product(RECIPES.values(), SIZES[1:]):
        for name, shown, _ in show_settings(recipe, size):
            used.setdefault(name, set()).add(shown)
    assert len(rows) == 14
    assert {name: used[name] for name, *_ in rows} == {name: {*values} for name, *values in rows}


def test_files_are_not_overwritten_and_the_batch_must_divide(models, capsys):
    assert main(["init", "environment", "--output", "e.yaml"]) == 0
    assert main(["init", "environment", "--output", "e.yaml"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["init", "environment", "--output", "e.yaml", "--force"]) == 0
    assert main(["init", "preference", "--algorithm", "grpo"]) == 2
    assert "kedge init preference --algorithm grpo must be ppo" in capsys.readouterr().err
    assert main(["init", "preference", "--num_processes", "3"]) == 2
    assert "--num_processes must divide 16" in capsys.readouterr().err
    assert not (models / "preference.yaml").exists()


@pytest.mark.slow
def test_the_environment_trains(models):
    assert main(["init", "environment", "--output", "e.yaml"]) == 0
    sizes = {"max_steps": 1, "num_generations": 2, "gradient_accumulation_steps": 1}
    tiny(models / "e.yaml", **sizes, response_length=40, max_turn_tokens=4, save_steps=100)
    assert main(["ppo", "--config", "e.yaml", "--use_cpu", "--num_sample_generations", "0"]) == 0
    assert (models / "runs" / "environment" / "model.safetensors").is_file()


def test_the_page_has_every_setting():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines()]
    found = {(row[0], i, row[i], row[-1]) for row in rows if len(row) == 6 for i in range(1, 5)}
    for recipe, (column, size) in itertools.product(RECIPES.values(), enumerate(SIZES, 1)):
        for name, shown, comment in show_settings(recipe, size):
            if name != "gradient_accumulation_steps":
                assert (f"`{name}`", column, shown, comment) in found, (name, size)
