# SPDX-License-Identifier: Apache-2.0
"""Which failed connects make others wait."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvlink.attempts import Attempts
from kvlink.errors import PeerUnreachable, StaleBlocks
from kvlink.peers import Peers
from kvlink.traffic import Traffic
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


class Silent(Nobody):
    """Says nothing to so many calls; then somebody else is there."""

    def __init__(self, calls: int) -> None:
        super().__init__(after_s=0.0)
        self.calls_left = calls

    async def card(self, worker_id: str, epoch: int, agent: str, *, fresh: bool) -> WorkerCard:
        if not self.calls_left:
            raise StaleBlocks(f"{worker_id} restarted")
        self.calls_left -= 1
        raise PeerUnreachable("timed out", silent=True)


@pytest.mark.verify
@pytest.mark.parametrize(("timeout_s", "after_s", "counts"), [(0.02, 0.03, 0), (20.0, 0.0, 3)])
async def test_who_has_no_time_makes_nobody_wait(timeout_s: float, after_s: float, counts: int) -> None:
    engine: Any = SimpleNamespace(traffic=Traffic())
    peers = Peers(engine, Nobody(after_s))
    with pytest.raises(PeerUnreachable, match="nobody there"):
        await peers._connect_with_backoff(("w", 1), "agent", time.monotonic() + timeout_s)
    assert peers._attempts["w", 1].failures == counts


@pytest.mark.verify
async def test_who_has_much_time_waits_longer_for_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.attempts._SILENCE_S", 0.0)
    engine: Any = SimpleNamespace(traffic=Traffic())
    peers = Peers(engine, Silent(calls=5))
    with pytest.raises(StaleBlocks):
        await peers._connect_with_backoff(("w", 1), "agent", time.monotonic() + 3600)


def test_who_only_says_nothing_may_be_slow_for_ten_seconds() -> None:
    attempts = Attempts()
    attempts.failed("timed out", began=100.0, now=102.0, silent=True)
    assert attempts.may_be_slow(102.0, allowed_s=5.0)
    attempts.failed("timed out", began=107.0, now=109.0, silent=True)
    assert attempts.may_be_slow(109.9, allowed_s=5.0)
    assert not attempts.may_be_slow(110.0, allowed_s=30.0)


def test_who_only_says_nothing_may_be_slow_for_a_third_of_a_long_time() -> None:
    attempts = Attempts()
    attempts.failed("timed out", began=100.0, now=105.0, silent=True)
    assert attempts.may_be_slow(129.9, allowed_s=90.0)
    assert not attempts.may_be_slow(130.0, allowed_s=90.0)


def test_who_refuses_is_not_slow() -> None:
    attempts = Attempts()
    attempts.failed("timed out", began=100.0, now=102.0, silent=True)
    attempts.failed("connection refused", began=102.1, now=102.2, silent=False)
    assert not attempts.may_be_slow(102.2, allowed_s=90.0)
