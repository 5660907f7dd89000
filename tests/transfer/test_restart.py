# SPDX-License-Identifier: Apache-2.0
"""Pulls that start again or connect again: by which rules, and that they do."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transports.pools import PoolSpec
from waiting import eventually, until

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.errors import (
    AccessDenied,
    Cancelled,
    ConfigError,
    CoordinatorUnavailable,
    KVLinkError,
    PeerUnreachable,
    StaleBlocks,
    TransferTimeout,
)
from kvlink.runtime.backoff import LONGEST_S
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull import FAILED, Pull
from kvlink.transfer.pull_request import PullSpec
from kvlink.transfer.reconnect import ReconnectBackoff
from kvlink.transfer.shared_connect import Key, SharedConnects

CUT_ONCE = ["fail-data@1", "break-data@1", "fail-slot@2", "break-slot@2"]
INTO = [7, 6, 5]


class Pair:
    """An owner, and a reader whose reads fail by a plan."""

    def __init__(self, fault: str, inline_us: int) -> None:
        self.opened = ExitStack()
        config = WorkerConfig(transports="loopback")
        self.owner = self.opened.enter_context(Worker(PoolSpec().make(), "owner", config=config))
        config = WorkerConfig(transports="fault+loopback", fault=fault, inline_us=inline_us, lanes=1)
        self.reader = self.opened.enter_context(Worker(PoolSpec().make(), "reader", config=config))
        for region, _ in enumerate(self.owner.pool.regions):
            self.owner.pool.numpy(region)[:] = 42

    def ticket(self) -> Ticket:
        return self.owner.offer("request", [1, 2, 3])

    def start(self, into: Any = INTO, **how: Any) -> Pull:
        ticket = self.ticket()
        self.reader.connect(ticket)
        return self.reader.pull(ticket, into, **how)

    def written(self) -> list[int]:
        """Blocks of the reader that hold nothing but what the owner's hold."""
        blocks = self.reader.pool.numpy().reshape(-1, PoolSpec().num_blocks, 16 * 2 * 64)
        full = (blocks == 42).all(axis=(0, 2))
        assert not blocks[:, ~full].any(), "a block is written in part"
        return [int(block) for block in full.nonzero()[0]]


@pytest.fixture(params=[0, 500], ids=["queued", "inline"])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Pair]]:
    with ExitStack() as pairs:

        def make(fault: str) -> Pair:
            pair = Pair(fault, request.param)
            pairs.callback(pair.opened.close)
            return pair

        yield make


@pytest.mark.parametrize("fault", CUT_ONCE)
def test_it_begins_again_when_it_was_cut(pair: Callable[[str], Pair], fault: str) -> None:
    two = pair(fault)
    pull = two.start()
    assert pull.wait()
    assert pull.stats.settled
    assert two.written() == sorted(INTO)
    taken = pull.explain()[0]
    assert "an injected fault" in taken.restarted
    assert f"read again after: {taken.restarted}" in str(taken)
    assert two.reader.stats().restarts == 1
    eventually(lambda: [event.request_id for event in two.owner.events()] == ["request"])


