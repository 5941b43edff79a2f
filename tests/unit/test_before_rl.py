"""``kedge sft`` and ``kedge reward``: details that PPO relies on, and models that RL can use."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from kedge.cli.main import main
from kedge.ext.before_rl.trl_trainers import init_head, shift_scores, train_reward
from kedge.models.packing import JoinedInput
from kedge.models.score_head import SHIFT
from kedge.records.types import PromptBatch, Rollout
from kedge.rewards import RewardModel
from kedge.testing import tiny_policy, tiny_reward_model

from .advantage_inputs import rollout
from .text_toys import EOS, word_tokenizer

pytest.importorskip("trl", reason="TRL is not installed (the extra sft)")
pytestmark = [  # TRL's defaults use names that transformers will drop
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]
SMALL = [
    *("--use_cpu", "--max_steps", "3", "--per_device_train_batch_size", "4", "--disable_tqdm"),
    *("--learning_rate", "1e-2", "--save_strategy", "no"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny_policy(vocab_size=32).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    tell = [{"prompt": f"w{i} w4", "completion": " w5 w6"} for i in range(7, 27)]
    prefer = [
        {"prompt": f"w{i} w4", "chosen": " w5 w6 w7", "rejected": " w8"} for i in range(9, 29)
    ]
    for name, rows in (("sft", tell), ("pairs", prefer)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def flags(place: Path, data: str, out: str, *more: str) -> list[str]:
    whole = ["--num_held_out", "0"] if out == "reward" else []
    return [
        *("--model_name_or_path", str(place / "model"), "--output_dir", str(place / out)),
        *("--dataset_name", str(place / f"{data}.jsonl"), *SMALL, *whole, *more),
    ]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The rows that TRL's trainers train on, of each run."""
    from transformers import Trainer

    runs, train = [], Trainer.train

    def watched(self: Trainer, *args: object, **kwargs: object) -> object:
        runs.append(list(self.train_dataset))  # type: ignore[arg-type]
        return train(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train", watched)
    return runs


@pytest.mark.slow
def test_a_supervised_model_learns_completions_and_to_stop(place: Path, trained: list[Any]) -> None:
    assert main(["sft", *flags(place, "sft", "sft", "--max_steps", "30")]) == 0
    row = trained[0][0]
    assert row["input_ids"][-1] == 0  # <eos> ends every completion
    assert row["labels"] == [-100, -100, *row["input_ids"][2:]]  # it is learned, the prompt is not
    model = AutoModelForCausalLM.from_pretrained(place / "sft")
    tokenizer = word_tokenizer()
    ids = tokenizer("w9 w4", return_tensors="pt")["input_ids"]
    said = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1)[0, 2:]
    assert said.tolist() == tokenizer("w5 w6")["input_ids"] + [0]


@pytest.mark.slow
def test_references_score_nothing_on_average_wherever_the_model_is_loaded(place: Path) -> None:
    assert main(["reward", *flags(place, "pairs", "reward")]) == 0
    from kedge.ext.judge.command import load_scores

    score = load_scores(str(place / "reward"))
    prompts = [f"w{i} w4" for i in range(9, 29)]
    chosen = score(prompts, [" w5 w6 w7"] * 20)
    assert abs(sum(chosen) / 20) < 1e-5
    assert sum(score(prompts, [" w8"] * 20)) < 0  # learned: the other is worse
    out = place / "ppo"
    code = main(
        [
            *("ppo", "--model_name_or_path", str(place / "model"), "--output_dir", str(out)),
            *("--reward_model_path", str(place / "reward"), "--use_cpu", "--disable_tqdm"),
            *("--dataset_name", str(place / "sft.jsonl"), "--total_episodes", "4"),
            *(
                "--per_device_train_batch_size",
                "4",
                "--response_length",
                "3",
                "--stop_token",
                "eos",
            ),
        ]
    )
    assert code == 0


