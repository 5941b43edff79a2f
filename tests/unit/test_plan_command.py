"""``kedge plan``: batch sizes, each derived once; memory, the checks of training.
``kedge init``: the files are complete, pass ``kedge plan``, and the program trains.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml
from benchmarks import policy_versions

from kedge import AsyncPPOConfig
from kedge.cli.arguments import parse
from kedge.cli.main import main
from kedge.config.algorithms import RECIPES as OF_CONFIGS
from kedge.ext.before_rl.init_command import RECIPES, SIZES, SOURCES, render, settings
from kedge.ext.cpu import matmul
from kedge.ext.plan.command import human, optimizer_bytes, peaks, plan, short
from kedge.loop.batch_sizes import compute_batch_sizes
from kedge.records.errors import ConfigError
from kedge.testing import tiny_policy, tiny_reward_model
from kedge.trainers import load_trainer
from tests.environments.toys import TEMPLATE
from tests.unit.text_toys import neox_reward, word_tokenizer

ROOT = Path(__file__).parents[2]


def options(*flags):
    return parse((*flags, "--dummy_reward"), prog="kedge ppo")


def test_a_plan_needs_no_weights(tiny):
    assert not list(tiny.glob("*.safetensors"))
    flags = (
        f"--model_name_or_path {tiny} --total_episodes 20 --response_length 5 --optim sgd "
        "--per_device_train_batch_size 4 --num_mini_batches 2 --max_prompt_length 3 "
        "--no_gradient_checkpointing"
    )
    made = options(*flags.split())
    batches, facts, models = plan(made, processes=2)
    assert (batches.batch_size, batches.iterations, batches.local_mini_rows) == (8, 3, 2)
    assert facts == {"longest prompt, assumed": 3}
    policy, reference, value, reward = models
    # embed 40x16, head 16x40, 2 layers of q16x16 kv2x16x8 o16x16 mlp 3x16x24 2 norms; 1 norm
    per_layer = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    want = 2 * 40 * 16 + 2 * per_layer + 16
    assert (policy.total, policy.trained) == (want, want)
    assert (policy.weights, policy.gradients, policy.optimizer) == (want * 4, want * 4, 0)
    assert reference.resident == want * 4
    assert value.trained == want - 40 * 16 + 16
    assert reward.resident == value.total * 4
    # a block keeps 10 x 16 + 4 x 24 numbers per token, 2 blocks; 4 x 16 at the end
    tokens, logits = 2 * 8, 3 * (2 * 5 * 40 * 4)  # two tiles, and those that are kept
    assert policy.activations == tokens * (2 * 256 + 64) * 4 + logits
    assert policy.cache == 4 * (8 * 2 * (2 * 2 * 4) * 4 + 40 * 8)
    resident = sum(m.resident for m in models)
    assert peaks(models) == {
        "sampling": resident + policy.cache,
        "training": resident + policy.activations + value.activations,
    }


def test_checkpointing_optimizer_and_adapters_change_the_plan(tiny):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8"]
    plain = plan(options(*flags, "--no_gradient_checkpointing"))[2][0]
    saving = plan(options(*flags))[2][0]
    assert saving.activations < plain.activations
    assert plain.optimizer == plain.trained * 8
    free = plan(options(*flags, "--kl_coef", "0"))[2]
    assert [n.role for n in free] == ["policy", "value", "reward"]
    lora = plan(options(*flags, "--use_peft", "--lora_r", "2"))[2]
    assert lora[0].trained < lora[0].total
    assert lora[0].optimizer == lora[0].trained * 8
    assert [n.role for n in lora] == ["policy", "value", "reward"]  # the base is the reference
    critic = [*flags, "--value_source", "copy", "--freeze_value_attention"]
    whole, frozen = (plan(options(*critic, x))[2][2] for x in ("False", "True"))
    assert whole.total == frozen.total == whole.trained
    assert whole.trained - frozen.trained == 2 * (2 * 16 * 16 + 2 * 16 * 8)  # q, o; k, v


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`")  # of peft 0.18
def test_one_base_model_is_planned_once(tiny, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = tiny_reward_model(vocab_size=40, hidden_size=16, layers=2, heads=4)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "reward", save_embedding_layers=False)
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8", "--use_peft"]
    flags += ["--lora_r", "2", "--lora_target_modules", "all-linear", "--value_adapter", "True"]
    policy, value, reward = plan(options(*flags, "--reward_adapter", str(tmp_path / "reward")))[2]
    assert (value.role, reward.role) == ("value adapter", "reward adapter")
    assert value.total == value.trained == policy.trained + 16
    assert value.weights == value.trained * 4
    assert reward.total == 2 * 2 * (2 * 16) + 16  # two layers of q: A 2x16, B 16x2; the head
    assert policy.weights == policy.total * 4
    half = plan(options(*flags, "--bf16", "--use_cpu"))[2][0]
    assert half.weights == (policy.total - policy.trained) * 2 + policy.trained * 4


def test_a_budget_of_tokens_limits_the_activations(tiny):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "64"]
    flags += ["--per_device_train_batch_size", "64", "--max_prompt_length", "8"]
    flags += ["--response_length", "8"]
    rows = plan(options(*flags))[2][0]
    budget = plan(options(*flags, "--max_tokens_per_micro_batch", "64"))[2][0]
    assert budget.activations == pytest.approx(rows.activations / 16)
    assert budget.resident == rows.resident


def test_turns_are_planned(tiny, capsys):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8", "--max_turns", "3"]
    flags += ["--environment", "kedge.environments.games:GuessNumber", "--response_length", "30"]
    flags += ["--per_device_train_batch_size", "4", "--max_turn_tokens", "10"]
    assert main(["plan", "ppo", *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "3" in next(row for row in rows if row[1:2] == ["turns"])
    calls = next(row for row in rows if "calls" in row)
    assert "16" in calls  # 4 episodes, a reset and 3 turns each
    assert next(row for row in rows if row[:1] == ["value"])[1] != "head"  # a separate model


@pytest.mark.parametrize(
    ("optim", "size"),
    [
        *(("adamw_torch_fused", 8), ("adamw_8bit", 2), ("paged_adamw_32bit", 8), ("lion_32bit", 4)),
        *(("sgd", 0), ("rmsprop_bnb_8bit", 1), ("adamw_torch_4bit", 1), ("ademamix_8bit", 3)),
    ],
)
def test_optimizer_state(optim, size):
    assert optimizer_bytes(optim) == size


@pytest.mark.parametrize(
    ("kind", "roles"), [("rloo", ["policy", "reference", "reward"]), ("grpo", ["policy", "reward"])]
)
def test_runs_without_a_value_model_are_planned(tiny, kind, roles):
    made = parse(
        [
            *("--model_name_or_path", str(tiny), "--per_device_train_batch_size", "8"),
            *("--num_generations", "4", "--max_steps", "2", "--reward_model_path", str(tiny)),
            "--dummy_reward",
        ],
        prog="kedge plan",
        config=load_trainer(kind).SPEC.config,
    )
    batches, _, models = plan(made)
    assert batches.group == 4
    assert [m.role for m in models] == roles


def test_the_plan_is_printed(tiny, capsys):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8"]
    assert main(["plan", "ppo", "--dummy_reward", "--num_processes", "4", *flags]) == 0
    out = capsys.readouterr().out
    assert "policy" in out
    assert "peak about" in out
    assert main(["plan", "dpo"]) == 2
    assert main(["plan", "ppo", "--dummy_reward", *flags, "--num_mini_batches", "3"]) == 2
    assert "num_mini_batches=3 does not divide" in capsys.readouterr().err
    assert main(["plan", "ppo", "--num_processes", "0", *flags]) == 2
    assert main(["plan", "ppo", "--num_processes", "none", *flags]) == 2


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
def test_a_measured_plan_trains_on_full_responses(folders, tmp_path, capsys):
    flags = ["--model_name_or_path", str(folders / "policy"), "--use_cpu", "--response_length", "6"]
    flags += ["--dataset_name", str(folders / "data"), "--total_episodes", "40", "--stop_token"]
    flags += ["eos", "--reward_funcs", f"{folders}/rewards.py:long", "--output_dir"]
    flags += [str(tmp_path / "run"), "--per_device_train_batch_size", "2"]
    flags += ["--gradient_accumulation_steps", "8", "--num_generations", "4"]
    assert main(["plan", "rloo", "--measure", *flags]) == 0
    out = capsys.readouterr().out
    assert out.count("episode 16 ") == 1  # whole iterations
    found = re.search(
        r"full length: ([\d.]+) s an iteration, [\d.]+ s for the whole run of 3 iterations, .*; "
        r"peak ([\d.]+) (MiB|GiB) resident",
        out,
    )
    assert found is not None
    assert "/tmp" not in out.replace(str(tmp_path), "")  # no folder that is gone afterwards
    assert "the trained model is in" not in out
    assert float(found[2]) * (1 if found[3] == "MiB" else 1024) > 100  # torch alone
    assert not (tmp_path / "run").exists()
    assert main(["plan", "async-ppo", "--measure"]) == 2
    assert "cannot --measure" in capsys.readouterr().err


def test_the_asynchronous_run_is_planned_for_all_its_learners(tiny, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("def f(completions): return [0.0] * len(completions)\n")
    flags = ["--model_name_or_path", str(tiny), "--use_cpu", "--total_episodes", "640"]
    flags += ["--reward_funcs", f"{tmp_path}/rewards.py:f", "--actor_num_gpus_per_node", "2", "1"]
    assert main(["plan", "async-ppo", *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(row for row in rows if "processes" in row)[3] == "3"


@pytest.mark.slow
def test_the_table_of_large_policies_is_what_the_command_computes():
    page = (ROOT / "docs" / "explain" / "scaling.md").read_text(encoding="utf-8")
    assert "\n".join(policy_versions.table()) in page


def test_a_plan_fails_where_the_run_would(tiny, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Day 3", "answer": "5"}\n' * 8)
    (tmp_path / "mine.py").write_text(
        "def short(completions): return []\ndef right(completions, solution): return []\n"
    )
    (tmp_path / "file").touch()
    flags = [
        *("plan", "ppo", "--model_name_or_path", str(tiny), "--total_episodes", "64"),
        *("--dataset_name", str(tmp_path / "prompts.jsonl"), "--reward_funcs"),
    ]
    assert main([*flags, f"{tmp_path}/mine.py:short"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "value head" in line)
    assert row.split()[:4] == ["value", "head", "17", "17"]  # 16 weights and a bias
    for more, words in (
        ([f"{tmp_path}/gone.py:short"], "cannot import|FileNotFoundError"),
        ([f"{tmp_path}/mine.py:shirt"], "has no function 'shirt'; it has short, right"),
        ([f"{tmp_path}/mine.py:right"], "needs solution, .*its columns: answer, prompt"),
        ([f"{tmp_path}/mine.py:short", "--response_length", "4096"], "Set response_length="),
        ([f"{tmp_path}/mine.py:short", "--output_dir", f"{tmp_path}/file/run"], "is a file"),
    ):
        assert main([*flags, *more]) == 2
        assert re.search(words, capsys.readouterr().err), words


def test_units():
    sizes = [human(x) for x in (0, 512, 2048, 3 * 2**20, 5 * 2**30)]
    assert sizes == ["-", "512 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
    counts = [short(x) for x in (12, 1500, 260_000, 162_322_944)]
    assert counts == ["12", "1.5k", "260.0k", "162.3M"]


def test_the_sizes_of_a_run():
    plan = compute_batch_sizes(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        world_size=2,
        num_mini_batches=6,
        num_ppo_epochs=4,
        num_generations=2,
        total_episodes=100,
    )
    assert plan.local_rows == 12
    assert plan.batch_size == 24
    assert (plan.local_prompts, plan.prompts) == (6, 12)
    assert (plan.local_mini_rows, plan.mini_batch_size) == (2, 4)
    assert plan.micro_rows == 2  # never more than an optimizer step has
    assert plan.micro_batches == 1
    assert plan.iterations == 5  # ceil(100 / 24)
    assert plan.episodes == 120
    assert plan.optimizer_steps_per_iteration == 24
    assert plan.optimizer_steps == 120
    assert plan.derived() == {
        "world_size": 2,
        "num_total_batches": 5,
        "micro_batch_size": 4,
        "local_batch_size": 12,
        "batch_size": 24,
        "local_mini_batch_size": 2,
        "mini_batch_size": 4,
    }


def test_micro_batches_cover_a_step_that_they_do_not_divide():
    plan = compute_batch_sizes(
        per_device_train_batch_size=5,
        gradient_accumulation_steps=3,
        num_mini_batches=1,
        max_steps=1,
    )
    assert (plan.local_mini_rows, plan.micro_rows, plan.micro_batches) == (15, 5, 3)
    plan = compute_batch_sizes(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_mini_batches=2,
        max_steps=1,
    )
    assert (plan.local_mini_rows, plan.micro_rows, plan.micro_batches) == (6, 4, 2)


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({"total_episodes": 1}, 1),
        ({"total_episodes": 8}, 1),
        ({"total_episodes": 9}, 2),
        ({"max_steps": 3, "dataset_rows": 1000}, 3),
        ({"max_steps": 3, "total_episodes": 1000}, 3),
        ({"max_steps": 300, "total_episodes": 17}, 3),
        ({"num_train_epochs": 3.0, "dataset_rows": 8}, 3),
        ({"num_train_epochs": 3.0, "dataset_rows": 9}, 4),
        ({"num_train_epochs": 0.1, "dataset_rows": 240}, 3),
        ({"num_train_epochs": 1.0, "dataset_rows": 2}, 1),  # smaller than a batch: D7
        ({"num_train_epochs": 1.0, "dataset_rows": 8, "num_generations": 2}, 2),
    ],
)
def test_when_a_run_ends(options, iterations):
    assert compute_batch_sizes(per_device_train_batch_size=8, **options).iterations == iterations


def test_an_epoch_uses_every_prompt_once():
    plan = compute_batch_sizes(
        per_device_train_batch_size=8, num_generations=4, dataset_rows=5, max_steps=1
    )
    assert plan.iterations_per_epoch == 2.5


BAD = [
    (
        {"per_device_train_batch_size": 12, "num_mini_batches": 5, "num_generations": 2},
        "num_mini_batches=5 does not divide the batch of 12 samples (6 prompts x 2 each); "
        "nearest that do: 4, 6",
    ),
    (
        {
            "per_device_train_batch_size": 6,
            "gradient_accumulation_steps": 2,
            "world_size": 2,
            "num_mini_batches": 24,
        },
        "num_mini_batches=24 does not divide the batch of 12 samples on each of the 2 ranks "
        "(12 prompts x 1 each); nearest that do: 12",
    ),
    (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 3},
        "num_generations=3 does not divide the batch of 8 samples (per_device_train_batch_size=4 "
        "x gradient_accumulation_steps=2); nearest that do: 2, 4",
    ),
    (
        {"per_device_train_batch_size": 3, "num_generations": 2, "min_group": 2},
        "num_generations=2 does not divide the batch of 3 samples (per_device_train_batch_size=3 "
        "x gradient_accumulation_steps=1); nearest that do: 3",
    ),
    (
        {"per_device_train_batch_size": 1, "num_generations": 2, "min_group": 2},
        "nearest that do: none; raise per_device_train_batch_size",
    ),
    (
        {"per_device_train_batch_size": 8, "min_group": 2},
        "num_generations=1 must be at least 2: this algorithm compares responses to the same "
        "prompt",
    ),
    (
        {"per_device_train_batch_size": 8, "num_train_epochs": 0.0, "dataset_rows": 8},
        "num_train_epochs=0.0 must be above 0",
    ),
    ({"per_device_train_batch_size": 8}, "set total_episodes or max_steps"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ConfigError) as error:
        compute_batch_sizes(**options)
    assert message in str(error.value)


PAGE = (ROOT / "docs" / "recipes.md").read_text()
DEFAULTS = (ROOT / "docs" / "reference" / "defaults.md").read_text()


def show_settings(recipe, size):
    """Name, value and comment of the settings that have a source."""
    rows = [row for section in [*settings(recipe, size).values()][1:4] for row in section.items()]
    return [(name, f"{v:g}" if isinstance(v, float) else str(v), text) for name, (v, text) in rows]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe["title"])
def test_numbers_in_comments_are_those_of_the_size(recipe, size):
    """Comments on responses per iteration or optimizer step are true at this size."""
    text, batch = render(recipe, size, 1, Path("x.yaml")), recipe["batches"][SIZES.index(size)]
    minibatches = int(re.search(r"^num_mini_batches: (\d+)", text, re.MULTILINE)[1])
    said = re.findall(r"# (\d+) (?:responses|episodes) per (?:iteration|(optimizer step))", text)
    want = [(str(batch // minibatches) if step else str(batch), step) for _, step in said]
    assert said == want
    assert size == SIZES[0] or said


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


def edit_file(file, **more):
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
    edit_file(file)
    command = re.findall(r"^# kedge (plan .*)$", file.read_text(), flags=re.MULTILINE)[0]
    assert (command.split()[-2:] == ["--num_processes", "8"]) == (size != "135m")
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    batch = RECIPES[task, algorithm]["batches"][SIZES.index(size)]
    assert re.search(rf"batch\s+│ {batch:,} ", printed)
    assert re.search(r"^gradient_accumulation_steps: [1-9]", file.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_written_only_for_a_processor_that_has_it(native, models, monkeypatch, capsys):
    """bf16 without its instructions is five times slower: 8.6 GFLOP/s for 46.6 on AVX2."""
    monkeypatch.setattr(matmul, "multiplies_bf16", lambda: native)
    monkeypatch.setattr(matmul.platform, "machine", lambda: "x86_64")
    assert main(["init", "verifier", "--model_size", "135m"]) == 0
    file = models / "verifier.yaml"
    written = file.read_text()
    assert ("bf16: true" in written) == native
    assert "1024" not in written  # comments about other sizes
    edit_file(file)
    assert main(["plan", "grpo", "--config", str(file), "--bf16", "--use_cpu"]) == 0
    assert (matmul.SLOW_BF16 in " ".join(capsys.readouterr().out.split())) == (not native)


@pytest.mark.parametrize(("task", "algorithm"), RECIPES)
def test_every_number_has_a_source_and_no_name_is_unknown(task, algorithm, models):
    assert main(["init", task, "--algorithm", algorithm]) == 0
    values = yaml.safe_load((models / f"{task}.yaml").read_text())
    assert isinstance(values["learning_rate"], float)  # YAML reads 1e-06 as a string
    for name, _, comment in show_settings(RECIPES[task, algorithm], "1b"):
        assert any(source in comment for source in (*SOURCES, "a guess")), name


def test_recipes_and_async_ppo_have_todays_values():
    table = DEFAULTS.split("## Surprising defaults")[1].split("Some defaults")[0]
    rows = [re.findall("`(.+?)`", line) for line in table.splitlines() if line.startswith("| `")]
    used = {x: {f"{getattr(AsyncPPOConfig, x):g}"} for x in ("learning_rate", "adam_epsilon")}
    for recipe, size in itertools.product(RECIPES.values(), SIZES[1:]):
        for name, shown, _ in show_settings(recipe, size):
            used.setdefault(name, set()).add(shown)
    assert len(rows) == 14
    assert {name: used[name] for name, *_ in rows} == {name: {*values} for name, *values in rows}


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_recipe_for_agents_is_what_init_writes(size):
    written = settings(RECIPES["environment", "ppo"], size)
    rows = written["Step size"] | written["Sampling"]
    steps = {n: written["Size of the run"][n] for n in ("num_ppo_epochs", "num_mini_batches")}
    assert {name: value for name, (value, _) in (steps | rows).items()} == OF_CONFIGS["agent"]


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
    edit_file(models / "e.yaml", **sizes, response_length=40, max_turn_tokens=4, save_steps=100)
    assert main(["ppo", "--config", "e.yaml", "--use_cpu", "--num_sample_generations", "0"]) == 0
    assert (models / "runs" / "environment" / "model.safetensors").is_file()


def test_the_page_has_every_setting():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines()]
    found = {(row[0], i, row[i], row[-1]) for row in rows if len(row) == 6 for i in range(1, 5)}
    for recipe, (column, size) in itertools.product(RECIPES.values(), enumerate(SIZES, 1)):
        for name, shown, comment in show_settings(recipe, size):
            if name != "gradient_accumulation_steps":
                assert (f"`{name}`", column, shown, comment) in found, (name, size)
