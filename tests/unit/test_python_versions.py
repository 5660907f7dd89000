# SPDX-License-Identifier: Apache-2.0
"""Each Python that the metadata names has what the sources use. `make test-pythons` also imports every module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pythons.interpreters import ROOT, named, python, why_not

NAMES = ROOT / "tests" / "pythons" / "names.py"


def found_by(interpreter: str, *folders: Path) -> str:
    call = [interpreter, "-I", str(NAMES), *map(str, folders)]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout


def interpreter_of(version: str) -> str:
    interpreter = python(version)
    if interpreter is None:
        pytest.skip(why_not(version))
    return interpreter


@pytest.mark.parametrize("version", named())
def test_the_standard_library_has_what_the_sources_use(version: str) -> None:
    folders = [ROOT / name for name in ("kvlink", "integrations", "benchmarks")]
    assert found_by(interpreter_of(version), *folders).strip() == ""


def test_the_oldest_is_that_of_the_metadata_and_of_the_checkers() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    oldest = named()[0]
    assert f'requires-python = ">={oldest}"' in text
    assert f'python_version = "{oldest}"' in text
    assert f'target-version = "py{oldest.replace(".", "")}"' in text


LATER = """import asyncio
import tomllib
from typing import Any, Self
async def wait() -> None:
    async with asyncio.timeout(1):
        raise ExceptionGroup("", [])
if sys.version_info >= (3, 11):
    from typing import Never
try:
    from typing import LiteralString
except ImportError:
    LiteralString = str
"""


def test_what_came_later_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(LATER)
    (tmp_path / "b.py").write_text("type A = int\n")
    found = found_by(interpreter_of("3.10"), tmp_path).replace(f"{tmp_path}/", "").splitlines()
    assert [line.partition(": ")[0] for line in found] == ["a.py:2", "a.py:3", "a.py:5", "a.py:6", "b.py:1"]


def test_what_never_was_is_found(tmp_path: Path) -> None:
    source = "import os.path\nimport json as j\nos.path.nothing\nj.nothing\nno_such_name\n"
    (tmp_path / "a.py").write_text(source)
    assert len(found_by(sys.executable, tmp_path).splitlines()) == 3
