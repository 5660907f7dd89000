# SPDX-License-Identifier: Apache-2.0
"""Asking whether work on a GPU has ended breaks no capture of a graph that the engine makes meanwhile."""

from __future__ import annotations

import pytest

from kvlink import _core
from kvlink.transfer.device_work import has_ended


class Relaxed:
    """Stands for the guard of the core."""

    depth = 0

    def __enter__(self) -> None:
        Relaxed.depth += 1

    def __exit__(self, *_: object) -> None:
        Relaxed.depth -= 1


class Work:
    """Has ended, which it says only where a capture does not mind."""

    def query(self) -> bool:
        return Relaxed.depth == 1


def test_the_question_is_asked_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "RelaxedCapture", Relaxed)
    assert has_ended(Work())
    assert Relaxed.depth == 0


def test_the_guard_does_nothing_without_cuda() -> None:
    with _core.RelaxedCapture():
        pass
