"""Every exception Kedge raises on purpose.

    KedgeError
    ├── ConfigError (ValueError)      an option, or a combination of options, that cannot work
    │   └── OptionError (TypeError)   an option that there is not
    ├── DataError (ValueError)        a dataset, a prompt or a tokenizer that cannot be used
    ├── RewardError (RuntimeError)    a reward function or model failed, or returned nonsense
    ├── RolloutError (RuntimeError)   an engine could not generate, or broke its contract
    ├── SyncError (RuntimeError)      new weights did not arrive where samples are drawn
    ├── PreflightError (RuntimeError) the first batch shows that training would be wrong
    ├── CheckpointError (RuntimeError) a checkpoint is missing, damaged, or of another run
    │   └── DamagedCheckpointError    its files do not hold what was written
    ├── LaunchError (RuntimeError)    a process of a run on Ray failed, died or hung
    ├── JudgeError (RuntimeError)     a judge cannot be asked, or says nothing that can be counted
    └── HubError (RuntimeError)       the Hugging Face Hub refused, or cannot be reached

A message names the thing, its value, and the way out.
"""

from __future__ import annotations

import errno
import re


class KedgeError(Exception):
    """Base of all errors that Kedge raises on purpose."""


class ConfigError(KedgeError, ValueError):
    """An option, or a combination of options, that cannot work."""


class OptionError(ConfigError, TypeError):
    """An option or argument that there is not; also the error that Python itself would raise."""


class DataError(KedgeError, ValueError):
    """A dataset, a prompt or a tokenizer that cannot be used."""


class RewardError(KedgeError, RuntimeError):
    """A reward function or model failed, or returned something that is no reward."""


class RolloutError(KedgeError, RuntimeError):
    """An engine could not generate, or returned something that breaks its contract."""


class SyncError(KedgeError, RuntimeError):
    """New weights did not arrive where samples are drawn."""


class PreflightError(KedgeError, RuntimeError):
    """The first batch shows that training would be wrong."""


class CheckpointError(KedgeError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint do not hold what was written; an earlier one may."""


class LaunchError(KedgeError, RuntimeError):
    """A process of a run on Ray failed, died or hung."""


class JudgeError(KedgeError, RuntimeError):
    """A judge cannot be asked, or returned something that is no answer."""


class HubError(KedgeError, RuntimeError):
    """The Hugging Face Hub refused, or cannot be reached."""


_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room on that disk"),
    errno.EROFS: "mount it writable",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let this user write there"),
}


def way_out(refused: BaseException) -> str:
    """What helps where a disk refused to write."""
    code = getattr(refused, "errno", None)
    if code is None:  # safetensors and tokenizers tell it in the text
        found = re.search(r"\(os error (\d+)\)", str(refused))
        code = int(found[1]) if found else 0
    return _WAYS_OUT.get(code, "see what is there")
