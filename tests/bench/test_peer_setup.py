# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench peers` says how to get libraries that are not installed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from kvlink.benchmarks.peers import setup
from kvlink.benchmarks.peers.contender import KVLINK


def test_a_checkout_has_a_command_for_it(tmp_path: Path) -> None:
    rows = [{"peer": "nixl", "why_not": "not installed"}]
    assert setup.advice(rows, tmp_path) == "not installed: nixl; to compare with them, run\n    make peers"


def test_an_installed_package_says_how_to_install_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "_CHECKOUT", tmp_path)
    rows = [{"peer": peer, "why_not": "not installed"} for peer in ("ucx", "nixl", "ucx", "uccl")]
    first, *commands = setup.advice([*rows, {"peer": KVLINK}], tmp_path / "a b").splitlines()
    assert first == "not installed: nixl, ucx; to compare with them, run"
    words = [shlex.split(command) for command in commands]
    assert words[:2] == [
        [sys.executable, "-m", "venv", f"{tmp_path}/a b/nixl"],
        [f"{tmp_path}/a b/nixl/bin/python", "-m", "pip", "install", "--no-deps", "-r", words[1][-1]],
    ]
    assert "nixl" in Path(words[1][-1]).read_text()
    assert words[-1][0] == "g++"
    assert Path(next(word for word in words[-1] if word.endswith("ucx.cc"))).exists()
    setup.python_of("nixl", tmp_path).parent.mkdir(parents=True)
    setup.python_of("nixl", tmp_path).touch()
    assert setup.advice(rows[1:2], tmp_path) == ""
