"""What the pages of docs/ show runs, what they list exists, and their tables are the code's."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch
import transformers
from docs.generate import CONFIGS, OF_ALGORITHM, OF_ALL_ALGORITHMS, described, options_page, renewed
from transformers.integrations.integration_utils import rewrite_logs

from kedge import PPOConfig, verifiers
from kedge.algorithms import BUILTIN, reinforce_pp, remax
from kedge.ext.trl.classic.stats_recorder import KEYS
from kedge.loop.metrics import NAMES
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy
from tests.classic_models import gpt2, letters
from tests.e2e.small import VOCAB, length_reward, rows, small
from tests.e2e.test_groups import grpo, rloo
from tests.unit import sandbox_attacks as attacks
from tests.unit.judge_server import Server, reply
from tests.unit.text_toys import EOS, word_tokenizer

ROOT = Path(__file__).parents[2]


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read(page), flags=re.DOTALL)


def the_example(page: str) -> str:
    (found,) = examples(page)
    return found


def run(page: str) -> dict[str, Any]:
    """Run a page's examples one after the other; the names that they define."""
    names: dict[str, Any] = {}
    for example in examples(page):
        exec(example, names)
    return names


def test_the_home_page_runs(demo: Path) -> None:
    source = the_example("index.md").replace("HuggingFaceTB/SmolLM2-135M-Instruct", "runs/demo/sft")
    exec(source.replace("=160", "=32"), {})
    assert (demo / "runs" / "brief" / "model.safetensors").is_file()


def test_the_readme_shows_the_example_of_the_home_page() -> None:
    assert the_example("../README.md") == the_example("index.md")


@pytest.mark.usefixtures("demo")
def test_sampling_ahead() -> None:
    assert run("async.md")["trainer"].state.global_step == 3


def test_options_and_metrics_of_sampling_ahead_exist() -> None:
    named = set(re.findall(r"`((?:rollout/|sampler_correction|max_lag)[a-z_]*)`", read("async.md")))
    known = {f.name for f in fields(PPOConfig)} | set(NAMES)
    assert named - known == set()


def test_two_simulators_agree_and_the_page_has_the_figures_of_the_first() -> None:
    results = ROOT / "benchmarks" / "records"
    recorded = json.loads((results / "dispatch.json").read_text())["simulation"]
    case = ("engines", "sigma", "load", "in_flight", "max_lag")
    first = {tuple(row[name] for name in case): row for row in recorded}
    tables = {
        sigma: read("records/scheduling.md").split(f"a sigma of {sigma}:")[1]
        for sigma in (0.985, 0.5)
    }
    for row in json.loads((results / "dispatch_check.json").read_text()):
        want = first[tuple(row[name] for name in case)]
        (line,) = re.findall(
            rf"^\| {row['engines']} \| {row['max_lag']} \|.*", tables[row["sigma"]], re.M
        )[:1]
        place = 3 + 2 * row["in_flight"] + (row["load"] > 0)
        for name, cell in (("trained", place), ("trained_mask_old", place + 2 * row["in_flight"])):
            assert row[name] == pytest.approx(want[name], abs=0.03)
            assert line.split("|")[cell].strip() == f"{want[name]:.2f}"


def test_evaluation_logs_what_its_page_lists(demo: Path) -> None:
    rows = [json.dumps({"prompt": f"w{i} w4"}) + "\n" for i in range(12, 17)]
    (demo / "runs" / "demo" / "data" / "held_out.jsonl").write_text("".join(rows))
    trainer = run("evaluation.md")["trainer"]
    logged = [row for row in trainer.state.log_history if "eval_accuracy" in row]
    assert [row["step"] for row in logged] == [0, 4, 8]
    page = read("evaluation.md")
    listed = set(re.findall(r"^\| `(eval_[^`.]*)`", page, flags=re.MULTILINE))
    listed |= set(re.findall(r"`(eval_completions/[a-z_]+)`", page))
    known = set().union(*logged) | {"eval_pass@k"}
    assert listed - known == set()
    assert [*trainer.state.initial_scores] == ["eval_"]


