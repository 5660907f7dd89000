# SPDX-License-Identifier: Apache-2.0
"""docs/design/architecture.md shows the rooms as they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import house  # noqa: E402

PAGE = (ROOT / "docs" / "design" / "architecture.md").read_text()


def test_the_picture_is_that_of_the_code() -> None:
    assert house.PICTURE.read_text() == house.picture(), "run `python docs/_ext/house.py`"


def test_nothing_imports_upward() -> None:
    assert {title: house.upward(rows, arrows) for title, (rows, arrows) in house.panels().items()} == {
        "kvlink": set(),
        "integrations/vllm": set(),
        "csrc": set(),
    }


def test_an_upward_arrow_and_a_circle_are_found() -> None:
    assert house.upward([["worker"], ["errors"]], {("errors", "worker")}) == {("errors", "worker")}
    with pytest.raises(ValueError, match="a circle"):
        house.rows_of({("plan", "lease"), ("lease", "plan")})


def test_every_room_is_in_the_picture() -> None:
    shown = {room for rows, _ in house.panels().values() for row in rows for room in row}
    folders = {path.parent.name for path in (ROOT / "kvlink").glob("*/__init__.py")}
    folders |= {path.parent.name for path in (ROOT / "integrations" / "vllm").glob("*/__init__.py")}
    folders |= {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert folders <= shown


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:kvlink|integrations|csrc|tests|docs)/[\w./-]+)`", PAGE)))
)
def test_paths_of_the_page_exist(path: str) -> None:
    assert (ROOT / path).exists()
