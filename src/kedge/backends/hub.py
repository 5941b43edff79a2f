"""Pushing models and checkpoints to the Hugging Face Hub."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from kedge.errors import HubError

STATE_FILES = ("state-*", "state.json", "rank-*", "manifest.json", "trainer_state.json")
# What a run leaves beside the model: other pushes, hidden folders, and texts of the dataset.
RUN_FILES = (
    *("checkpoint-*", ".*", "_*", "*completions*/*", "tokens*/*", "rollouts/*", "start/*"),
    "report*.html",
)
STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")


def logged_in() -> bool:
    """Whether there is a token of the hub on this machine."""
    from huggingface_hub import get_token

    return get_token() is not None


class Hub:
    """One repository on the hub, of a model or of data.  Only rank 0 has one.

    Args:
        repo_id: "name" or "organization/name".
        token: of a user who may write; None takes the one of ``hf auth login`` or ``HF_TOKEN``.
        private: for a repository that does not exist yet; None is the account's default.
        revision: branch to push to, made if it is missing; None is "main".
        kind: what the repository holds.
        api: a ``huggingface_hub.HfApi``, or something with its ``create_repo``,
            ``create_branch``, ``upload_folder`` and ``upload_file``.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        kind: Literal["model", "dataset"] = "model",
        api: Any = None,
    ) -> None:
        if api is None:
            from huggingface_hub import HfApi

            api = HfApi()
        self.repo_id, self.private, self.revision = repo_id, private, revision
        self._token, self._api, self._ready = token, api, False
        self._kind = {} if kind == "model" else {"repo_type": kind}

    @property
    def url(self) -> str:
        """Address of the repository, with the account's name once it is made."""
        from huggingface_hub.constants import ENDPOINT

        branch = "" if self.revision in (None, "main") else f"/tree/{self.revision}"
        place = "datasets/" if self._kind else ""
        return f"{ENDPOINT}/{place}{self.repo_id}{branch}"

    def create(self) -> str:
        """Make the repository and branch unless they exist; returns the repository's full name.

        Called before training starts, so that a wrong token is found in the first second.

        Raises:
            HubError: says what the hub answered and what to do.
        """
        if not self._ready:
            url = self._call(
                "create_repo", repo_id=self.repo_id, private=self.private, exist_ok=True
            )
            self.repo_id = getattr(url, "repo_id", self.repo_id)
            if self.revision not in (None, "main"):
                self._call(
                    "create_branch", repo_id=self.repo_id, branch=self.revision, exist_ok=True
                )
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
        """Upload a folder in one commit.

        Args:
            folder: what to upload.
            message: the commit's message.
            path_in_repo: where to; None is the root.
            ignore: patterns of files to leave out.
            replace: delete what else is at ``path_in_repo``.
            blocking: False returns a future at once.

        Returns:
            The commit's information (``.commit_url``), or a future of it.

        Raises:
            HubError: says what the hub answered and what to do.
        """
        return self._commit(
            "upload_folder",
            message,
            blocking=blocking,
            folder_path=str(folder),
            path_in_repo=path_in_repo,
            ignore_patterns=list(ignore),
            delete_patterns="*" if replace else None,
        )

    def write(self, path: str, text: str, *, message: str, blocking: bool = True) -> Any:
        """Upload a text as one file.

        Args:
            path: in the repository.
            text: what the file holds.
            message: the commit's message.
            blocking: False returns a future at once.

        Raises:
            HubError: says what the hub answered and what to do.
        """
        return self._commit(
            "upload_file",
            message,
            blocking=blocking,
            path_or_fileobj=text.encode(),
            path_in_repo=path,
        )

    def _commit(self, name: str, message: str, *, blocking: bool, **what: Any) -> Any:
        self.create()
        return self._call(
            name,
            repo_id=self.repo_id,
            revision=self.revision,
            commit_message=message,
            run_as_future=not blocking,
            **what,
        )

    def push_checkpoint(self, folder: str | Path, strategy: str) -> None:
        """Push what ``hub_strategy`` asks for after a save; waits until it is there.

        A hub that cannot be reached does not end a training run: it is warned of, and the push at
        the end of training raises.

        Args:
            folder: the ``checkpoint-N`` just written.
            strategy: "end" pushes nothing now; "every_save" the model; "checkpoint" the model, and
                the whole checkpoint as ``last-checkpoint``; "all_checkpoints" as ``checkpoint-N``.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"hub_strategy={strategy!r}; choose one of {', '.join(STRATEGIES)}")
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
            warnings.warn(f"{folder.name} is saved but was not pushed: {e}", stacklevel=2)

    def _call(self, name: str, **kwargs: Any) -> Any:
        try:
            return getattr(self._api, name)(token=self._token, **self._kind, **kwargs)
        except Exception as e:  # the HTTP package behind the hub client differs by version
            raise HubError(explain(e, self.repo_id)) from e


def repo_name(hub_model_id: str | None, output_dir: str | Path | None) -> str:
    """The repository of a run: ``hub_model_id``, or the output folder's name.

    Raises:
        HubError: neither is given.
    """
    if hub_model_id:
        return hub_model_id
    if not output_dir:
        raise HubError("there is no name to push under: set hub_model_id or output_dir")
    return Path(output_dir).absolute().name


def explain(error: BaseException, repo_id: str) -> str:
    """What went wrong with a repository, and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if status in (401, 403) or "LocalTokenNotFoundError" in kinds:
        advice = "log in with `hf auth login`, or set hub_token to a token that may write there"
    elif status == 404:
        advice = "check hub_model_id and that the token may write there"
    elif status is None and ("ConnectionError" in kinds or "TransportError" in kinds):
        advice = (
            "the hub cannot be reached from here; train without it, and upload the output folder "
            "later with `hf upload`"
        )
    else:
        advice = "the models are in the output folder; upload them later with `hf upload`"
    return f"could not push to {repo_id} on the hub ({type(error).__name__}: {error}): {advice}"
