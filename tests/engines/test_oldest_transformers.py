# SPDX-License-Identifier: Apache-2.0
"""The oldest transformers that kvlink takes: tests of tests/integrations once more, in an environment of that version.
`.ci/engines transformers` makes it; `make verify` runs them with the newest.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from servers import ENGINES, ROOT

PYTHON = ENGINES / "transformers" / "bin" / "python"

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="no transformers: run .ci/engines transformers"),
]


@pytest.mark.parametrize(
    "name",
    [
        "transformers",
        "transformers_rings",
        "transformers_windows",
        "transformers_hostile",
        "transformers_ends",
    ],
)
def test_all_of_its_tests_pass(name: str) -> None:
    # -P: the kvlink that is installed, and not this checkout's.
    pytest_of_its_own = [str(PYTHON), "-P", "-m", "pytest"]
    command = [*pytest_of_its_own, "-q", "-p", "no:cacheprovider", f"tests/integrations/test_{name}.py"]
    env = os.environ | {"REQUIRE_LANES": "integrations"}  # of that run
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(ran.stdout[-3000:])
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-3000:]
    assert "skipped" not in ran.stdout
