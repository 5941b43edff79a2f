"""Pushes and tables ask the hub for the right things, and failures say what to do."""

import json
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import TrainingArguments

from kedge.records.errors import HubError
from kedge.reporting.hub import Hub, PushOnSave, build_hub
from kedge.reporting.run_info import model_card
from kedge.trainers.hf_callbacks import Callbacks
from tests.e2e.small import small


class FakeApi:
    """Keeps what is asked of the hub; fails at one call, or for files that hold a word."""

    def __init__(self, error=None, on="create_repo"):
        self.calls, self.error, self.on = [], error, on

    def _call(self, name, kwargs):
        self.calls.append((name, kwargs))
        if self.error is not None and name == self.on:
            raise self.error

    def create_repo(self, **kwargs):
        self._call("create_repo", kwargs)
        return SimpleNamespace(repo_id=f"me/{kwargs['repo_id']}")

    def create_branch(self, **kwargs):
        self._call("create_branch", kwargs)

    def upload_folder(self, **kwargs):
        self._call("upload_folder", kwargs)
        return SimpleNamespace(commit_url="https://hub/commit/1")

    @property
    def made(self):
        """The repositories."""
        return [kwargs for name, kwargs in self.calls if name == "create_repo"]


def uploads(api):
    return [kwargs for name, kwargs in api.calls if name == "upload_folder"]


def test_a_push_creates_repository_and_branch_once_and_uploads(tmp_path):
    api = FakeApi()
    hub = Hub("run", token="secret", private=True, revision="beta", api=api)
    assert hub.push(tmp_path, message="End of training").commit_url == "https://hub/commit/1"
    hub.push(tmp_path, message="again", blocking=False)
    names = [name for name, _ in api.calls]
    assert names == ["create_repo", "create_branch", "upload_folder", "upload_folder"]
    created = api.calls[0][1]
    assert created == {"repo_id": "run", "private": True, "exist_ok": True, "token": "secret"}
    assert api.calls[1][1]["branch"] == "beta"
    first, second = uploads(api)
    want = {"repo_id": "me/run", "folder_path": str(tmp_path), "commit_message": "End of training"}
    want |= {"token": "secret", "revision": "beta", "run_as_future": False}
    assert {name: first[name] for name in want} == want
    ignored = first["ignore_patterns"]
    assert {"checkpoint-*", "*completions*/*", "tokens*/*", ".*"} <= set(ignored)
    assert second["run_as_future"]


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("end", []),
        ("every_save", [None]),
        ("checkpoint", [None, "last-checkpoint"]),
        ("all_checkpoints", [None, "checkpoint-12"]),
    ],
)
def test_hub_strategy(tmp_path, strategy, places):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, hub_strategy=strategy)
    other, api = FakeApi(), FakeApi()
    for rank, each in ((1, other), (0, api)):
        callbacks = Callbacks(args, [PushOnSave(Hub("run", api=each))], rank=rank)
        callbacks.begin(max_steps=12, epochs=1, batch_size=1)
        assert [name for name, _ in each.calls] == ["create_repo"] * (rank == 0)
        callbacks.state.global_step = 12
        callbacks.fire("on_save")
    assert other.calls == []  # other ranks push nothing
    assert [u["path_in_repo"] for u in uploads(api)] == places
    for upload in uploads(api):
        assert upload["commit_message"] == "Training in progress, checkpoint 12"
        assert upload["folder_path"] == str(tmp_path / "checkpoint-12")
        model_alone = upload["path_in_repo"] is None
        assert ("state-*" in upload["ignore_patterns"]) == model_alone
        stale = upload["path_in_repo"] == "last-checkpoint"
        assert upload["delete_patterns"] == ("*" if stale else None)


def http_error(status):
    error = RuntimeError(f"{status} from the hub")
    error.response = SimpleNamespace(status_code=status)
    return error


class TransportError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (http_error(401), "log in with `hf auth login`"),
        (http_error(403), "set hub_token to a token with write access"),
        (http_error(404), "check hub_model_id"),
        (http_error(500), "upload them later"),
        (ConnectionError("offline mode is enabled"), "hub cannot be reached"),
        (TransportError("no name"), "hub cannot be reached"),
    ],
)
def test_one_clear_error(tmp_path, error, advice):
    with pytest.raises(HubError, match="could not push to run on the hub") as e:
        Hub("run", api=FakeApi(error)).push(tmp_path, message="m")
    assert advice in str(e.value)
    assert e.value.__cause__ is error


def test_offline_the_real_client_gives_that_error_too(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="hub cannot be reached"):
        Hub("run", token="hf_x").create()


def test_a_failing_push_does_not_end_training_but_is_told(tmp_path, logged):
    hub = Hub("run", api=FakeApi(http_error(500), on="upload_folder"))
    with logged("checkpoint-3 was saved but not pushed"):
        hub.push_checkpoint(tmp_path / "checkpoint-3", "every_save")


