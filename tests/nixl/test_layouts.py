# SPDX-License-Identifier: Apache-2.0
"""The declarations of NIXL's plugin interface are those of its headers.

KVLINK_NIXL_SOURCES is a checkout of NIXL: github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.verify

HERE = Path(__file__).resolve().parent
PLUGIN = HERE.parents[1] / "integrations" / "nixl"
FOLDERS = ("src/api/cpp", "src/core/telemetry", "src/infra", "src/core", "src/utils", "src")
# NIXL's own logs by absl, of which its headers need two macros.
LOG = """\
#pragma once
#include <cassert>
#include <iostream>
#define NIXL_ERROR std::cerr
#define NIXL_ASSERT(x) assert(x)
"""


@pytest.mark.skipif(
    "KVLINK_NIXL_SOURCES" not in os.environ, reason="set KVLINK_NIXL_SOURCES to a checkout of NIXL"
)
def test_layouts_and_places_are_the_same(tmp_path: Path) -> None:
    sources = Path(os.environ["KVLINK_NIXL_SOURCES"])
    log = tmp_path / "stub" / "common" / "nixl_log.h"
    log.parent.mkdir(parents=True)
    log.write_text(LOG)
    folders = [tmp_path / "stub", PLUGIN, *(sources / folder for folder in FOLDERS)]
    program = tmp_path / "layouts"
    subprocess.run(
        ["c++", "-std=c++20", "-o", program, HERE / "layouts.cc", *(f"-I{folder}" for folder in folders)],
        check=True,
    )
    compared = subprocess.run([program], capture_output=True, text=True)
    assert compared.returncode == 0, compared.stdout
    assert "25 functions compared" in compared.stdout
