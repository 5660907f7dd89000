# SPDX-License-Identifier: Apache-2.0
"""The oldest transformers that kvlink takes: tests/integrations/test_transformers.py once more, in an environment of
that version. `.ci/engines transformers` makes it; `make test` runs them with the newest.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from servers import ENGINES, ROOT

PYTEST = ENGINES / "transformers" / "bin" / "pytest"

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTEST.exists(), reason="no transformers: run .ci/engines transformers"),
]


def test_all_of_its_tests_pass() -> None:
    command = [str(PYTEST), "-q", "-p", "no:cacheprovider", "tests/integrations/test_transformers.py"]
    env = os.environ | {"REQUIRE_LANES": "integrations"}  # of that run
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(ran.stdout[-3000:])
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-3000:]
    assert "skipped" not in ran.stdout