@pytest.mark.usefixtures("curves")
def test_trackers(demo: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = demo / "runs" / "tracked"
    run("trackers.md")
    for left in ("metrics.jsonl", "run.json", "completions", "tokens", "curves.png", "README.md"):
        assert (folder / left).exists(), left
    assert list(folder.rglob("events*"))
    card = (folder / "README.md").read_text()
    for title in ("Results", "Curves", "Command", "Hyperparameters", "Versions", "Citation"):
        assert f"## {title}" in card


@pytest.mark.parametrize("method", ["ppo", "rloo"])
def test_runs_have_what_openrlbenchmark_filters_by(method: str, tmp_path: Path) -> None:
    """Through the renaming of transformers' callback for wandb, which adds ``train/``."""
    (filters,) = re.findall(r"--filters '\?(.*)'", read("trackers.md"))
    query = parse_qs(filters)
    wanted = {*query["metrics"], *query["xaxis"]}
    if method == "rloo":
        wanted -= {"train/loss/value_avg", "train/val/clipfrac_avg"}
    trainer = {"ppo": small, "rloo": rloo}[method](output_dir=str(tmp_path))
    trainer.train()
    row = next(row for row in trainer.state.log_history if "objective/scores" in row)
    assert wanted - set(rewrite_logs(row)) == set()
    assert {*query["ceik"], *query["cen"]} <= trainer.args.to_sanitized_dict().keys()


@pytest.mark.parametrize(
    ("page", "number"),
    [("rewards.md", n) for n in range(5)] + [("code-rewards.md", n) for n in range(2)],
)
def test_rewards(page: str, number: int) -> None:
    source = examples(page)[number]
    if "Sandbox" in source and attacks.WHY_NOT:
        pytest.skip(attacks.WHY_NOT)
    exec(source, {})


def test_every_verifier_is_on_the_page() -> None:
    helpers = {"Outcome", "known_verifiers", "Verifier", "ByColumn", "text_of"}
    page = read("rewards.md") + read("code-rewards.md")
    missing = [name for name in verifiers.__all__ if name not in page and name not in helpers]
    assert missing == []


def test_the_table_counts_the_attacks() -> None:
    page = read("code-rewards.md")
    counts = re.findall(r"^\| ([\w ]+):.*?\| (\d+) \|", page, flags=re.MULTILINE)
    assert dict(counts) == {
        "files": str(len(attacks.FILES)),
        "processes": str(len(attacks.PROCESSES)),
        "network": str(len(attacks.NETWORK)),
        "the system": str(len(attacks.PRIVILEGED)),
        "verdicts": str(len(attacks.SCORES)),
        "staying": str(len(attacks.STAYING)),
        "bombs": str(len(attacks.BOMBS)),
    }


def test_a_callback_and_an_engine_of_ones_own() -> None:
    names = run("own-algorithm.md")
    policy = tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=EOS)
    engine = names["Counted"](EmbeddedEngine(policy, pad_id=EOS))
    stop = names["StopAtKL"](limit=-1.0)
    trainer = small(model=policy, rollout_engine=engine, callbacks=[stop], total_episodes=16)
    trainer.train()
    (row,) = rows(trainer)  # of four
    assert engine.tokens == row["completions/mean_length"] * 4


def test_an_algorithm_of_ones_own_trains() -> None:
    names = run("own-algorithm.md")
    trainer = small(
        algorithm=names["reinforce"](),
        num_generations=4,
        per_device_train_batch_size=16,
        total_episodes=16 * 12,
        reward_model=None,
        reward_funcs=length_reward,
        learning_rate=1e-2,
        kl_coef=0.01,
    )
    trainer.train()
    assert trainer.value_model is None
    first, last = rows(trainer)[:2], rows(trainer)[-2:]
    gain = sum(r["objective/scores"] for r in last) - sum(r["objective/scores"] for r in first)
    assert gain > 0.5