def test_a_pull_that_connects_first(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    assert two.reader.pull(two.ticket(), INTO).wait()
    assert two.written() == sorted(INTO)


def test_a_claim_that_no_coordinator_answers_blames_no_owner(pair: Callable[[str], Pair]) -> None:
    async def claim(_until: float) -> list[Ticket]:
        return await asyncio.Future()

    want = PullSpec(array("I", INTO), None, None, True)
    pull = pair("").reader._pulls.begin("request", claim, want, 0.0, complete=True)
    assert not pull.settle(), "no owner is known that could be told"
    with pytest.raises(CoordinatorUnavailable, match="request: no coordinator answered the claim"):
        pull.wait()


async def test_whoever_awaits_it_begins_again(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    assert (await two.start()).settled
    assert two.written() == sorted(INTO)


async def test_whoever_asks_whether_it_is_done_begins_again(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    await until(pull.done)
    assert pull.stats.settled
    assert two.reader.stats().restarts == 1


def test_it_begins_again_once(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1..2")
    pull = two.start()
    with pytest.raises(PeerUnreachable, match="request request from owner over fault"):
        pull.wait()
    assert pull.done()
    assert two.reader.stats().restarts == 1
    assert two.written() == []
    assert two.reader.pull(two.owner.offers.tickets()[0], INTO).wait(), "the lease still lives"


def test_threads_that_look_at_once_begin_again_once(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    together, ended = threading.Barrier(8), []

    def look() -> None:
        together.wait()
        ended.append(pull.wait())

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True] * 8
    assert two.reader.stats().restarts == 1


def test_a_refused_read_is_not_tried_again(pair: Callable[[str], Pair]) -> None:
    two = pair("deny-data@1")
    with pytest.raises(AccessDenied):
        two.start().wait()
    assert two.reader.stats().restarts == 0


def test_a_lease_that_has_ended_meanwhile_is_stale(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    two.owner.abort("request")
    with pytest.raises(StaleBlocks):
        pull.wait()


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_pull_that_ends_while_it_connects_again(
    pair: Callable[[str], Pair], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = pair("break-data@1")
    asked = threading.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    ticket = two.ticket()
    two.reader.connect(ticket)
    monkeypatch.setattr(Peers, "connect", never)
    pull = two.reader.pull(ticket, INTO)
    assert asked.wait(30)
    pull.cancel() if end == "cancel" else two.reader.close()
    assert pull.done()
    with pytest.raises(Cancelled, match=r"cancelled before|worker was closed"):
        pull.wait()
    assert two.written() == []


def test_the_caller_may_change_its_block_ids(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    into = array("I", INTO)
    pull = two.start(into)
    into[:] = array("I", [10, 11, 12])
    assert pull.wait()
    assert two.written() == sorted(INTO)


def test_an_owner_that_is_gone_is_why_the_pull_failed(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    two.owner.close()
    with pytest.raises(PeerUnreachable, match=r"an injected fault.*the pull could not restart:.*owner"):
        pull.wait()


def cut(*, transfers: int) -> Pull:
    """A pull of two parts of which the second one was cut, if there were transfers."""
    transfer = SimpleNamespace(failure=lambda: ("PeerUnreachable", "cut off", "", 0))
    core = SimpleNamespace(
        state=FAILED,
        done=lambda: True,
        wait=lambda _: True,
        failure=lambda: ("PeerUnreachable", "refused", "", 0),
        cut=lambda part: transfer if part == 1 else None,
    )
    peer = SimpleNamespace(transport="made up")
    owners = [(SimpleNamespace(worker_id=name, request_id="request"), peer) for name in ("kept", "lost")]
    pull = Pull(cast(Any, core), "request", cast(Any, owners))
    if transfers:
        pull._note_cuts([1])
    return pull


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError, PeerUnreachable),
        (StaleBlocks, StaleBlocks),
        (TransferTimeout, TransferTimeout),
        (Cancelled, Cancelled),
    ],
)
def test_what_it_fails_with(error: type[KVLinkError], kind: type[KVLinkError]) -> None:
    first = cut(transfers=0)
    first._error = error("no")
    with pytest.raises(error, match="no"):
        first.wait()
    again = cut(transfers=2)
    again._error = error("no")
    with pytest.raises(kind) as raised:
        again.wait()
    named = kind in (PeerUnreachable, TransferTimeout)
    assert str(raised.value).startswith("request request from lost over made up: cut off") == named


KEY = ("owner", 1)


class Clock:
    """Does not advance unless a test moves it."""

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


async def test_an_attempt_at_the_deadline_itself_would_be_too_late(agent: Agent) -> None:
    agent.answers.put_nowait(PeerUnreachable("refused"))
    with pytest.raises(PeerUnreachable, match="next attempt in"):
        await agent.call(in_s=0.05)
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
