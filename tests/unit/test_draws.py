# SPDX-License-Identifier: Apache-2.0
"""Hypothesis draws the same values in the gate whatever ran before."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(
    "KVLINK_TEST_SEED" in os.environ, reason="a seed was given: unset KVLINK_TEST_SEED"
)


def draws() -> list[tuple[int, str]]:
    drawn: list[tuple[int, str]] = []

    @given(st.integers(), st.text(max_size=10))
    def collect(number: int, text: str) -> None:
        drawn.append((number, text))

    collect()
    return drawn


def test_draws_do_not_depend_on_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = draws()
    path = tmp_path / "constants.py"
    path.write_text(
        "".join(f"A{number} = {number * 7919 + 1000}; B{number} = 'w{number}'\n" for number in range(99))
    )
    spec = importlib.util.spec_from_file_location("constants_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "constants_of_a_test", module)
    assert draws() == before


def test_no_example_of_an_earlier_run_is_drawn() -> None:
    now = hypothesis.settings()
    assert (now.derandomize, now.database, now.deadline) == (True, None, None)
