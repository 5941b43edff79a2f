"""Public import paths of modules that are defined elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType
from typing import Any

# A path stands for the module and for what is below it: `kedge.classic.core` is found, too.
FORWARDS = {
    "kedge.types": "kedge.records.types",
    "kedge.protocols": "kedge.records.protocols",
    "kedge.errors": "kedge.records.errors",
    "kedge.classic": "kedge.ext.trl.classic",
    "kedge.compat": "kedge.ext.trl.compat",
    "kedge.trl": "kedge.ext.trl",
    "kedge.trl_scripts": "kedge.ext.trl.scripts",
    "kedge.judges": "kedge.ext.judge.judges",
    "kedge.environments.games": "kedge.ext.games.games",
    "kedge.environments.adapters": "kedge.ext.adapters.adapters",
}


# Names of core packages that stand in extensions.
ATTRIBUTES = {
    "kedge.verifiers": {
        "ConstraintVerifier": "kedge.ext.ifeval.constraints",
        "Outcome": "kedge.ext.sandbox",
        "Sandbox": "kedge.ext.sandbox",
        "code_verifier": "kedge.ext.sandbox.programs",
    },
}


def attribute(package: str, name: str) -> Any:
    """The object that a package forwards under a name; AttributeError if there is none."""
    if place := ATTRIBUTES.get(package, {}).get(name):
        return getattr(importlib.import_module(place), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


class Forward:
    """Finder and loader of the paths in `FORWARDS`: the same module under a second name."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec if ``name`` is a path of the table; None lets the other finders answer."""
        for known, place in FORWARDS.items():
            if name == known or name.startswith(f"{known}."):
                found = find_spec(place + name.removeprefix(known))
                if found is None or name.endswith(".__main__"):  # `python -m` runs a file
                    return found and spec_from_file_location(name, found.origin)
                package = found.submodule_search_locations is not None
                return ModuleSpec(name, Forward(), origin=found.name, is_package=package)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, imported under its own name."""
        module = importlib.import_module(spec.origin or "")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed twice; the module keeps the spec of its own name."""
        module.__spec__ = self._spec


def install() -> None:
    """Let ``import`` find the paths of the table; modules are loaded when they are asked for.

    First in line: the usual finder would load files below a path of the table a second time.
    """
    if Forward not in sys.meta_path:
        sys.meta_path.insert(0, Forward)
