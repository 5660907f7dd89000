# SPDX-License-Identifier: Apache-2.0
"""The main job over RDMA. Slow: an emulated CPU takes many minutes to import a transformer three times."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_are_equal_over_verbs() -> None:
    command = [sys.executable, "-m", "kvlink", "demo", "--transport", "verbs", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row["transport"] == "verbs"
    assert row["tokens_equal"] is True
