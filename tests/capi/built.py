# SPDX-License-Identifier: Apache-2.0
"""Finds what `make test-cpp` has built in C: the library, and the programs of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "csrc" / "capi"


def built(name: str) -> Path:
    """Returns the path of a program or a library. KVLINK_CAPI_BUILD is a folder of another build, such as asan.

    Skips the test if there is none.
    """
    path = ROOT / "build" / os.environ.get("KVLINK_CAPI_BUILD", "cpp") / name
    if not path.exists():
        pytest.skip(f"{path.name} is not built: run make test-cpp")
    return path
