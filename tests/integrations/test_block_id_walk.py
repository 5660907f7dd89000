# SPDX-License-Identifier: Apache-2.0
"""The files that a block id passes on its way from vLLM to the core: those of the architecture page, and few."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from vllm_server import ASK_PREFILL, Server, request  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "architecture.md"
PROMPT = list(range(100, 110))
THEIRS, OURS = [3, 9, 1], [5, 6, 7]
MOST_FILES = 22


def holds(value: Any, ids: list[int], depth: int = 0) -> bool:
    """Whether the ids are in a value, as they are or inside of containers."""
    if isinstance(value, (list, tuple, array)):
        return list(value) == ids or (depth < 5 and any(holds(each, ids, depth + 1) for each in value[:8]))
    if is_dataclass(value) and depth < 5:
        return any(holds(getattr(value, each.name, None), ids, depth + 1) for each in fields(value))
    return False


def files_passed(run: Callable[[], object], ids: list[int]) -> set[str]:
    """The files of the product with a function that this thread calls with the ids among its arguments."""
    passed = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(ROOT) or file.is_relative_to(ROOT / "tests"):
            return
        if any(holds(value, ids) for name, value in frame.f_locals.items() if name != "self"):
            passed.add(file.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(before)
    return passed


def listed(side: str) -> set[str]:
    """The files that the page lists for a side."""
    section = PAGE.read_text().partition("## The way of a block id")[2].partition("\n## ")[0]
    row = next(line for line in section.splitlines() if line.startswith(f"| {side} "))
    return set(re.findall(r"`([\w/]+\.py)`", row))


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with Server("p") as prefill, Server("d") as decode:
        yield prefill, decode


def test_the_page_lists_the_files_that_block_ids_pass(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    owner, reader = set(), set()
    for number in range(2):  # the first pull connects
        answers: list[Any] = []
        prompt = [token + number for token in PROMPT]

        def offer(name: str = f"r{number}", prompt: list[int] = prompt, answers: list[Any] = answers) -> None:
            answers.append(prefill.prefill(request(name, prompt, ASK_PREFILL), THEIRS)[1])

        def pull(name: str = f"x{number}", prompt: list[int] = prompt, answers: list[Any] = answers) -> None:
            decode.loads(request(name, prompt, answers[0]), OURS)

        owner |= files_passed(offer, THEIRS)
        reader |= files_passed(pull, OURS)
        assert not decode.failed
        prefill.step_until(lambda name=f"r{number}": name in prefill.sent)
    assert owner == listed("owner")
    assert reader == listed("reader")
    assert max(len(owner), len(reader)) <= MOST_FILES
