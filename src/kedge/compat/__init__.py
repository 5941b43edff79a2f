"""Kedge under TRL's names, for programs that import them from ``trl``.

    import kedge.compat

    kedge.compat.install("trl-0.11")  # before the program's imports
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

``python -m kedge.compat run SCRIPT`` does this for an unmodified script.
"""

from __future__ import annotations

import sys

import transformers
from transformers import hf_argparser

from kedge.compat import older_transformers
from kedge.compat.finder import APIS, PACKAGE, VERSIONS, NameFinder
from kedge.config.parser import ConfigParser
from kedge.errors import ConfigError

_PARSER = hf_argparser.HfArgumentParser
__all__ = ["APIS", "install", "uninstall"]


def install(
    api: str,
    *,
    replace: bool = False,
    report_version: str | None = None,
    transformers4: bool = False,
) -> None:
    """Make ``trl`` importable with the names of an API that Kedge has.

    Names that the installed TRL has stay TRL's, unless ``replace`` is set.  In a
    ``HfArgumentParser`` of transformers, flags that a dataclass of the program declares are its
    own, also where Kedge's config has a field of that name.  For "trl-0.11" also restores what
    transformers dropped since (``older_transformers``).

    Args:
        api: "trl-0.11" (``generate`` and ``step``, 0.4 to 0.11), "trl-1.12" (the trainer with
            ``train``, 0.12 to 1.12, also ``trl.experimental.ppo``), or "ms-swift" (the same, with
            a trainer that derives from ``transformers.Trainer``).
        replace: use Kedge's class where the installed TRL has one of the same name.
        report_version: version of TRL that programs see; None: the installed one, or
            the newest of the API where it is not installed.
        transformers4: ``apply_chat_template`` returns token ids, as in transformers 4.

    Raises:
        ConfigError: an unknown API, or another one is installed already.
    """
    if api not in APIS:
        raise ConfigError(f"api={api!r} must be one of {', '.join(APIS)}")
    version = report_version or VERSIONS[api]
    finder = NameFinder(
        APIS[api], version, replace=replace, report_version=report_version is not None
    )
    for other in sys.meta_path:
        if isinstance(other, NameFinder):
            if vars(other) == vars(finder):
                return
            raise ConfigError("kedge.compat is installed with other settings; call uninstall first")
    if api == "trl-0.11":
        older_transformers.restore()
    if transformers4:
        older_transformers.restore_template_ids()
    _use_parser(ConfigParser)
    sys.meta_path.insert(0, finder)
    for name in APIS[api]:
        if name in sys.modules:
            finder.add_names(sys.modules[name], installed=True)


def uninstall() -> None:
    """Remove the names again; modules of TRL are imported again on the next import."""
    _use_parser(_PARSER)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, NameFinder)]
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]


def _use_parser(kind: type) -> None:
    for module in (transformers, hf_argparser):
        vars(module)["HfArgumentParser"] = kind
