"""Kedge under TRL's names, for programs that import them from ``trl``.

    import kedge.compat

    kedge.compat.install("trl-0.11")  # before the program's imports
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

``python -m kedge.compat run SCRIPT`` does this for an unmodified script.
Which names Kedge has, by generation of TRL's API, is in names.yaml.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_loader
from pathlib import Path
from string import Template
from types import MappingProxyType, ModuleType
from typing import Any

import transformers
import yaml
from transformers import hf_argparser

from kedge.ext.trl.compat import older_transformers
from kedge.ext.trl.scripts import ScriptParser
from kedge.records.errors import ConfigError

__all__ = ["APIS", "install", "uninstall"]
_PARSER = hf_argparser.HfArgumentParser
PACKAGE = "trl"
Names = dict[str, str]  # name -> "module:attribute"
Modules = dict[str, Names]  # module -> its names

_DATA = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
_TARGETS = {
    name: f"{module}:{name}" for module, names in _DATA["sources"].items() for name in names.split()
}
_TARGETS["OnlineTrainerState"] = "kedge.trainers.hf_callbacks:RunState"


def _modules(config: str, trainer: str, tables: Names, groups: str = "kedge.trl") -> Modules:
    """The modules of an API; the given ones hold ``PPOConfig``, ``PPOTrainer``, ``RLOOConfig``."""
    targets = _TARGETS | {"PPOConfig": f"{config}:PPOConfig", "PPOTrainer": f"{trainer}:PPOTrainer"}
    targets["RLOOConfig"] = f"{groups}:RLOOConfig"
    modules = {}
    for module, text in (_DATA["shared"] | tables).items():
        while "$" in text:
            text = Template(text).substitute(_DATA["lists"])  # noqa: PLW2901
        modules[module] = {name: targets[name] for name in text.split()}
    return modules


_OLDER, _TRAINERS = "kedge.trl.v0_17", "kedge.compat.trl_trainers"
_SWIFT = _modules("kedge.compat.hf_trainer", "kedge.compat.hf_trainer", _DATA["trainers"])
for _names in _SWIFT.values():  # ms-swift's class derives from TRL's and overrides its loop
    _names.pop("GRPOConfig", None)
    _names.pop("GRPOTrainer", None)
APIS = MappingProxyType(
    {
        "trl-0.11": _modules("kedge.classic", "kedge.classic", _DATA["steps"], _OLDER),
        "trl-0.21": _modules("kedge.trl", _TRAINERS, _DATA["trainers"], _OLDER),
        "trl-1.12": _modules("kedge.trl", _TRAINERS, _DATA["trainers"]),
        "ms-swift": _SWIFT,
    }
)
VERSIONS = MappingProxyType(
    {"trl-0.11": "0.11.4", "trl-0.21": "0.21.0", "trl-1.12": "1.12.0", "ms-swift": "1.12.0"}
)


def install(
    api: str,
    *,
    replace: bool = False,
    report_version: str | None = None,
    transformers4: bool = False,
) -> None:
    """Make ``trl`` importable with the names of an API that Kedge has.

    In a ``HfArgumentParser`` of transformers, flags that a dataclass of the program declares are
    its own, also where Kedge's config has a field of that name.  "trl-0.11" also restores what
    transformers dropped since (``older_transformers``).

    Args:
        api: "trl-0.11" (``generate`` and ``step``, 0.4 to 0.11), "trl-1.12" (the trainer with
            ``train``, 0.12 to 1.12, also ``trl.experimental.ppo``), "trl-0.21" (the same, with
            RLOO's names and defaults before 0.22), or "ms-swift" (as "trl-1.12", with a trainer
            that derives from ``transformers.Trainer``).
        replace: use Kedge's class where the installed TRL has one of the same name.
        report_version: version of TRL that programs see; None: the installed one, or
            the newest of the API where it is not installed.
        transformers4: ``apply_chat_template`` returns token ids, as in transformers 4.
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
    _use_parser(ScriptParser)
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


class NameFinder(MetaPathFinder):
    """Finds the modules of an API; installed modules keep the names they have, unless ``replace``.

    ``version`` of TRL is reported where it is not installed, or with ``report_version`` always.
    """

    def __init__(
        self, modules: Modules, version: str, *, replace: bool, report_version: bool
    ) -> None:
        self.modules, self.version = modules, version
        self.replace, self.report_version = replace, report_version

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The installed module with names added, or else a module with the added names only."""
        if fullname not in self.modules:
            return None
        spec = self._installed(fullname, path)
        if spec is None:
            is_package = any(name.startswith(f"{fullname}.") for name in self.modules)
            return spec_from_loader(fullname, _Loader(self, None), is_package=is_package)
        spec.loader = _Loader(self, spec.loader)
        return spec

    def _installed(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if not isinstance(finder, NameFinder))
        specs = (f.find_spec(fullname, path) for f in others if hasattr(f, "find_spec"))
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """TRL's metadata, for programs that check its version."""
        if context is None or context.name != PACKAGE:
            return []
        reported = self.report_version or self._installed(PACKAGE, None) is None
        return [_Metadata(self.version)] if reported else []

    def add_names(self, module: ModuleType, *, installed: bool) -> None:
        """Add the names of a module, imported when they are first read."""
        present = set(dir(module)) if installed and not self.replace else set()
        names = self.modules[module.__name__]
        added = {name: target for name, target in names.items() if name not in present}
        for name in added.keys() & vars(module).keys():
            setattr(module, name, _load(added[name]))
        if module.__name__ == PACKAGE and (self.report_version or not installed):
            module.__dict__["__version__"] = self.version
        if not installed:
            module.__dict__["__all__"] = sorted(names)
        module.__dict__["__getattr__"] = _reader(module, added, vars(module).get("__getattr__"))


def _reader(module: ModuleType, names: Names, before: Any) -> Any:
    def read(name: str) -> Any:
        if name in names:
            value = _load(names[name])
            setattr(module, name, value)
            return value
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return read


def _load(target: str) -> Any:
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


class _Loader(Loader):
    """Runs the installed module, if there is one, then adds names."""

    def __init__(self, finder: NameFinder, inner: Any) -> None:
        self._finder, self._inner = finder, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec) if self._inner is not None else None

    def exec_module(self, module: ModuleType) -> None:
        if self._inner is not None:
            self._inner.exec_module(module)
        module = sys.modules.get(module.__name__, module)  # TRL replaces its module by a lazy one
        self._finder.add_names(module, installed=self._inner is not None)


class _Metadata(Distribution):
    def __init__(self, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)
