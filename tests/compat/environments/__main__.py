"""Make the environments: packages of this one, and over them those of ``NAME.txt``.

``trl`` is this environment itself.  Packages are installed without their dependencies, which the
lists name, so that a list decides which version is used.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# LLaMA-Factory imports it always; its wheel needs CUDA, and runs on text do not call it.
EMPTY = {"llamafactory": "torchaudio", "llamafactory-peft": "torchaudio"}


def make(folder: Path, requirements: Path) -> None:
    """Make one environment, unless it exists with the same requirements."""
    name, stamp = requirements.stem, folder / "requirements.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return
    venv.create(folder, clear=True, symlinks=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "zz_base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--ignore-installed", "-r", requirements], check=True)
    if name in EMPTY:
        (site / f"{EMPTY[name]}.py").touch()
    stamp.write_text(requirements.read_text())


def main(folder: Path) -> None:
    """Make all environments in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / "trl"
    if not own.exists():
        own.symlink_to(sys.prefix)
    for requirements in sorted(Path(__file__).parent.glob("*.txt")):
        make(folder / requirements.stem, requirements)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