# --------------------------------------------------------------------------- model card


def card(about=(), **kwargs):
    text = model_card(dict(about), model_name="ppo_tldr", **kwargs)
    assert text.startswith("---\n")
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_how_and_how_well(tmp_path):
    args = SimpleNamespace(learning_rate=3e-6, kl_coef=0.05, hub_token="hf_secret", top_k=None)
    rows = [
        {"step": 1, "objective/scores": -0.46, "objective/kl": 0.0},
        {"step": 2, "objective/scores": 2.851234, "objective/kl": 12.5},
        {"step": 2, "eval_objective/scores": 2.5},
    ]
    front, body = card(
        {
            "model": "EleutherAI/pythia-1b-deduped",
            "datasets": ["trl-lib/tldr", str(tmp_path)],
            "rewards": ["length|odd"],
        },
        args=args,
        log_history=rows,
        tags=["tldr", "kedge"],
    )
    assert front == {
        "library_name": "transformers",
        "model_name": "ppo_tldr",
        "pipeline_tag": "text-generation",
        "tags": ["kedge", "ppo", "reinforcement-learning", "tldr"],
        "base_model": "EleutherAI/pythia-1b-deduped",
        "datasets": ["trl-lib/tldr"],
    }
    assert "| score | -0.46 | 2.851 |" in body
    assert "| KL to the reference (nats per response) | 0 | 12.5 |" in body
    assert "| evaluation score | 2.5 | 2.5 |" in body
    assert "| learning_rate | 3e-06 |" in body
    assert "arXiv:1707.06347" in body
    assert "arXiv:2403.17031" in body
    assert "| kedge |" in body
    assert "hf_secret" not in body
    assert "top_k" not in body
    front, body = card({"model": str(tmp_path), "algorithm": "Mine"})
    assert "base_model" not in front
    assert str(tmp_path) in body
    for section in ("Results", "Hyperparameters", "Citation"):
        assert f"## {section}" not in body
    assert "\n\n\n" not in body


def test_the_card_shows_command_curves_and_where_else_the_run_is():
    _, body = card(
        {
            "command": "kedge ppo --learning_rate 1e-5",
            "links": {"hub": "https://hub/me/x", "wandb": "https://wandb/run/1"},
        },
        curves="curves.png",
    )
    assert "```bash\nkedge ppo --learning_rate 1e-5\n```" in body
    assert "![curves of the run](curves.png)" in body
    assert "[wandb](https://wandb/run/1)" in body
    assert "https://hub/me/x" not in body  # that is where the card is


def test_the_repository_of_a_config(tmp_path):
    def build(**options):
        names = ("hub_model_id", "output_dir", "hub_token", "hub_private_repo", "hub_revision")
        return build_hub(SimpleNamespace(**dict.fromkeys(names) | options))

    for given, private in ((None, True), (True, True), (False, False)):
        assert build(hub_model_id="x", hub_private_repo=given).private is private
    assert build(hub_model_id="org/name", output_dir=str(tmp_path)).repo_id == "org/name"
    assert build(output_dir=str(tmp_path / "ppo_tldr")).repo_id == "ppo_tldr"
    with pytest.raises(HubError, match="set hub_model_id or output_dir"):
        build()


@pytest.mark.usefixtures("curves")
def test_a_run_links_hub_trackers_and_card(tmp_path, monkeypatch):
    from kedge.reporting import hub as publishing

    api = FakeApi()
    monkeypatch.setattr(publishing, "Hub", lambda *a, **k: Hub(*a, **k, api=api))
    trainer = small(
        output_dir=str(tmp_path), push_to_hub=True, hub_model_id="x", report_to=["tensorboard"]
    )
    trainer.train()
    url = "https://huggingface.co/me/x"
    assert json.loads((tmp_path / "run.json").read_text())["links"] == {"hub": url}
    events = "".join(str(f.read_bytes()) for f in tmp_path.rglob("events*"))
    assert '"hub_model_id": "x"' in events  # the callback of transformers logs the config
    trainer.push_to_hub()
    assert api.calls[0][1]["private"] is True
    text = (tmp_path / "README.md").read_text()
    assert ModelCard(text).data.model_name == "x"
    assert "curves.png" in text
    assert "## Command" in text


def test_save_model_with_arguments_of_the_hub_uploads(tmp_path, monkeypatch):
    from kedge.reporting import hub as publishing

    api = FakeApi()
    monkeypatch.setattr(publishing, "Hub", lambda *a, **k: Hub(*a, **k, api=api))
    trainer = small(output_dir=str(tmp_path), hub_model_id="x")
    trainer.save_model()
    assert api.calls == []
    trainer.save_model(commit_message="first", blocking=False, token="secret", revision="beta")
    (upload,) = uploads(api)
    assert (upload["commit_message"], upload["run_as_future"]) == ("first", True)
    assert (upload["token"], upload["revision"]) == ("secret", "beta")
    assert upload["folder_path"] == str(tmp_path)
