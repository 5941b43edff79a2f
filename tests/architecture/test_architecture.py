"""The rules of the layout: who may import whom."""

from __future__ import annotations

import ast
import re
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
    "ops": {"math"},
    "algorithms": {"types", "math"},
    "config": {"errors", "suggestions", "types", "redaction"},
    "data": RECORDS | {"chat_template"},
    "models": RECORDS | {"ops", "rewards", "rollout/embedded"},
    "learner": RECORDS | {"ops", "models"},
    "rewards": RECORDS | {"math", "models", "data", "chat_template"} | {"background"},
    "rollout": RECORDS | {"config", "background"},
    "rollout/embedded": RECORDS | {"config", "models", "rollout"},
    "rollout/scheduler": RECORDS | {"math", "algorithms", "loop", "rollout"},
    "checkpoint": RECORDS | {"redaction"},
    "loop": RECORDS | {"math", "algorithms", "checkpoint", "rollout/scheduler"},
    "environments": RECORDS | {"math", "chat_template", "background", "data"},
    "verifiers": {"errors", "http_client", "suggestions", "background"},
    "testing": {"types", "errors"},
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
LAZY |= {"gymnasium", "textarena", "openenv", "verifiers", "aiohttp"}


# Arrows that still point the wrong way.
PENDING = {
    "__init__.py -> kedge.ext.open_instruct.config",
    "__init__.py -> kedge.ext.open_instruct.trainer",
    "__init__.py -> kedge.ext.trl.ppov2",
    "__init__.py -> kedge.ext.trl.scripts",
    "cli/arguments.py -> kedge.ext.trl.scripts",
    "cli/data.py -> kedge.ext.open_instruct.mixer",
    "cli/tools/generate.py -> kedge.ext.vllm",
    "cli/tools/pipeline.py -> kedge.ext.judge.judges",
    "cli/tools/pipeline.py -> kedge.ext.trl.scripts",
    "cli/train/ppo.py -> kedge.ext.trl.scripts",
    "ext/before_rl/init_command.py -> kedge.ext.cpu.matmul",
    "ext/before_rl/reward_command.py -> kedge.ext.trl.scripts",
    "ext/before_rl/sft_command.py -> kedge.ext.cpu.matmul",
    "ext/before_rl/sft_command.py -> kedge.ext.trl.scripts",
    "ext/before_rl/trl_trainers.py -> kedge.ext.cpu.patch",
    "ext/open_instruct/command.py -> kedge.ext.plan.command",
    "ext/plan/command.py -> kedge.ext.cpu.matmul",
    "ext/plan/command.py -> kedge.ext.open_instruct",
    "ext/plan/command.py -> kedge.ext.open_instruct.config",
    "ext/plan/command.py -> kedge.ext.trl.scripts",
    "ext/ray/reference.py -> kedge.ext.cpu.patch",
    "learner/learner.py -> kedge.ext.cpu.patch",
    "models/backbone.py -> kedge.ext.cpu.joined_attention",
    "models/backbone.py -> kedge.ext.cpu.matmul",
    "models/packing.py -> kedge.ext.cpu.joined_attention",
    "models/shared_base.py -> kedge.ext.cpu.patch",
    "ops/linear_logprob.py -> kedge.ext.cpu.matmul",
    "rewards/model.py -> kedge.ext.cpu.patch",
    "rollout/embedded/engine.py -> kedge.ext.cpu.patch",
    "suggestions.py -> kedge.ext.trl",
    "trainers/assembly/models.py -> kedge.ext.ray.placement",
    "trainers/assembly/models.py -> kedge.ext.ray.reference",
    "trainers/assembly/run.py -> kedge.ext.cpu.matmul",
    "trainers/assembly/run.py -> kedge.ext.open_instruct.config",
    "trainers/assembly/run.py -> kedge.ext.ray.placement",
    "trainers/assembly/run.py -> kedge.ext.ray.rewards",
    "trainers/hf_callbacks.py -> kedge.ext.ray.context",
    "trainers/run.py -> kedge.ext.report.doctor",
    "verifiers/__init__.py -> kedge.ext.ifeval.constraints",
    "verifiers/__init__.py -> kedge.ext.sandbox",
    "verifiers/__init__.py -> kedge.ext.sandbox.programs",
    "verifiers/compose.py -> kedge.ext.ifeval.constraints",
    "verifiers/compose.py -> kedge.ext.sandbox.programs",
}
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
    found = {
        re.sub(r":\d+ imports ", " -> ", v)
        for path in FILES
        for v in violations(path, path.read_text())
    }
    assert found == PENDING


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