def test_an_algorithm_of_ones_own_takes_transforms() -> None:
    algorithm = run("own-algorithm.md")["careful_reinforce"]()
    trainer = small(
        algorithm=algorithm,
        num_generations=2,
        reward_model=None,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        response_length=8,
        preflight=False,
    )
    trainer.train()
    row = rows(trainer)[0]
    assert (algorithm.name, algorithm.min_group) == ("reinforce", 2)
    assert row["objective/scores"] == 1.0  # logged without the penalty
    # The lengths of one of two groups differ, so the penalty makes it one that trains.
    assert (row["objective/uniform_groups"], row["rollout/untrained_rows"]) == (0.5, 2.0)


def test_judging() -> None:
    names = run("judging.md")
    assert (names["low"], names["high"]) == (pytest.approx(0.207, abs=1e-3), 1.0)  # of one prompt


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny_policy(vocab_size=32).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"w{i} w4", "completion": "w5 w6"} for i in range(3, 10)]
    (tmp_path / "data").mkdir()
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "data" / "validation.jsonl").write_text(text)
    return tmp_path


def run_script(name: str, *flags: str) -> None:
    script = runpy.run_path(str(ROOT / "examples/scripts/evals" / name))
    script["main"](list(flags))


def test_the_scripts_of_judging(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(lambda number, body: reply("Winner: A"))
    model, data = str(place / "model"), str(place / "data")
    try:
        run_script(
            "generate_tldr.py",
            *("--model_name_or_path", model, "--dataset_name", data, "--n", "5"),
            *("--max_new_tokens", "4", "--output_path", str(place / "tldr.csv")),
            *("--judge_url", server.url, "--judge_model", "j"),
        )
        said = capsys.readouterr().out
        counts = dict(re.findall(r"^(response[01])    (\d+)$", said, flags=re.MULTILINE))
        assert sum(map(int, counts.values())) == 5
        lines = said.splitlines()
        assert lines[lines.index("preferred") + 1].startswith("response")
        header, *lines = (place / "tldr.csv").read_text().splitlines()
        assert "preferred" in header
        assert len(lines) == 5
        run_script(
            "judge_tldr.py",
            *("--model_name_or_path", model, "--dataset_name", data, "--max_new_tokens", "4"),
            *("--judge_url", server.url, "--judge_model", "j", "--num_examples", "3"),
            *("--output_dir", str(place / "out"), "--concurrency", "2", "--engine", "embedded"),
        )
        summary = json.loads((place / "out" / "summary.json").read_text())
        assert summary["wins"] + summary["losses"] == 3
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"Model win rate: {100 * summary['win_rate']:.2f}%"
    finally:
        server.close()


def prepare_classic(folder: Path) -> None:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    tokenizer = letters(28)
    gpt2().save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    torch.manual_seed(0)
    judge = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=28,
            dim=16,
            n_layers=1,
            n_heads=2,
            hidden_dim=32,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
            pad_token_id=1,
        )
    )
    judge.save_pretrained(folder / "lvwerra" / "distilbert-imdb")
    tokenizer.save_pretrained(folder / "lvwerra" / "distilbert-imdb")
    data = folder / "HuggingFaceH4" / "cherry_picked_prompts"
    data.mkdir(parents=True)
    rows = [{"prompt": f"{a} b c", "meta": 1, "completion": "x"} for a in "abcdefghijklmnop"]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.filterwarnings("ignore:the KL to the reference")
