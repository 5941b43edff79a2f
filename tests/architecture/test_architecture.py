"""The rules of the layout: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "kedge"
FILES = sorted(SRC.rglob("*.py"))
STDLIB = sys.stdlib_module_names

# Packages in the order of the loop; each may import what stands in its set, and itself.
RECORDS = {"records", "types", "protocols", "errors"}
KEDGE_RULES = {
    "redaction": set(),
    "errors": {"redaction"},
    "chat_template": {"errors"},
    "suggestions": {"errors"},
    "records": {"errors"},
    "types": {"records"},
    "protocols": {"types"},
    "http_client": {"background", "redaction"},
    "output": {"errors"},
    "background": set(),
    "math": set(),
    "ops": {"math", "ops/cpu"},
    "ops/cpu": {"ops", "background"},
    "algorithms": {"types", "math"},
    "config": {"errors", "suggestions", "types", "redaction"},
    "data": RECORDS | {"chat_template"},
    "models": RECORDS | {"ops", "ops/cpu", "rewards", "rollout/embedded"},
    "learner": RECORDS | {"ops", "ops/cpu", "models"},
    "rewards": RECORDS | {"math", "ops/cpu", "models", "data", "chat_template"} | {"background"},
    "rollout": RECORDS | {"config", "background"},
    "rollout/embedded": RECORDS | {"config", "ops/cpu", "models", "rollout"},
    "rollout/scheduler": RECORDS | {"math", "algorithms", "loop", "rollout"},
    "rollout/vllm": RECORDS | {"config", "models", "rollout", "rollout/embedded", "background"},
    "checkpoint": RECORDS | {"redaction"},
    "loop": RECORDS | {"math", "algorithms", "checkpoint", "rollout/scheduler"},
    "environments": RECORDS | {"math", "chat_template", "background", "data"},
    "ray": RECORDS
    | {*("config", "learner", "loop", "models", "ops/cpu", "rewards"), "rollout"}
    | {"rollout/embedded", "rollout/vllm"},
    "pretrain": RECORDS
    | {"models", "ops/cpu", "reporting", "rewards", "checkpoint", "loop", "math", "chat_template"}
    | {"data"},
    "verifiers": {"errors", "http_client", "suggestions", "background"},
    "judges": {"errors", "http_client", "math"},
    "testing": {"types", "errors"},
    "classic": RECORDS
    | {*("math", "algorithms", "loop", "checkpoint", "models", "learner", "reporting")}
    | {*("suggestions", "config", "ops", "rollout/embedded", "data")},
    "compat": {"config", "errors"},  # and names of "kedge" itself
}
THIRD_PARTY = {
    "errors": set(),
    "redaction": set(),
    "chat_template": set(),
    "suggestions": set(),
    "records": {"torch"},
    "types": {"torch"},
    "protocols": {"torch"},
    "math": {"torch"},
    "ops": {"torch", "transformers"},
    "ops/cpu": {"torch", "transformers"},
    "algorithms": {"torch"},
    "config": {"transformers", "pydantic", "annotated_types"},
    "loop": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "rollout/scheduler": {"torch"},
    "compat": {"torch", "transformers", "datasets", "yaml"},
    "http_client": {"httpx"},
    "output": {"accelerate"},
    "judges": {"numpy"},
    # imported when first used; the last two by the server alone
    "verifiers": {"math_verify", "py3langid", "regex", "starlette", "uvicorn"},
}
LAZY = {"peft", "wandb", "trl", "vllm", "ray", "deepspeed", "matplotlib", "trackio", "bitsandbytes"}
LAZY |= {"gymnasium", "textarena", "openenv", "verifiers", "aiohttp"}


def layer(parts: Sequence[str]) -> str:
    """The name in `KEDGE_RULES` of a module: its package, or one within ``ops`` and ``rollout``."""
    inner = "/".join(parts[:2])
    return inner if inner in KEDGE_RULES else parts[0]


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
            if own in KEDGE_RULES and rest and layer(rest) not in {own, *KEDGE_RULES[own]}:
                bad.append(f"{path.relative_to(SRC)}:{line} imports {name}")
        elif top not in STDLIB and own in THIRD_PARTY and top not in THIRD_PARTY[own]:
            bad.append(f"{path.relative_to(SRC)}:{line} imports {name}")
    return bad


def test_import_rules() -> None:
    assert [v for path in FILES for v in violations(path, path.read_text())] == []


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
