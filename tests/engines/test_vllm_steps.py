# SPDX-License-Identifier: Apache-2.0
"""Hand-overs in parts between two schedulers of vLLM whose steps the test makes: what happens between two chunks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from servers import ENGINES, MODELS

PYTHON = ENGINES / "vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]


@pytest.mark.parametrize(
    ("scenario", "announced", "loaded"),
    [
        ("full", "s", {"full.0": 202, "full.1": 202}),
        ("windows", "s", {"full.0": 202, "full.1": 202, "window.0": 42, "window.1": 42}),
        ("preempted", None, {}),
        ("aborted", "s", {}),
    ],
)
def test_between_two_chunks(scenario: str, announced: str | None, loaded: dict[str, int]) -> None:
    """Part of the prompt is at decode before prefill has its third chunk; in the end nothing is left anywhere."""
    command = [str(PYTHON), str(Path(__file__).with_name("stepping.py")), str(MODELS / "llama"), scenario]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert said == {"announced": announced, "loaded": loaded, "left": [[0, 0], [0, 0]]}
