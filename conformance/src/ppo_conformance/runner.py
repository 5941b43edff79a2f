"""Run an adapter through the cases."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ppo_conformance import NotOffered, cases
from ppo_conformance.cases import Case
from ppo_conformance.compare import Verdict, looks_like, verdict
from ppo_conformance.families import FAMILIES


@dataclass
class Adapter:
    """The functions of a library, by family.

    An adapter's file has a function per family that it offers, or ``adapter = {family: function}``;
    and, as it likes, LIBRARY, VERSION (a text or a function), NOT_CALLABLE {family: why},
    DOCUMENTED {pattern of case names: where the library says so} and NOTES {family: how to read the
    result}.
    """

    library: str
    version: str
    functions: dict[str, Callable[..., Any]]
    not_callable: dict[str, str] = field(default_factory=dict)
    documented: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str) -> Adapter:
        """Read an adapter's file."""
        module = _import(Path(path))
        offered = getattr(module, "adapter", None)
        if offered is None:
            offered = {n: f for n in FAMILIES if callable(f := getattr(module, n, None))}
        if unknown := set(offered) - set(FAMILIES):
            known = ", ".join(FAMILIES)
            raise ValueError(f"{path}: no family is called {sorted(unknown)}; there are {known}")
        version = getattr(module, "VERSION", "")
        return cls(
            getattr(module, "LIBRARY", Path(path).stem),
            str(version() if callable(version) else version),
            offered,
            getattr(module, "NOT_CALLABLE", {}),
            getattr(module, "DOCUMENTED", {}),
            getattr(module, "NOTES", {}),
        )


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `conformance new {path}` writes one")
    spec = importlib.util.spec_from_file_location(f"conformance_adapter_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Adapters are called like the libraries that they import, so their folder must not hide these;
    # what stands in the current folder can be imported, after all else.
    here = path.parent.resolve()
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here] + [str(Path.cwd())]
    spec.loader.exec_module(module)
    return module


def inputs_for(function: Callable[..., Any], case: Case, dtype: str) -> dict[str, Any]:
    """Fresh copies of the inputs that a function takes, floats as ``dtype``."""
    out: dict[str, Any] = {}
    taken = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    for name, value in case.inputs.items():
        if name in case.family.optional and name not in taken and not takes_all:
            continue
        if isinstance(value, np.ndarray):
            out[name] = value.astype(dtype) if value.dtype.kind == "f" else value.copy()
        else:
            out[name] = value
    return out


def check(adapter: Adapter, case: Case, dtype: str = "float32") -> Verdict:
    """One case."""
    function = adapter.functions.get(case.family.name)
    if function is None:
        return Verdict("not offered", adapter.not_callable.get(case.family.name, ""))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = function(**inputs_for(function, case, dtype))
        found = verdict(case, answer)
    except NotOffered as reason:
        return Verdict("not offered", str(reason))
    except Exception as error:  # what a library raises on a valid input is its answer
        return Verdict("fails", f"{type(error).__name__}: {error}".splitlines()[0][:300])
    if found.differs:
        found.looks_like = looks_like(case, answer)
    return found


def run(adapter: Adapter, pattern: str = "", dtype: str = "float32") -> dict[str, Any]:
    """All cases whose name contains ``pattern``; a record that is JSON."""
    found = {case.name: check(adapter, case, dtype) for case in cases.load(pattern)}
    return {
        "library": adapter.library,
        "version": adapter.version,
        "not_callable": adapter.not_callable,
        "notes": adapter.notes,
        "cases": {name: _record(adapter, name, v) for name, v in found.items()},
    }


def _record(adapter: Adapter, name: str, found: Verdict) -> dict[str, Any]:
    out = {k: v for k, v in asdict(found).items() if v}
    if found.status in {"differs", "fails"}:
        for pattern, where in adapter.documented.items():
            if fnmatch(name, pattern):
                out["documented"] = where
    return out
