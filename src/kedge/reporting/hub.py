"""Pushing models and checkpoints to the Hugging Face Hub."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kedge.records.errors import HubError

logger = logging.getLogger(__name__)
STATE_FILES = ("state-*", "state.json", "rank-*", "manifest.json", "trainer_state.json")
# Files next to the model that are not uploaded: other pushes, hidden folders, dataset texts.
RUN_FILES = (
    *("checkpoint-*", ".*", "_*", "*completions*/*", "tokens*/*", "rollouts/*", "start/*"),
    "report*.html",
)


class Hub:
    """A model repository on the hub.  Only rank 0 creates one.

    Args:
        repo_id: "name" or "organization/name".
        token: token with write access; None: from ``hf auth login`` or ``HF_TOKEN``.
        private: visibility of a new repository; None: the account's default.
        revision: branch to push to, created if missing; None: "main".
        api: a ``huggingface_hub.HfApi``, or an object with its ``create_repo``,
            ``create_branch`` and ``upload_folder``.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        api: Any = None,
    ) -> None:
        if api is None:
            from huggingface_hub import HfApi

            api = HfApi()
        self.repo_id, self.private, self.revision = repo_id, private, revision
        self._token, self._api, self._ready = token, api, False

    @property
    def url(self) -> str:
        """URL of the repository; includes the account's name once the repository is created."""
        from huggingface_hub.constants import ENDPOINT

        branch = "" if self.revision in (None, "main") else f"/tree/{self.revision}"
        return f"{ENDPOINT}/{self.repo_id}{branch}"

    def create(self) -> str:
        """Create the repository and branch if needed; returns the repository's full name.

        Called before training starts, so that a wrong token fails at once.
        """
        if not self._ready:
            call = partial(self._call, exist_ok=True)
            url = call("create_repo", repo_id=self.repo_id, private=self.private)
            self.repo_id = getattr(url, "repo_id", self.repo_id)
            if self.revision not in (None, "main"):
                call("create_branch", repo_id=self.repo_id, branch=self.revision)
            self._ready = True
        return self.repo_id

    def push(
        self,
        folder: str | Path,
        *,
        message: str,
        path_in_repo: str | None = None,
        ignore: tuple[str, ...] = RUN_FILES,
        replace: bool = False,
        blocking: bool = True,
    ) -> Any:
        """Upload a folder in one commit; returns its info (``.commit_url``), or a future of it.

        Args:
            folder: folder to upload.
            message: commit message.
            path_in_repo: destination folder; None: the root.
            ignore: patterns of files to skip.
            replace: delete other files at ``path_in_repo``.
            blocking: False: return a future immediately.

        Raises:
            HubError: with the hub's answer and what to do.
        """
        return self._call(
            "upload_folder",
            repo_id=self.create(),
            revision=self.revision,
            commit_message=message,
            run_as_future=not blocking,
            folder_path=str(folder),
            path_in_repo=path_in_repo,
            ignore_patterns=list(ignore),
            delete_patterns="*" if replace else None,
        )

    def push_checkpoint(self, folder: str | Path, strategy: str) -> None:
        """Push the files that ``hub_strategy`` selects after a save, and wait for the upload.

        "end" pushes nothing now; "every_save" the model; "checkpoint" the model, and the whole
        checkpoint as ``last-checkpoint``; "all_checkpoints" as ``checkpoint-N``.  A failure only
        warns, so that training continues; the push at the end of training raises.
        """
        if strategy == "end":
            return
        folder = Path(folder)
        message = f"Training in progress, {folder.name.replace('-', ' ')}"
        try:
            self.push(folder, message=message, ignore=STATE_FILES)
            if strategy != "every_save":
                last = strategy == "checkpoint"
                place = "last-checkpoint" if last else folder.name
                self.push(folder, message=message, path_in_repo=place, ignore=(), replace=last)
        except HubError as e:
            logger.warning("%s was saved but not pushed: %s", folder.name, e)

    def _call(self, name: str, **kwargs: Any) -> Any:
        try:
            return getattr(self._api, name)(token=self._token, **kwargs)
        except Exception as e:  # the HTTP package below the hub client depends on its version
            raise HubError(explain(e, self.repo_id)) from e


def explain(error: BaseException, repo_id: str) -> str:
    """Error message for a failed hub call: the cause and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if status in (401, 403) or "LocalTokenNotFoundError" in kinds:
        advice = "log in with `hf auth login`, or set hub_token to a token with write access"
    elif status == 404:
        advice = "check hub_model_id, and that the token has write access"
    elif status is None and ("ConnectionError" in kinds or "TransportError" in kinds):
        advice = (
            "the hub cannot be reached; train with push_to_hub=False, and upload the output "
            "folder later with `hf upload`"
        )
    else:
        advice = "the models are in the output folder; upload them later with `hf upload`"
    return f"could not push to {repo_id} on the hub ({type(error).__name__}: {error}): {advice}"


def build_hub(args: Any, *, token: str | None = None, revision: str | None = None) -> Hub:
    """The repository that the config names: ``hub_model_id``, or the output folder's name."""
    if not (args.hub_model_id or args.output_dir):
        raise HubError("pushing needs a repository name: set hub_model_id or output_dir")
    return Hub(
        args.hub_model_id or Path(args.output_dir).absolute().name,
        token=token or args.hub_token,
        private=args.hub_private_repo is not False,  # private by default
        revision=revision or args.hub_revision,
    )


class PushOnSave(TrainerCallback):
    """Pushes after each save according to ``hub_strategy``; acts on rank 0 only."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Create the repository, so that an invalid token fails early."""
        if state.is_world_process_zero:
            self.hub.create()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Push the checkpoint just written."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            self.hub.push_checkpoint(folder, str(getattr(args.hub_strategy, "value", "end")))
