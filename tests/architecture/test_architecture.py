"""The rules of the layout: who may import whom, and how large things may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "kedge"
FILES = sorted(SRC.rglob("*.py"))
STDLIB = sys.stdlib_module_names

KEDGE_RULES = {
    "errors": set(),
    "suggestions": {"errors"},
    "records": {"errors"},
    "types": {"records"},
    "protocols": {"types"},
    "math": {"math"},
    "ops": {"ops", "math"},
    "algorithms": {"types", "math", "algorithms"},
    "config": {"config", "errors", "suggestions", "types"},
    "engine": {"types", "math", "protocols", "algorithms", "engine", "errors"},
    "backends": {"records", "types", "math", "ops", "protocols", "config", "backends", "errors"},
    "classic": {
        *(
            "types",
            "math",
            "ops",
            "protocols",
            "algorithms",
            "engine",
            "backends",
            "errors",
            "classic",
        ),
        *("suggestions", "config"),
    },
    "compat": {"compat", "config", "errors"},  # and names of "kedge" itself
    "testing": {"types", "errors"},
    "http_client": set(),
    "output": {"errors"},
    "verifiers": {"verifiers", "errors", "http_client"},
    "environments": {"environments", "types", "protocols", "math", "errors"},
    "insight": {"insight", "errors"},
    "judges": {"judges", "errors", "http_client"},
}
THIRD_PARTY = {
    "errors": set(),
    "suggestions": set(),
    "records": {"torch"},
    "types": {"torch"},
    "protocols": {"torch"},
    "math": {"torch"},
    "ops": {"torch", "transformers"},
    "algorithms": {"torch"},
    "config": {"transformers"},
    "engine": {"torch", "safetensors"},
    "compat": {"torch", "transformers", "datasets"},
    "http_client": {"httpx"},
    "output": set(),
    "insight": set(),
    "judges": set(),
    "verifiers": {"math_verify", "py3langid", "regex"},  # imported when first used
}
LAZY = {"peft", "wandb", "trl", "vllm", "ray", "deepspeed", "matplotlib", "trackio", "bitsandbytes"}
LAZY |= {"gymnasium", "textarena", "openenv", "verifiers", "aiohttp"}


def layer(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.module, node.lineno))
    return found


def violations(path: Path, text: str) -> list[str]:
    """Imports of one file that its layer may not have."""
    own, bad = layer(path), []
    for name, line in imports(ast.parse(text)):
        top, *rest = name.split(".")
        if top == "kedge":
            if own in KEDGE_RULES and rest and rest[0] not in KEDGE_RULES[own]:
                bad.append(f"{path.relative_to(SRC)}:{line} imports {name}")
        elif top not in STDLIB and own in THIRD_PARTY and top not in THIRD_PARTY[own]:
            bad.append(f"{path.relative_to(SRC)}:{line} imports {name}")
    return bad


def test_import_rules() -> None:
    assert [v for path in FILES for v in violations(path, path.read_text())] == []


def test_import_rules_notice_a_breach() -> None:
    bad = "from kedge.engine.batch_sizes import BatchSizes\nimport numpy\n"
    assert len(violations(SRC / "math" / "kl.py", bad)) == 2


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            start = body[1].lineno if len(body) > 1 and ast.get_docstring(node) else body[0].lineno
            lines = (node.end_lineno or start) - start + 1
            assert lines <= 60 or node.name == factory(path), f"{node.name}: {lines} lines"
        if isinstance(node, ast.ClassDef):
            public = [
                n
                for n in node.body
                if isinstance(n, ast.FunctionDef)
                and not n.name.startswith("_")
                and not any(
                    isinstance(d, ast.Name) and d.id == "property" for d in n.decorator_list
                )
            ]
            assert len(public) <= 12, f"{node.name}: {len(public)} public methods"


def factory(path: Path) -> str:
    """An algorithm's factory holds its two functions, so its length is theirs together."""
    return path.stem if layer(path) == "algorithms" else ""


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        ("kedge.ppo", set()),
        # transformers.TrainingArguments loads peft by itself where it is installed.
        ("kedge.ppo, kedge.PPOConfig", {"peft"}),
    ],
)
def test_import_kedge_is_light(names: str, allowed: set[str]) -> None:
    code = (
        f"import sys, kedge; {names};"
        f"heavy = {sorted(LAZY - allowed)!r}; print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
