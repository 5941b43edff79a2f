"""Helpers for adapters of libraries that use torch, and for libraries that want a GPU to import."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from ppo_conformance import NotOffered


def tensors(*arrays: Any) -> Any:
    """Arrays as tensors; masks stay bool.  One array gives one tensor."""
    import torch

    out = [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]
    return out[0] if len(out) == 1 else out


def with_gradient(loss: Callable[[Any], Any], x: Any) -> dict[str, Any]:
    """``{"loss": loss(x), "gradient": d loss / d x}``, for an array or tensor x."""
    import torch

    leaf = (x if torch.is_tensor(x) else tensors(x)).clone().requires_grad_()
    value = loss(leaf)
    value = value[0] if isinstance(value, tuple) else value
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return {"loss": value, "gradient": torch.zeros_like(leaf) if gradient is None else gradient}


def neighbors(group: np.ndarray, valid: np.ndarray | None = None) -> int:
    """Size of the groups, for libraries whose groups are neighbors of equal size."""
    starts = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
    sizes = set(np.diff([*starts, len(group)]).tolist())
    if len(sizes) != 1 or len(starts) != len(set(group.tolist())):
        raise NotOffered("groups are neighbors of equal size")
    if valid is not None and not valid.all():
        raise NotOffered("responses are not dropped one by one")
    return sizes.pop()


def library(variable: str, package: str) -> ModuleType:
    """Import ``package`` from the folder that the environment variable names, or as installed."""
    folder = os.environ.get(variable)
    if folder:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        hint = f"install {package}, or set {variable} to the folder that holds it"
        raise ImportError(f"{error}; {hint}") from error


class _Stub(ModuleType):
    """A module of which any name can be imported; nothing in it works."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == n or name.startswith(n + ".") for n in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


def stub(*names: str) -> None:
    """Stand-ins for packages that a CPU lacks: ray, vllm, flash_attn ...; installed ones stay."""
    missing = []
    for name in names:
        try:
            found = name in sys.modules or importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            missing.append(name)
    if missing:
        sys.meta_path.append(_StubFinder(tuple(missing)))


def definitions(path: Path, *names: str, owner: str | None = None, **known: Any) -> Any:
    """Functions and classes of a source file, or methods of its class ``owner``, without imports.

    For files that import what is not at hand.  ``known`` are the names that they use.  Decorators
    that are not known are left out.  One name gives one object, several a tuple.
    """
    body = ast.parse(path.read_text("utf-8")).body
    if owner is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    nodes = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    if missing := [n for n in names if n not in nodes]:
        raise ImportError(f"{path} has no {', '.join(missing)}: another version?")
    module = ast.parse("from __future__ import annotations")
    for name in names:
        node = nodes[name]
        node.decorator_list = [
            d for d in node.decorator_list if ast.unparse(d).split("(")[0] in known
        ]
        module.body.append(node)
    space = dict(known)
    exec(compile(module, str(path), "exec"), space)
    found = tuple(space[n] for n in names)
    return found[0] if len(found) == 1 else found


def installed_version(package: str, folder: str | None = None) -> str:
    """Version of an installed package, or of the one in ``folder``."""
    from importlib import metadata

    if folder:
        for found in metadata.distributions(path=[folder]):
            if found.metadata["Name"].lower().replace("_", "-") == package.lower():
                return found.version
    return metadata.version(package)


def excerpt(path: Path, start: str, stop: str, **names: Any) -> dict[str, Any]:
    """Run the lines of a source file from the one that contains ``start`` up to ``stop``.

    For formulas that stand in the middle of a trainer's method.  ``names`` are the variables that
    the lines read; returns all variables afterwards.
    """
    lines = path.read_text("utf-8").splitlines()
    places = [n for n, line in enumerate(lines) if start in line]
    ends = [n for n, line in enumerate(lines) if places and n > places[0] and stop in line]
    if not ends:
        raise ImportError(f"{path} has no lines from {start!r} to {stop!r}: another version?")
    block = textwrap.dedent("\n".join(lines[places[0] : ends[0]]))
    space = dict(names)
    exec(compile("\n" * places[0] + block, str(path), "exec"), space)
    return space
