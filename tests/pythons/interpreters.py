# SPDX-License-Identifier: Apache-2.0
"""Finds the Pythons that the package's metadata names. As a program, it prints one a line: its version and its path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def named() -> list[str]:
    """Returns the versions in the classifiers of pyproject.toml, the oldest first."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def python(version: str) -> str | None:
    """Returns the path of a Python of this version that runs, or None. pyenv's shims may stand for nothing."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    places = [
        shutil.which(f"python{version}"),
        *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"))),
    ]
    for place in places:
        if place is None:
            continue
        said = subprocess.run([place, "-V"], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.startswith(f"Python {version}."):
            return place
    return None


def why_not(version: str) -> str:
    """Returns the reason of a skip."""
    return f"no python{version} runs here; `pyenv install {version}` makes one, or put one on PATH"


if __name__ == "__main__":
    for each in named():
        place = python(each)
        print(each, place) if place else print(why_not(each), file=sys.stderr)
