# SPDX-License-Identifier: Apache-2.0
"""Which failed connects make others wait."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvlink.attempts import Attempts
from kvlink.errors import PeerUnreachable
from kvlink.peers import Peers
from kvlink.types import WorkerCard


class Nobody:
    """Answers no earlier than `after_s`, and then not either."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s

    async def card(self, worker_id: str, epoch: int, agent: str, *, fresh: bool) -> WorkerCard:
        await asyncio.sleep(self.after_s)
        raise PeerUnreachable("nobody there")

    async def connect(self, *_: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(("timeout_s", "after_s", "counts"), [(0.02, 0.03, 0), (20.0, 0.0, 3)])
async def test_who_has_no_time_makes_nobody_wait(timeout_s: float, after_s: float, counts: int) -> None:
    engine: Any = SimpleNamespace()
    peers = Peers(engine, Nobody(after_s))
    with pytest.raises(PeerUnreachable, match="nobody there"):
        await peers._connect_with_backoff(("w", 1), "agent", time.monotonic() + timeout_s)
    assert peers._attempts["w", 1].failures == counts


def test_who_only_says_nothing_may_be_slow_for_ten_seconds() -> None:
    attempts = Attempts()
    attempts.failed("timed out", began=100.0, now=102.0, silent=True)
    assert attempts.may_be_slow(102.0)
    attempts.failed("timed out", began=107.0, now=109.0, silent=True)
    assert attempts.may_be_slow(109.9)
    assert not attempts.may_be_slow(110.0)


def test_who_refuses_is_not_slow() -> None:
    attempts = Attempts()
    attempts.failed("timed out", began=100.0, now=102.0, silent=True)
    attempts.failed("connection refused", began=102.1, now=102.2, silent=False)
    assert not attempts.may_be_slow(102.2)
