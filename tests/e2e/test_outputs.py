"""What a run writes, and what it must not: secrets, other models, the user's own files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.ext.report.report import gather
from kedge.records.errors import ConfigError
from kedge.redaction import redact, redact_words
from kedge.reporting import log
from tests.e2e.small import small
from tests.environments.toys import Echo, played

CANARIES = {
    "api_key": "CANARY-1",
    "openai_key": "CANARY-2",
    "pwd": "CANARY-3",
    "headers": {"Authorization": "Bearer CANARY-4-word"},
    "address": "https://CANARY-5@host/?sig=CANARY-6",
    "service": "sk-CANARY-7-0123456789",
}


class Keyed(Echo):
    """An environment with a service behind it."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_no_file_of_a_run_holds_a_key_of_an_environment(form: Any, tmp_path: Path) -> None:
    options = {"environment": Keyed, "environment_kwargs": form(CANARIES)}
    options |= {"save_strategy": "steps"}
    played(output_dir=str(tmp_path), save_steps=1, report_to="none", **options).train()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert [file.name for file in files if b"CANARY" in file.read_bytes()] == []


def test_a_checkpoint_notices_another_key(tmp_path: Path, caplog: Any, logged: Any) -> None:
    options = {"environment": Keyed, "save_strategy": "steps", "output_dir": str(tmp_path)}
    played(environment_kwargs=CANARIES, save_steps=1, **options).train()
    again = played(environment_kwargs=CANARIES, save_steps=1, **options)
    again.train(resume_from_checkpoint=True)
    assert "other settings" not in caplog.text  # the same digests
    other = played(environment_kwargs=CANARIES | {"pwd": "CANARY-8"}, **options)
    with logged(r"environment_kwargs.pwd: \"sha256:\w+\" in the check"):
        other.train(resume_from_checkpoint=True)


def test_secrets_of_a_command_line() -> None:
    words = ["--environment_kwargs", json.dumps(CANARIES), "--rollout_engine", "http://CANARY@host"]
    assert "CANARY" not in " ".join(redact_words(words))
    plain = {"stop_token": "eos", "sft_messages_key": "messages", "max_tokens": 3}
    assert redact(plain) == plain


MODEL_FILE = "model.safetensors"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A saved policy."""
    trainer = small(output_dir=str(tmp_path / "policy"))
    trainer.save_model()
    return tmp_path / "policy"


def test_weights_have_the_mode_of_other_files(policy: Path) -> None:
    """That of the umask; 0600 before."""
    modes = [(policy / name).stat().st_mode & 0o777 for name in (MODEL_FILE, "config.json")]
    assert modes[0] == modes[1]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # of transformers
@pytest.mark.parametrize("command", ["value", "reward"])
def test_a_scalar_model_does_not_replace_a_policy(
    command: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "w3", "completion": f"w{i}", "score": i} for i in range(4, 12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = (policy / MODEL_FILE).read_bytes()
    words = {
        "value": ["fit", str(data), "--model", str(policy)],
        "reward": ["--model_name_or_path", str(policy), "--dataset_name", str(data)],
    }[command]
    assert main([command, *words, "--output_dir", str(policy)]) == 2
    error = capsys.readouterr().err
    assert "holds another model (GPTNeoXForCausalLM), which would be overwritten" in error
    assert (policy / MODEL_FILE).read_bytes() == before


def test_a_policy_does_not_replace_a_reward_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    with pytest.raises(ConfigError, match="holds another model"):
        small(output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["value", "fit", "x.jsonl", "--model", "m", "--output_dir", "FILE"], "is a file"),
        (["value", "check", "x.jsonl", "--value_model", "m", "--plot", "x.xyz"], "must end in"),
        (["value", "check", "x.jsonl", "--value_model", "m", "--plot", "FILE/x.png"], "is a file"),
        (["compare", "nothing", "--output", "x.xyz"], "must end in .png, .svg, .pdf"),
    ],
)
def test_outputs_are_checked_first(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert main([word.replace("FILE", str(file)) for word in words]) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_picture_that_fails_does_not_cost_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ImportError(
            "numpy.core.multiarray failed to import"
        )  # as a matplotlib of another ABI

    monkeypatch.setattr(log, "draw_curves", broken)
    trainer = small(output_dir=str(tmp_path))
    trainer.train()
    trainer.save_model()
    assert (tmp_path / MODEL_FILE).is_file()
    assert caplog.text.count("cannot write curves") == 1


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    mine, target = tmp_path / "prompts" / "step-000001.jsonl", tmp_path / "target"
    mine.parent.mkdir()
    mine.write_text("{}\n")
    target.write_text("mine")
    for name in ("metrics.part", "run.part"):
        (tmp_path / name).symlink_to(target)
    small(output_dir=str(tmp_path)).train()
    assert mine.read_text() == "{}\n"
    assert target.read_text() == "mine"
    assert (tmp_path / "metrics.jsonl").is_file()


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "_kedge.lock").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be written to"):
        small(output_dir=str(tmp_path / "run")).train()
    assert target.read_text() == "mine"


def test_a_screen_that_is_gone_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    trainer = small(output_dir=str(tmp_path))
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_run_that_has_only_evaluated_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_objective/scores": 0.5}\n')
    assert gather(tmp_path)["series"]["eval_objective/scores"]["y"] == [0.5]
