"""Run the programs and write what happened: ``python -m tests.compat [NAME ...]``.

KEDGE_SHARED: folder with ``data/stories260k`` and the others.
KEDGE_TRL_REPOSITORY: a clone of TRL with its tags; by default it is cloned.
KEDGE_COMPAT_VENVS: folder of environments, one per ``Case.environment``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from tests.compat.cases import CASES, Case
from tests.compat.page import VERSIONS, write_page, write_results
from tests.compat.workspace import prepare

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.json"
TRL = "https://github.com/huggingface/trl"


def repository(cache: Path) -> str:
    """TRL's repository, cloned if it is not given."""
    if given := os.environ.get("KEDGE_TRL_REPOSITORY"):
        return given
    folder = cache / "trl.git"
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", "--bare", TRL, folder], check=True)
    return str(folder)


def script(case: Case, cache: Path) -> str:
    """A path to the program, as it is in its release."""
    if case.source.startswith("-m "):
        return case.source.removeprefix("-m ")
    tag, path = case.source.split(":")
    file = cache / tag / path
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        command = ["git", f"--git-dir={repository(cache)}", "show", f"{tag}:{path}"]
        file.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return str(file)


def run(case: Case, cache: Path, venvs: Path) -> dict[str, object]:
    """Run one program; returns its row of the results."""
    python = venvs / case.environment / "bin" / "python"
    if not python.exists():
        return {"ok": None, "why": f"no environment {case.environment}"}
    work = cache / "work"
    shutil.rmtree(work / "out", ignore_errors=True)
    environment = {
        **os.environ,
        **case.variables,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-W", "ignore", "-m", "kedge.compat", "run", *case.compat]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, script(case, cache), *case.arguments],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    seconds = time.monotonic() - begin
    missing = [name for name in case.expect if not (work / name).exists()]
    versions = subprocess.run(
        [python, "-c", VERSIONS, *case.packages], capture_output=True, text=True, check=True
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    why = f"did not write {', '.join(missing)}" if missing else ""
    (cache / f"{case.name}.log").write_text(done.stdout + done.stderr)
    return {
        "ok": done.returncode == 0 and not missing,
        "why": last if done.returncode else why,
        "seconds": round(seconds),
        "date": date.today().isoformat(),
        "versions": json.loads(versions.stdout),
    }


def main(names: list[str]) -> None:
    """Run all programs, or the named ones; exits with 1 if one fails."""
    cache = Path(os.environ.get("KEDGE_COMPAT_CACHE", ROOT / ".compat")).resolve()
    venvs = Path(os.environ.get("KEDGE_COMPAT_VENVS", ROOT / ".compat" / "venvs")).resolve()
    prepare(cache / "work", Path(os.environ["KEDGE_SHARED"]) / "data")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for case in CASES:
        if names and case.name not in names:
            continue
        results[case.name] = row = run(case, cache, venvs)
        print(case.name, row["ok"], row.get("seconds", ""), row["why"], flush=True)  # noqa: T201
        failed += [case.name] if row["ok"] is False else []
        write_results(RESULTS, dict(sorted(results.items())))
    matrix = json.loads((Path(__file__).parent / "matrix.json").read_text())
    write_page(CASES, results, matrix, ROOT / "docs" / "compatibility.md")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