@pytest.mark.slow
def test_an_adapter_keeps_the_shift_of_its_scores(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kedge.ext.judge.command import load_scores
    from kedge.models.peft import with_adapter
    from kedge.models.shared_base import AdapterRewardModel, value_adapter
    from kedge.models.value_head import load_value
    from kedge.rewards.build import load_model

    assert main(["reward", *flags(place, "pairs", "reward", "--use_peft", "--lora_r", "4")]) == 0
    reward = str(place / "reward")
    chosen = load_scores(reward)([f"w{i} w4" for i in range(9, 29)], [" w5 w6 w7"] * 20)
    assert abs(sum(chosen) / 20) < 1e-5

    want = RewardModel(load_model(reward)).score(batch()).scores
    assert float(want.abs().min()) > 1e-3
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    base = AutoModelForCausalLM.from_pretrained(place / "model", dtype="float32")
    policy = with_adapter(base, lora)
    shared = AdapterRewardModel(policy, reward)
    assert torch.allclose(RewardModel(shared).score(batch()).scores, want, atol=1e-6)
    value = value_adapter(policy, reward)
    row, states = packed([3, 4, 5]), torch.tensor([2])
    assert torch.allclose(value(row, states), load_value(reward)(row, states), atol=1e-6)
    value.save(place / "value")
    saved = load_value(str(place / "value"))
    assert torch.allclose(saved(row, states), value(row, states), atol=1e-6)

    capsys.readouterr()
    plan = ["plan", "ppo", "--model_name_or_path", str(place / "model"), "--use_cpu"]
    data = ["--dataset_name", str(place / "sft.jsonl"), "--output_dir", str(place / "out")]
    assert main([*plan, *data, "--reward_model_path", reward]) == 0


@pytest.mark.slow
def test_a_judge_reads_what_the_reward_model_was_trained_to_read(
    place: Path, trained: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.ext.judge.command import load_scores

    assert main(["reward", *flags(place, "pairs", "reward")]) == 0
    read: list[list[int]] = []
    scores = RewardModel._scores

    def watched(self: RewardModel, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        read.extend(row[:n] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True))
        return scores(self, ids, lengths)

    monkeypatch.setattr(RewardModel, "_scores", watched)
    rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    load_scores(str(place / "reward"))(*([row[n] for row in rows] for n in ("prompt", "chosen")))
    assert sorted(read) == sorted(row["chosen_ids"] for row in trained[0])


def test_a_value_model_made_of_a_reward_model_starts_from_its_scores(tmp_path: Path) -> None:
    from kedge.models.value_head import load_value

    model = tiny_reward_model(vocab_size=32)
    setattr(model.config, SHIFT, 2.5)
    model.save_pretrained(tmp_path / "reward")
    row, states = packed([3, 4, 5]), torch.tensor([2])
    value = load_value(str(tmp_path / "reward"))
    score = RewardModel(model).score_texts(["w1"], word_tokenizer()).item()
    ended = packed([*word_tokenizer()("w1")["input_ids"], word_tokenizer().eos_token_id])
    last = ended.lengths - 1
    assert value(ended, last).item() == pytest.approx(score, abs=1e-6)
    value.save(tmp_path / "value")
    again = load_value(str(tmp_path / "value"))
    assert torch.equal(again(row, states), value(row, states))


def packed(tokens: list[int]) -> JoinedInput:
    """One row without padding."""
    lengths = torch.tensor([len(tokens)])
    return JoinedInput(ids=torch.tensor([tokens]), lengths=lengths, prompt_lengths=lengths)


def batch() -> Rollout:
    ids = torch.tensor([[3, 4], [5, 6]])
    real, row = torch.ones(2, 2, dtype=torch.bool), torch.arange(2)
    prompts = PromptBatch(ids=ids, mask=real, group=row, row=row)
    return rollout(real, prompts=prompts, ids=ids)


def test_the_head_starts_with_the_deviation_of_the_source() -> None:
    model = tiny_reward_model(vocab_size=32, hidden_size=256)
    init_head(model, seed=1)
    weight = model.score.weight.detach()
    assert float(weight.std()) == pytest.approx(1 / math.sqrt(257), rel=0.1)
    init_head(model, seed=1)
    assert torch.equal(model.score.weight, weight)


def test_the_shift_is_in_the_configuration_and_starts_anew(tmp_path: Path) -> None:
    model, tokenizer = tiny_reward_model(vocab_size=32), word_tokenizer()
    texts = ["w3 w4 w5", "w6", "w7 w8"]
    found = shift_scores(model, tokenizer, texts)
    with torch.no_grad():
        end = tokenizer.eos_token_id  # as the rows of preferences end
        rows = [torch.tensor([[*tokenizer(text)["input_ids"], end]]) for text in texts]
        raw = [float(model.score(model.model(row).last_hidden_state)[0, -1]) for row in rows]
    assert found == pytest.approx(-sum(raw) / 3, abs=1e-6)
    assert shift_scores(model, tokenizer, texts) == pytest.approx(found, abs=1e-6)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert getattr(again.config, SHIFT) == found


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sft", "--learnin_rate", "1"], "the nearest is --learning_rate"),
        (["sft", "--output_dir", "x"], "--model_name_or_path is required"),
        (
            ["reward", "--model_name_or_path", "m", "--output_dir", "x"],
            "--dataset_name is required",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert said in capsys.readouterr().err


def test_missing_columns_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", *flags(place, "pairs", "out")]) == 2
    assert "columns prompt and completion" in capsys.readouterr().err
    assert main(["reward", *flags(place, "sft", "out")]) == 2
    assert "chosen, rejected is missing" in capsys.readouterr().err
    assert main(["reward", *flags(place, "pairs", "out", "--reference_column", "gold")]) == 2
    assert "--reference_column gold does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reward_model_is_checked_on_held_out_pairs_by_kind(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coin, rows = random.Random(0), []
    for i in range(600):
        chosen, rejected, kind = " w5 w6 w7", " w8 w6 w7", "word"
        if i % 2:  # nobody can tell which of these is better
            chosen, rejected = coin.sample([" w5 w21 w7", " w5 w22 w7"], 2)
            kind = "coin"
        prompt = f"w{9 + i % 12} w4"
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "kind": kind})
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = ["--max_steps", "40", "--num_held_out", "500"]
    assert main(["reward", *flags(place, "pairs", "reward", *more)]) == 0
    check = json.loads((place / "reward" / "held_out.json").read_text())
    assert check["pairs"] == 60  # a tenth, which training does not see
    assert check["kinds"]["word"]["accuracy"] == 1.0
    assert check["blind"] == ["coin"]
    printed = capsys.readouterr().out
    assert re.search(r"coin +30 pairs +\d+\.\d%  not better than chance", printed)
    value = f"--non_eos_penalty --penalty_reward_value {math.floor(check['lowest_score'])}"
    assert (value in printed) == (check["unfinished_higher"] > 0.1)


CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}w30 {{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ {'user': 'w3 ', 'tool': 'w31 ', 'assistant': 'w4 '}[m.role] }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}w29 {{ call.function.name }}{% endfor %}{{ ' <eos>' }}"
    "{% endgeneration %} w28 {% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)
