"""The rules of the layout: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "kedge"
FILES = sorted(SRC.rglob("*.py"))
STDLIB = sys.stdlib_module_names

# Packages in the order of the loop; each may import what stands in its set, and itself.
KEDGE_RULES = {
    "redaction": set(),
    "records": {"redaction"},
    "chat_template": {"records"},
    "suggestions": {"records", "plugins"},
    "http_client": {"background", "redaction"},
    "output": {"records"},
    "background": set(),
    "math": set(),
    "plugins": {"records"},
    "forwards": set(),
    "ops": {"math", "plugins"},
    "algorithms": {"records", "math"},
    "config": {"records", "suggestions", "redaction"},
    "data": {"records", "chat_template"},
    "models": {"records", "ops"},
    "learner": {"records", "ops", "models"},
    "rewards": {"records", "plugins", "ops", "math", "models", "data"}
    | {"chat_template", "background"},
    "rollout": {"records", "config", "background"},
    "rollout/embedded": {"records", "ops", "background", "config", "models", "rollout"},
    "rollout/scheduler": {"records", "background", "algorithms", "rollout"},
    "checkpoint": {"records", "redaction"},
    "loop": {"records", "math", "algorithms", "checkpoint", "rollout/scheduler"},
    "environments": {"records", "math", "chat_template", "background", "data"},
    "verifiers": {"records", "plugins", "forwards", "background", "http_client", "suggestions"},
    "reporting": {"records", "plugins", "config", "data", "loop", "redaction"},
    "testing": {"records"},
}
THIRD_PARTY = {
    "redaction": set(),
    "chat_template": set(),
    "suggestions": set(),
    "records": {"torch"},
    "math": {"torch"},
    "ops": {"torch", "transformers"},
    "algorithms": {"torch"},
    "config": {"transformers", "pydantic", "annotated_types"},
    "loop": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "rollout/scheduler": {"torch"},
    "http_client": {"httpx"},
    "output": {"accelerate"},
    # imported when first used; the last two by the server alone
    "verifiers": {"math_verify", "py3langid", "regex", "starlette", "uvicorn"},
}
LAZY = {"peft", "wandb", "trl", "vllm", "ray", "deepspeed", "matplotlib", "trackio", "bitsandbytes"}
LAZY |= {"gymnasium", "openenv", "verifiers", "aiohttp"}


# Folders of ``ext`` that may import another one.
EXT_RULES = {"open_instruct": {"ray", "vllm"}, "ray": {"vllm"}}


def layer(parts: Sequence[str]) -> str:
    """The name in `KEDGE_RULES` of a module: its package, or one within ``rollout``."""
    inner = "/".join(parts[:2])
    return inner if inner in KEDGE_RULES or parts[0] == "ext" else parts[0]


def allowed(own: str, other: str) -> bool:
    """Whether a file of one layer may import one of another."""
    if own.startswith("ext/"):
        folder = own.removeprefix("ext/")
        return not other.startswith("ext/") or other[4:] in {folder, *EXT_RULES.get(folder, ())}
    return not other.startswith("ext") and (
        own not in KEDGE_RULES or other in {own, *KEDGE_RULES[own]}
    )


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
    own, bad = layer(path.relative_to(SRC).with_suffix("").parts), []
    for name, line in imports(ast.parse(text)):
        top, *rest = name.split(".")
        if top == "kedge":
            if rest and not allowed(own, layer(rest)):
                bad.append(f"{path.relative_to(SRC)}:{line} imports {name}")
        elif top not in STDLIB and own in THIRD_PARTY and top not in THIRD_PARTY[own]:
            bad.append(f"{path.relative_to(SRC)}:{line} imports {name}")
    return bad


def test_import_rules() -> None:
    assert [v for path in FILES for v in violations(path, path.read_text())] == []


def module(path: Path) -> str:
    return ".".join(["kedge", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


def circles(texts: Mapping[str, str]) -> list[list[str]]:
    """Groups of modules that import each other; imports within functions and for types count."""
    graph: dict[str, list[str]] = {}
    for name, text in texts.items():
        imported = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imported |= {name if name in texts else node.module for name in names}
        graph[name] = [other for other in imported - {name} if other in texts]
    reach = {name: {*others} for name, others in graph.items()}
    for via in graph:
        for name, others in reach.items():
            if via in others:
                reach[name] = others | reach[via]
    groups = {frozenset(x for x in others if name in reach[x]) for name, others in reach.items()}
    return sorted(sorted(group) for group in groups if group)


def test_no_files_import_each_other() -> None:
    # The face of the package names what others hold: its imports are for type checkers.
    texts = {module(path): path.read_text() for path in FILES if path != SRC / "__init__.py"}
    assert circles(texts) == []
    assert circles({"kedge.a": "import kedge.b", "kedge.b": "def f():\n from kedge import a"}) == [
        ["kedge.a", "kedge.b"]
    ]


def test_import_rules_notice_a_breach() -> None:
    bad = "from kedge.loop.batch_sizes import BatchSizes\nimport numpy\n"
    assert len(violations(SRC / "math" / "kl.py", bad)) == 2


def test_import_kedge_is_light() -> None:
    code = (
        f"import sys, kedge; heavy = {LAZY!r};"
        "kedge.ppo; print(sorted(heavy & {*sys.modules}));"
        "kedge.PPOConfig; print(sorted(heavy & {*sys.modules} - {'peft'}))"
    )  # transformers.TrainingArguments loads peft by itself where it is installed
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "[]"]


def test_programs_of_users_import_the_public_layers_alone() -> None:
    root = SRC.parents[1]
    page = (root / "docs" / "own-algorithm.md").read_text()
    texts = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    texts.append((root / "examples" / "minimal_ppo.py").read_text())
    names = {name for text in texts for name, _ in imports(ast.parse(text))}
    assert {name for name in names if name.startswith("kedge")} == {"kedge.engine"}
