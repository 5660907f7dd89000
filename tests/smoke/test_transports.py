# SPDX-License-Identifier: Apache-2.0
"""One pull over each transport from a worker in another process: the right bytes arrive, and the blocks come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from transports.pairs import POISON, Pair
from transports.processes import PeerProcess
from waiting import eventually

from kvlink import _core


def _transports() -> list[object]:
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why_not}. {fix}")] if why_not else [])
        for name, _, _, why_not, fix in _core.transports()
        if name != "loopback"
    ]


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    with closing(PeerProcess()) as peer:
        yield peer


@pytest.mark.parametrize("transport", _transports())
def test_a_pull_from_another_process(peer: PeerProcess, transport: str) -> None:
    with closing(Pair(peer, "smoke", transport)) as pair:
        pull = pair.pull(pair.offer([3, 1, 8]), [5, 6, 7])
        assert pull.explain()[0].transport == transport
        assert pull.stats.settled
        untouched = np.delete(pair.blocks(), [5, 6, 7], axis=0)
        assert not (untouched == POISON).all(axis=1).any()
        assert not untouched.any()
        eventually(lambda: pair.owner.do("counts")["settled"] == 1)
