"""``kedge plan``: sizes, memory, and the checks of training."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kedge.cli.arguments import parse
from kedge.cli.main import main
from kedge.cli.planning import memory
from kedge.cli.planning.plan import CONFIGS, plan
from kedge.cli.planning.sizes import human, short, sync_row
from kedge.config.options import elsewhere
from kedge.ops.cpu import patch
from kedge.testing import tiny_reward_model

ROOT = Path(__file__).parents[2]


def options(*flags):
    return parse(flags, prog="kedge ppo")


def test_a_plan_needs_no_weights(tiny):
    assert not list(tiny.glob("*.safetensors"))
    flags = (
        f"--model_name_or_path {tiny} --total_episodes 20 --response_length 5 --optim sgd "
        "--per_device_train_batch_size 4 --num_mini_batches 2 --max_prompt_length 3 "
        "--no_gradient_checkpointing"
    )
    made = options(*flags.split())
    _, batches, facts, needs = plan(made, processes=2)
    assert (batches.batch_size, batches.iterations, batches.local_mini_rows) == (8, 3, 2)
    assert facts == {"longest prompt, assumed": 3}
    policy, reference, value, reward = needs
    # embed 40x16, head 16x40, 2 layers of q16x16 kv2x16x8 o16x16 mlp 3x16x24 2 norms; 1 norm
    per_layer = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    want = 2 * 40 * 16 + 2 * per_layer + 16
    assert (policy.parameters, policy.trained) == (want, want)
    assert (policy.weights, policy.gradients, policy.optimizer) == (want * 4, want * 4, 0)
    assert reference.resident == want * 4
    assert value.trained == want - 40 * 16 + 16
    assert reward.resident == value.parameters * 4
    # a block keeps 10 x 16 + 4 x 24 numbers per token, 2 blocks; 4 x 16 at the end
    tokens, logits = 2 * 8, 3 * (2 * 5 * 40 * 4)  # two tiles, and those that are kept
    assert policy.training == tokens * (2 * 256 + 64) * 4 + logits
    assert policy.generation == 4 * (8 * 2 * (2 * 2 * 4) * 4 + 40 * 8)


def test_packed_weights_are_planned_where_they_are_used(tiny, monkeypatch):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8", "--use_cpu"]
    generation = []
    for faster, tokens in ((True, "16"), (False, "16"), (True, "15"), (False, "15")):
        monkeypatch.setattr(patch, "by_packed_weights", lambda _, faster=faster: faster)
        policy = plan(options(*flags, "--response_length", tokens))[3][0]
        generation.append(policy.generation)
    weights = policy.parameters - 40 * 16  # without the embedding
    assert generation[0] - generation[1] == 4 * weights
    assert generation[2] == generation[3]


def test_checkpointing_optimizer_and_adapters_change_the_plan(tiny):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8"]
    plain = plan(options(*flags, "--no_gradient_checkpointing"))[3][0]
    saving = plan(options(*flags))[3][0]
    assert saving.training < plain.training
    assert plain.optimizer == plain.trained * 8
    lora = plan(options(*flags, "--use_peft", "--lora_r", "2"))[3]
    assert lora[0].trained < lora[0].parameters
    assert lora[0].optimizer == lora[0].trained * 8
    assert [n.role for n in lora] == ["policy", "value", "reward"]  # the base is the reference


@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`")  # of peft 0.18
def test_one_base_model_is_planned_once(tiny, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = tiny_reward_model(vocab_size=40, hidden_size=16, layers=2, heads=4)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "reward", save_embedding_layers=False)
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8", "--use_peft"]
    flags += ["--lora_r", "2", "--lora_target_modules", "all-linear", "--value_adapter", "True"]
    policy, value, reward = plan(options(*flags, "--reward_adapter", str(tmp_path / "reward")))[3]
    assert (value.role, reward.role) == ("value adapter", "reward adapter")
    assert value.parameters == value.trained == policy.trained + 16
    assert value.weights == value.trained * 4
    assert reward.parameters == 2 * 2 * (2 * 16) + 16  # two layers of q: A 2x16, B 16x2; the head
    assert policy.weights == policy.parameters * 4
    half = plan(options(*flags, "--bf16", "--use_cpu"))[3][0]
    assert half.weights == (policy.parameters - policy.trained) * 2 + policy.trained * 4


def test_a_budget_of_tokens_limits_the_activations(tiny):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "64"]
    flags += ["--per_device_train_batch_size", "64", "--max_prompt_length", "8"]
    flags += ["--response_length", "8"]
    rows = plan(options(*flags))[3][0]
    budget = plan(options(*flags, "--max_tokens_per_micro_batch", "64"))[3][0]
    assert budget.training == pytest.approx(rows.training / 16)
    assert budget.resident == rows.resident


def test_peak_of_each_phase(tiny):
    needs = plan(options("--model_name_or_path", str(tiny), "--total_episodes", "8"))[3]
    policy, _, value, reward = needs
    resident, training = sum(n.resident for n in needs), policy.training + value.training
    assert memory.peaks(needs) == {
        "sampling": resident + policy.generation,
        "scoring": resident + reward.forward,
        "log-probabilities": resident + policy.forward,
        "training": resident + training,
    }
    assert training < 256 << 20  # so the heap of the process keeps it
    kept = {name: 7 + resident + training for name in memory.peaks(needs)}
    assert memory.peaks(needs, 7.0) == pytest.approx(kept)
    large = [replace(policy, training=1e9)]
    assert memory.peaks(large, 7.0)["sampling"] == 7 + policy.resident + (256 << 20)
    kept_whole = memory.peaks(large, 7.0, checkpointing=False)["sampling"]
    assert kept_whole == 7 + policy.resident + 1e9
    assert memory.process_bytes() > 50e6  # torch alone


def test_turns_are_planned(tiny, capsys):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8", "--max_turns", "3"]
    flags += ["--environment", "kedge.environments.games:GuessNumber", "--response_length", "30"]
    flags += ["--per_device_train_batch_size", "4", "--max_turn_tokens", "10"]
    assert main(["plan", "ppo", *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "3" in next(row for row in rows if row[1:2] == ["turns"])
    calls = next(row for row in rows if "calls" in row)
    assert "16" in calls  # 4 episodes, a reset and 3 turns each


def test_no_kl_no_reference(tiny):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8", "--kl_coef", "0"]
    assert [n.role for n in plan(options(*flags))[3]] == ["policy", "value", "reward"]


@pytest.mark.parametrize(
    ("optim", "size"),
    [("adamw_torch_fused", 8), ("adamw_8bit", 2), ("sgd", 0), ("rmsprop_bnb_8bit", 1)],
)
def test_optimizer_state(optim, size):
    assert memory.optimizer_bytes(optim) == size


def test_sizes_that_do_not_divide_are_found_by_the_plan(tiny, capsys):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8", "--num_mini_batches", "3"]
    assert main(["plan", "ppo", *flags]) == 2
    assert "num_mini_batches=3 does not divide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "roles"),
    [("rloo", ["policy", "reference", "reward"]), ("grpo", ["policy", "reward"])],
)
def test_runs_without_a_value_model_are_planned(tiny, kind, roles):
    made = parse(
        [
            *("--model_name_or_path", str(tiny), "--per_device_train_batch_size", "8"),
            *("--num_generations", "4", "--max_steps", "2", "--reward_model_path", str(tiny)),
        ],
        prog="kedge plan",
        config=CONFIGS[kind],
    )
    _, batches, _, needs = plan(made)
    assert batches.group == 4
    assert [n.role for n in needs] == roles


def test_the_plan_is_printed(tiny, capsys):
    flags = ["--model_name_or_path", str(tiny), "--total_episodes", "8"]
    assert main(["plan", "ppo", "--num_processes", "4", *flags]) == 0
    out = capsys.readouterr().out
    assert "policy" in out
    assert "peak about" in out
    assert main(["plan", "dpo"]) == 2
    assert main(["plan", "ppo", "--num_processes", "none", *flags]) == 2


def test_the_asynchronous_run_is_planned_for_all_its_learners(tiny, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("def f(completions): return [0.0] * len(completions)\n")
    flags = ["--model_name_or_path", str(tiny), "--use_cpu", "--total_episodes", "640"]
    flags += ["--reward_funcs", f"{tmp_path}/rewards.py:f", "--actor_num_gpus_per_node", "2", "1"]
    assert main(["plan", "async-ppo", *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(row for row in rows if "processes" in row)[3] == "3"


@pytest.mark.parametrize(
    ("flags", "size", "note"),
    [
        (["--ray_engine", "embedded"], 4, "all weights in float32, up to 2 copies in host memory"),
        (
            ["--bf16"],
            2,
            "all weights in 16 bits, up to 2 copies in host memory; rollout engines: 3",
        ),
        (
            ["--rollout_engine", "vllm_server", "--max_lag", "4"],
            4,
            "all weights in float32, up to 5 copies in host memory; rollout engines: 3",
        ),
    ],
)
def test_a_weight_sync_is_planned(tiny, flags, size, note):
    with elsewhere():
        given = ["--model_name_or_path", str(tiny), "--vllm_num_engines", "3", "--use_cpu", *flags]
        made = parse(given, prog="kedge plan", config=CONFIGS["async-ppo"])
    policy = replace(memory.frozen("policy", 1000), trained=1000)
    found = sync_row(made.config, policy)
    assert found[1] == human(1000.0 * size)
    assert note in found[2]
    assert "the adapter" in sync_row(made.config, replace(policy, trained=10))[2]
    here = ["--model_name_or_path", str(tiny), "--rollout_engine", "embedded"]
    made = parse(here, prog="kedge plan", config=CONFIGS["async-ppo"])
    assert sync_row(made.config, policy) is None


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
    assert [human(x) for x in (0, 512, 2048, 3 * 2**20, 5 * 2**30)] == [
        "-",
        "512 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert [short(x) for x in (12, 1500, 260_000, 162_322_944)] == [
        "12",
        "1.5k",
        "260.0k",
        "162.3M",
    ]


# -- files beside the package ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["single_gpu", "multi_gpu", "fsdp1", "fsdp2", "cpu_2"]
    + [f"deepspeed_zero{n}" for n in (1, 2, 3)],
)
def test_accelerate_reads_the_launch_files(name):
    from accelerate.commands.config.config_args import load_config_from_file

    file = ROOT / "examples" / "accelerate_configs" / f"{name}.yaml"
    assert load_config_from_file(str(file)).num_processes >= 1
