# SPDX-License-Identifier: Apache-2.0
"""The example in C of docs/getting-started/native.md compiles with the header and the library, and works."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from capi.built import HEADERS, ROOT, built


def test_the_example(tmp_path: Path) -> None:
    library = built("libkvlink.so.1")
    program = tmp_path / "native"
    source = ROOT / "docs" / "examples" / "native.c"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{HEADERS}"]
    subprocess.run(["cc", *flags, "-o", program, source, library, f"-Wl,-rpath,{library.parent}"], check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "owner: the offer was settled" in ran.stdout
    assert "reader: valid, settled; 98304 bytes" in ran.stdout


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_the_lines_of_the_page(tmp_path: Path) -> None:
    """As they stand, but in a folder of their own and with the core that `make build` made."""
    cores = [*(ROOT / "build").glob("cp*/libkvlink_core.a")]
    if not cores:
        pytest.skip("no core is built: run make build")
    page = (ROOT / "docs" / "getting-started" / "native.md").read_text()
    lines = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[0]
    lines = lines.replace("cmake -S .", f"cmake -S {ROOT} -DKVLINK_CORE={cores[0]}")
    lines = lines.replace("docs/examples", f"{ROOT}/docs/examples")
    ran = subprocess.run(["sh", "-ec", lines], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "owner: the offer was settled" in ran.stdout
