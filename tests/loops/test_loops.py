# SPDX-License-Identifier: Apache-2.0
"""Every background loop goes on after an exception that nobody expects. The list of loops is drawn from the code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from loops.rows import SCENES
from supervision import loops

from kvlink.runtime.supervised import failures

for module in sorted(Path(__file__).parent.glob("loops_of_*.py")):
    importlib.import_module(f"loops.{module.stem}")


def test_every_loop_has_a_scene_and_every_scene_a_loop() -> None:
    assert {loop.name for loop in loops()} == SCENES.keys(), "add a scene to a module loops_of_*.py"


@pytest.mark.parametrize("name", sorted(SCENES))
def test_a_loop_goes_on_after_an_exception_that_nobody_expects(name: str) -> None:
    before = failures().get(name, 0)
    SCENES[name]()
    assert failures()[name] > before