MARKS = re.compile(r"\{% (end)?generation %\}")


def chats(place: Path, template: str) -> list[str]:
    """Flags for conversations with a tool call; the tokenizer gets the template."""
    tokenizer = word_tokenizer(chat_template=template)
    tokenizer.save_pretrained(place / "model")
    call = {"type": "function", "function": {"name": "w20", "arguments": {"a": 1}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"w{i} w9"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "w10"},
                {"role": "assistant", "content": "w11 w12"},
            ],
            "tools": [{"type": "function", "function": {"name": "w20"}}],
        }
        for i in range(13, 19)
    ]
    (place / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return flags(place, "chats", "out", "--assistant_only_loss", "True")


@pytest.mark.slow
def test_assistant_tokens_are_found_without_marks(place: Path, trained: list[Any]) -> None:
    """All tokens and labels are those of the same template with marks, and bf16 runs on a CPU."""
    for template in (CHAT_TEMPLATE, MARKS.sub("", CHAT_TEMPLATE)):
        words = [*chats(place, template), "--bf16", "True", "--max_steps", "1"]
        words.remove("--use_cpu")
        assert main(["sft", *words]) == 0
    marked, found = ([(row["input_ids"], row["labels"]) for row in rows] for rows in trained)
    assert found == marked
    ids, labels = found[0]
    assert ids[:2] == [30, 20]  # the template shows the tool
    learned = [i for i in labels if i != -100]
    assert learned == [29, 20, 0, 11, 12, 0]  # both turns with their ends, nothing in between


def test_a_template_in_which_turns_cannot_be_found_is_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forgets = MARKS.sub("", CHAT_TEMPLATE).replace(
        "{{ m.content or '' }}", "{{ (m.content or '') if loop.last else 'w27' }}"
    )
    assert main(["sft", *chats(place, forgets)]) == 2
    said = capsys.readouterr().err
    assert "message 1 of a conversation cannot be found" in said
    assert str(place / "model") in said
    assert "{% generation %}" in said
    assert "--chat_template_path FILE.jinja" in said


# -- padding, dropout and further columns ---------------------------------------------------------

START = "w9 w10 w11 w12"
ROWS = [
    {"prompt": START, "chosen": " w5" * (i % 3 + 1), "rejected": " w8" * (i % 4)} for i in range(8)
]


def train_steps(
    folder: Path, model: Any, rows: Any = ROWS, *, tokenizer: Any = None, peft: Any = None, **o: Any
) -> Any:
    """The trainer after three steps."""
    from trl.trainer.reward_config import RewardConfig

    common = {"use_cpu": True, "report_to": "none", "bf16": False, "disable_tqdm": True}
    steps = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    batch = {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    config = RewardConfig(output_dir=str(folder), **(common | steps | batch | every | o))
    data = Dataset.from_list(rows)
    tokens = tokenizer or word_tokenizer()
    return train_reward(model.eval(), tokens, config, data, data.select(range(4)), peft=peft)


def losses(trainer: Any) -> list[float]:
    logs = trainer.state.log_history
    return [row[name] for row in logs for name in ("loss", "eval_loss") if name in row]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_with_the_end_token_changes_nothing(family: str, tmp_path: Path) -> None:
    expected = losses(train_steps(tmp_path / "apart", tiny_reward_model(family, vocab_size=32)))
    assert expected[-1] < expected[0]
    for name in ("eos", "none"):
        tokenizer = word_tokenizer(pad=False)
        if name == "eos":
            tokenizer.pad_token = tokenizer.eos_token
        found = tiny_reward_model(family, vocab_size=32)
        trainer = train_steps(tmp_path / name, found, tokenizer=tokenizer)
        assert losses(trainer) == pytest.approx(expected, rel=1e-4)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected[-1], rel=1e-4)
        assert trainer.data_collator.pad_token_id == found.config.pad_token_id == EOS
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-2"):
            assert json.loads((folder / "config.json").read_text())["pad_token_id"] == EOS
            saved = json.loads((folder / "tokenizer_config.json").read_text())
            assert saved["pad_token"] == "<eos>"


@pytest.mark.parametrize("ids", [3, []])
def test_a_column_may_be_named_as_if_it_held_tokens(ids: Any, tmp_path: Path) -> None:
    rows = [row | {"annotator_ids": ids} for row in ROWS]
    expected = train_steps(tmp_path / "without", tiny_reward_model(vocab_size=32))
    found = train_steps(tmp_path / "with", tiny_reward_model(vocab_size=32), rows)
    assert losses(found) == losses(expected)
