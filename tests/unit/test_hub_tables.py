"""Tables of completions on the hub, one file each, while training goes on."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from kedge import GRPOConfig, PPOConfig
from kedge.errors import ConfigError, HubError
from kedge.reporting.hub import Hub
from kedge.reporting.trackers import HubTables
from tests.e2e.small import PROMPTS, rows, small


class FakeHub:
    """Keeps what is uploaded; fails for paths that hold a word."""

    made: list[dict[str, Any]]
    files: dict[str, str]
    broken: str | None = None
    closed_for_all = False

    def __init__(self) -> None:
        self.made, self.files = [], {}

    def create_repo(self, **kwargs: Any) -> Any:
        if self.closed_for_all:
            raise RuntimeError("403 from the hub")
        self.made.append(kwargs)
        return SimpleNamespace(repo_id=f"me/{kwargs['repo_id']}")

    def upload_file(self, **kwargs: Any) -> Future[Any]:
        assert kwargs["run_as_future"]
        assert kwargs["repo_type"] == "dataset"
        assert kwargs["repo_id"] == "me/said"
        done: Future[Any] = Future()
        if self.broken and self.broken in kwargs["path_in_repo"]:
            done.set_exception(ConnectionError("offline"))
        else:
            self.files[kwargs["path_in_repo"]] = kwargs["path_or_fileobj"].decode()
            done.set_result(None)
        return done


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    return fake


def tables(**changes: Any) -> HubTables:
    return HubTables(Hub("said", kind="dataset", private=True), **changes)


def test_a_table_is_a_file_with_its_step(hub: FakeHub) -> None:
    tracker = tables(model="me/run")
    tracker.log({"lr": 1.0}, step=12)
    tracker.table("completions", [{"query": "ü", "score": float("nan")}], step=12)
    tracker.table("completions", [], step=13)
    tracker.table("completions", [{"query": "q", "score": 2}], step=14)
    tracker.close()
    found = hub.files.pop("completions/step-000012.jsonl")
    assert json.loads(found) == {"step": 12, "query": "ü", "score": None}
    card = hub.files.pop("README.md")
    assert list(hub.files) == ["completions/step-000014.jsonl"]
    assert 'config_name: "completions"' in card
    assert "https://hf.co/me/run" in card
    assert hub.made == [
        {
            **{"repo_id": "said", "private": True, "exist_ok": True},
            **{"repo_type": "dataset", "token": None},
        }
    ]
    assert tracker.hub.url.endswith("/datasets/me/said")


def test_the_card_is_what_datasets_reads(hub: FakeHub, tmp_path: Path) -> None:
    from datasets import load_dataset

    tracker = tables()
    for name in ("completions", "eval_completions"):
        for step in (1, 2):
            tracker.table(name, [{"query": name, "score": step / 2}] * 3, step=step)
    for path, text in hub.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    found = load_dataset(str(tmp_path), "eval_completions", cache_dir=str(tmp_path / "cache"))
    assert found["train"]["step"] == [1, 1, 1, 2, 2, 2]
    assert set(found["train"]["query"]) == {"eval_completions"}


def test_a_table_that_cannot_be_sent_is_warned_of_once(hub: FakeHub, caplog: Any) -> None:
    tracker, hub.broken = tables(), "step-000001"
    for step in (1, 2):
        tracker.table("completions", [{"query": "q"}], step=step)
    tracker.table("others", [{"query": "q"}], step=1)
    tracker.close()
    (record,) = caplog.records
    assert "datasets/me/said: could not push" in record.getMessage()
    assert "cannot be reached" in record.getMessage()
    assert "completions/step-000002.jsonl" in hub.files


def test_a_run_sends_its_completions(hub: FakeHub, tmp_path: Path) -> None:
    made = small(
        output_dir=str(tmp_path),
        total_episodes=12,
        num_sample_generations=3,
        log_completions_hub_repo="said",
        hub_token="secret",
        eval_dataset=PROMPTS[:4],
        eval_strategy="steps",
    )
    made.train()
    assert hub.made[0]["private"]
    assert hub.made[0]["token"] == "secret"
    names = {f"completions/step-{step:06d}.jsonl" for step in (1, 2, 3)}
    evaluations = {name for name in hub.files if name.startswith("eval_completions/")}
    assert evaluations
    assert set(hub.files) - evaluations == names | {"README.md"}
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["links"]["completions"].endswith("/datasets/me/said")
    assert about["options"]["hub_token"] != "secret"


def test_a_wrong_token_is_found_before_training_and_public_is_said(hub: FakeHub) -> None:
    hub.closed_for_all = True
    made = small(num_sample_generations=1, log_completions_hub_repo="said")
    with pytest.raises(HubError, match="could not push to said"):
        made.train()
    assert rows(made) == []
    hub.closed_for_all = False
    small(num_sample_generations=1, log_completions_hub_repo="said", hub_private_repo=False).train()
    assert hub.made[0]["private"] is False


def test_a_repository_that_would_stay_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs tables of completions"):
        PPOConfig(log_completions_hub_repo="said", num_sample_generations=0, use_cpu=True)
    with pytest.raises(ConfigError, match="not log_completions=False"):
        GRPOConfig(log_completions_hub_repo="said", log_completions=False, use_cpu=True)
