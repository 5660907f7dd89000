# SPDX-License-Identifier: Apache-2.0
"""The library of the backend: what it exports, what it needs, and how large it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import PLUGINS

pytestmark = pytest.mark.verify

LIBRARY = PLUGINS / "libplugin_KVLINK.so"
MOST_BYTES = 2_500_000
SYSTEM = {
    "libc.so.6",
    "libm.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libpthread.so.0",
    "libdl.so.2",
}


def run(*command: object) -> str:
    """Runs a command and returns its output."""
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def test_it_exports_the_two_functions_that_nixl_looks_for() -> None:
    exported = run("nm", "-D", "--defined-only", LIBRARY)
    assert {line.split()[-1] for line in exported.splitlines()} == {"nixl_plugin_init", "nixl_plugin_fini"}


def test_it_needs_no_library_but_the_systems() -> None:
    needed = {
        line.split("[")[1].rstrip("]")
        for line in run("readelf", "-dW", LIBRARY).splitlines()
        if "NEEDED" in line
    }
    assert needed <= SYSTEM


def test_it_is_small(tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    run("strip", "-o", stripped, LIBRARY)
    assert stripped.stat().st_size < MOST_BYTES
