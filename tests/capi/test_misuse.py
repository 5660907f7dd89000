# SPDX-License-Identifier: Apache-2.0
"""Each wrong use of the library for C ends in a code, and not in a crash."""

from __future__ import annotations

import subprocess

from capi.built import built


def test_misuse_ends_in_a_code() -> None:
    ran = subprocess.run([built("kvlink_misuse")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "checks passed" in ran.stdout
