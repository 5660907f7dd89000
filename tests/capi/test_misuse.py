# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of the library for C, and threads that use it beside each other, end in a code and not in a crash."""

from __future__ import annotations

import subprocess

from capi.built import built


def test_misuse_ends_in_a_code() -> None:
    ran = subprocess.run([built("kvlink_misuse")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "checks passed" in ran.stdout


def test_threads_beside_each_other() -> None:
    """Among them handles that are guessed, and objects that are closed while they connect."""
    ran = subprocess.run([built("kvlink_threads")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "nothing was wrong\n"
