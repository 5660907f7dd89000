# SPDX-License-Identifier: Apache-2.0
"""Which failed connects make others wait."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvlink.errors import Cancelled, KVLinkError, PeerUnreachable, StaleBlocks, TransferTimeout
from kvlink.runtime.backoff import LONGEST_S
from kvlink.transfer.peer import Peer
from kvlink.transfer.reconnect import ReconnectBackoff
from kvlink.transfer.shared_connect import Key, SharedConnects

KEY = ("owner", 1)


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Agent:
    """Each attempt to connect to it ends when the test says so, with what the test says."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.given_s: list[float] = []
        self.answers: asyncio.Queue[Peer | KVLinkError] = asyncio.Queue()
        self.connects = SharedConnects(self.attempt, self.clock)

    async def attempt(self, key: Key, agent: str, timeout_s: float, fresh: bool) -> Peer | None:
        self.given_s.append(timeout_s)
        answer = await self.answers.get()
        if isinstance(answer, KVLinkError):
            raise answer
        return answer

    def call(self, in_s: float) -> asyncio.Task[Peer | None]:
        """A caller that has so many seconds."""
        return asyncio.create_task(self.connects.connect(KEY, "agent", self.clock.now + in_s))


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent, sleep = Agent(), asyncio.sleep

    async def pass_time(seconds: float) -> None:
        agent.clock.now += seconds
        await sleep(0)

    monkeypatch.setattr("kvlink.transfer.shared_connect.asyncio.sleep", pass_time)
    return agent


PEER = cast(Peer, "connected")


async def test_a_caller_without_time_leaves_the_connect_to_others(agent: Agent) -> None:
    short = agent.call(in_s=0.001)
    while not agent.given_s:
        await asyncio.sleep(0)
    long = agent.call(in_s=60.0)
    with pytest.raises(TransferTimeout, match="not connected within the deadline"):
        await short
    agent.clock.now += 1.0
    agent.answers.put_nowait(PeerUnreachable("no answer", silent=True))
    agent.answers.put_nowait(PEER)
    assert await long is PEER
    assert agent.given_s == [1.0, 5.0], "no attempt was cut short by the first caller's deadline"


async def test_a_connect_goes_on_when_all_callers_have_gone(agent: Agent) -> None:
    with pytest.raises(TransferTimeout):
        await agent.call(in_s=0.001)
    later = agent.call(in_s=60.0)
    agent.answers.put_nowait(PEER)
    assert await later is PEER
    assert len(agent.given_s) == 1


async def test_nobody_waits_for_another_attempt_without_time(agent: Agent) -> None:
    with pytest.raises(TransferTimeout):
        await agent.call(in_s=0.001)
    agent.answers.put_nowait(PeerUnreachable("refused"))
    while agent.connects._running:
        await asyncio.sleep(0)
    assert len(agent.given_s) == 1
    with pytest.raises(PeerUnreachable, match=r"refused; next attempt in 0\.05 s"):
        await agent.call(in_s=0.01)
    assert len(agent.given_s) == 1


async def test_attempts_go_on_until_the_latest_deadline(agent: Agent) -> None:
    callers = [agent.call(in_s) for in_s in (30.0, 60.0, 20.0)]
    while not agent.given_s:
        await asyncio.sleep(0)
    agent.clock.now += 40.0
    agent.answers.put_nowait(PeerUnreachable("no answer", silent=True))
    agent.answers.put_nowait(PEER)
    assert await callers[1] is PEER


async def test_a_cancelled_caller_waits_no_longer(agent: Agent) -> None:
    caller = agent.call(in_s=60.0)
    while not agent.given_s:
        await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    agent.answers.put_nowait(PeerUnreachable("no answer", silent=True))
    while agent.connects._running:
        await asyncio.sleep(0)
    assert len(agent.given_s) == 1


async def test_now_or_not_at_all_connects_to_nobody(agent: Agent) -> None:
    with pytest.raises(TransferTimeout):
        await agent.call(in_s=0.0)
    assert agent.given_s == []


async def test_an_owner_that_refuses_gets_three_attempts(agent: Agent) -> None:
    for _ in range(3):
        agent.answers.put_nowait(PeerUnreachable("nobody there"))
    with pytest.raises(PeerUnreachable, match="nobody there"):
        await agent.call(in_s=60.0)
    assert len(agent.given_s) == 3
    assert agent.connects.num_retries == 2


async def test_who_has_much_time_waits_longer_for_who_says_nothing(agent: Agent) -> None:
    for _ in range(5):
        agent.answers.put_nowait(PeerUnreachable("timed out", silent=True))
    agent.answers.put_nowait(StaleBlocks("owner restarted"))
    with pytest.raises(StaleBlocks):
        await agent.call(in_s=3600.0)


def test_who_only_says_nothing_may_be_slow_for_ten_seconds() -> None:
    attempts = ReconnectBackoff()
    attempts.failed("timed out", began=100.0, now=102.0, silent=True)
    assert attempts.may_be_slow(102.0, allowed_s=5.0)
    attempts.failed("timed out", began=107.0, now=109.0, silent=True)
    assert attempts.may_be_slow(109.9, allowed_s=5.0)
    assert not attempts.may_be_slow(110.0, allowed_s=30.0)


def test_who_only_says_nothing_may_be_slow_for_a_third_of_a_long_time() -> None:
    attempts = ReconnectBackoff()
    attempts.failed("timed out", began=100.0, now=105.0, silent=True)
    assert attempts.may_be_slow(129.9, allowed_s=90.0)
    assert not attempts.may_be_slow(130.0, allowed_s=90.0)


def test_who_refuses_is_not_slow() -> None:
    attempts = ReconnectBackoff()
    attempts.failed("timed out", began=100.0, now=102.0, silent=True)
    attempts.failed("connection refused", began=102.1, now=102.2, silent=False)
    assert not attempts.may_be_slow(102.2, allowed_s=90.0)


def test_the_delay_stays_the_longest_however_often_attempts_fail() -> None:
    attempts = ReconnectBackoff()
    for _ in range(2000):
        attempts.failed("connection refused", began=100.0, now=100.0, silent=False)
    assert attempts.not_before == 100.0 + LONGEST_S


async def test_closing_ends_the_attempts_and_whoever_waits_for_one(agent: Agent) -> None:
    waiting = agent.call(in_s=3600.0)
    while not agent.given_s:
        await asyncio.sleep(0)
    agent.connects.close()
    with pytest.raises(Cancelled, match="owner: this worker is closed"):
        await waiting
    with pytest.raises(Cancelled):
        await agent.call(in_s=3600.0)
    assert agent.given_s == [5.0]
    assert asyncio.all_tasks() == {asyncio.current_task()}
