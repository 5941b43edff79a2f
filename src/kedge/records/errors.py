"""Kedge's exceptions; each message names the problem, the value and the way out."""

from __future__ import annotations

import errno
import re
from importlib.metadata import PackageNotFoundError, version

from kedge.redaction import clean


def describe_error(error: BaseException) -> str:
    """The type and message of an exception, whose ``__str__`` may fail, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its message cannot be printed)"


class KedgeError(Exception):
    """Base of all errors that Kedge raises on purpose; its message holds no secret."""

    def __init__(self, *args: object) -> None:
        super().__init__(*map(clean, args))


class ConfigError(KedgeError, ValueError):
    """An invalid option or combination of options."""


class OptionError(ConfigError, TypeError):
    """Unknown option or argument (also a TypeError, as for any unexpected keyword)."""


class DataError(KedgeError, ValueError):
    """A dataset, prompt or tokenizer that cannot be used."""


class RewardError(KedgeError, RuntimeError):
    """A reward function or model failed, or returned something that is not a reward."""


class RolloutError(KedgeError, RuntimeError):
    """A rollout engine could not generate, or returned something that breaks its contract."""


class LostNodeError(RolloutError):
    """An actor cannot be restarted: its node is lost, and no other node has room."""


class SyncError(KedgeError, RuntimeError):
    """A rollout engine does not have the weights that it was sent."""


class PreflightError(KedgeError, RuntimeError):
    """The first batch shows that training would be wrong."""


class CheckpointError(KedgeError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint differ from what was written; an earlier one may be intact."""


class LaunchError(KedgeError, RuntimeError):
    """A process of a run on Ray failed, died or hung."""


class LostLearnerError(LaunchError):
    """A learner, its node or Ray's control store was lost; the latest checkpoint can be resumed."""


class JudgeError(KedgeError, RuntimeError):
    """A judge cannot be reached, or returned something that is not an answer."""


class HubError(KedgeError, RuntimeError):
    """The Hugging Face Hub refused, or cannot be reached."""


DISTRIBUTION = "kedge-rl"  # name on PyPI, where `kedge` is another project


def package_version() -> str:
    """The installed version; "0+unknown" for sources that were never installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


def install_command(extra: str) -> str:
    """The command that installs the packages of `extra`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room on that disk"),
    errno.EROFS: "mount it writable",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "grant this user write permission there"),
}


def way_out(error: BaseException) -> str:
    """How to fix a failed write to disk."""
    code = getattr(error, "errno", None)
    if code is None:  # safetensors and tokenizers only give the code in the message
        match = re.search(r"\(os error (\d+)\)|code: (\d+)", str(error))
        code = int(match[1] or match[2]) if match else 0
    return _WAYS_OUT.get(code, "check that path")