@pytest.mark.filterwarnings("ignore:no dataset was given")
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_the_classic_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    prepare_classic(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = run("classic.md")
    (override,) = examples("reference/classic.md")
    exec(override, names)
    assert Path("my_ppo_model/value_head.safetensors").exists()
    assert names["ppo_trainer"].current_step == 3


def test_every_statistic_of_the_classic_api_is_explained() -> None:
    table = read("reference/classic.md").partition("## Statistics")[2]
    for key in KEYS:
        prefix, name = key.rsplit("/", 1)
        named = key in table or (prefix.startswith(("time", "tokens")) and _part(name) in table)
        assert named, key


def _part(name: str) -> str:
    return "tokens/{queries,responses}" if name.startswith(("queries", "responses")) else name


ALGORITHMS = Path(__file__).parents[2] / "docs" / "algorithms"


@pytest.mark.parametrize("name", BUILTIN)
def test_the_tables_are_those_of_the_code(name: str) -> None:
    page = (ALGORITHMS / f"{name}.md").read_text(encoding="utf-8")
    assert renewed(page, name) == page, "python docs/generate.py"
    assert all(described(BUILTIN[name]).values())


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.usefixtures("demo")
def test_the_example_runs(name: str) -> None:
    page = (ALGORITHMS / f"{name}.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["trainer"].state.global_step == 1
    assert logged(names["trainer"]) <= {*OF_ALL_ALGORITHMS, *OF_ALGORITHM[name], *OF_GROUPS}


OF_GROUPS = {"objective/uniform_groups"}  # logged by every rule that gets several responses
RUNS: dict[str, Callable[[], Any]] = {
    "ppo": small,
    "rloo": lambda: rloo(mask_truncated_completions=True),
    "reinforce_pp": lambda: rloo(algorithm=reinforce_pp(baseline=True, beta=0.1)),
    "grpo": lambda: grpo(
        beta=0.1, kl_coef=0.1, dynamic_sampling=1, mask_truncated_completions=True
    ),
    "remax": lambda: small(algorithm=remax()),
}


@pytest.mark.parametrize("name", BUILTIN)
def test_a_run_logs_every_metric_of_the_page(name: str) -> None:
    trainer = RUNS[name]()
    trainer.train()
    assert logged(trainer) == {*OF_ALL_ALGORITHMS, *OF_ALGORITHM[name]}


def logged(trainer: Any) -> set[str]:
    """Names that say something of learning, of the last update."""
    shared = {
        "rollout/lag",
        "rollout/lag_max",
        "rollout/dropped_rows",
        "rollout/logprob_gap",
        "rollout/stale_gap",
    }
    shared |= {"rollout/tokens", "clip_ratio/region_mean"}  # the last is TRL's name of another
    kinds = ("objective/", "clip_ratio/", "policy/", "loss/", "val/", "rollout/")
    return {name for name in rows(trainer)[-1] if name.startswith(kinds)} - shared


def test_the_overview_names_every_page() -> None:
    overview = (ALGORITHMS / "index.md").read_text(encoding="utf-8")
    assert all(f"({name}.md)" in overview for name in BUILTIN)


OPTIONS_PAGES = Path(__file__).parents[2] / "docs" / "reference"


def skip_if_made_with_another_release():
    page = (OPTIONS_PAGES / "options.md").read_text()
    made_with = re.search(r"here with transformers (\S+)\.", page)[1]
    if made_with != transformers.__version__:
        pytest.skip(f"the page was made with transformers {made_with}")


@pytest.mark.parametrize("column", CONFIGS)
def test_every_name_has_one_cell_in_the_column_of_its_config(column):
    place = 2 + list(CONFIGS).index(column)
    rows = [line.split(" | ") for line in options_page().splitlines() if line.startswith("| `")]
    names = [row[0].strip("|` ") for row in rows if row[place - 1] != "-"]
    expected = [f.name for f in fields(CONFIGS[column])]
    assert sorted(names) == sorted(expected)


def test_what_learning_depends_on_comes_first():
    page = options_page()
    names = ["learning_rate", "response_length", "ray_engine", "logging_dir"]
    found = [page.index(f"| `{name}` |") for name in names]
    assert found[0] < found[1] < found[2]
    assert found[1] < found[3]


def test_the_page_is_current():
    written = (OPTIONS_PAGES / "options.md").read_text()
    skip_if_made_with_another_release()
    assert written == options_page(), "python docs/generate.py"
