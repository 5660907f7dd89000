# SPDX-License-Identifier: Apache-2.0
"""The life of a lease, and the reasons of a stale one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import pytest
from transports.pairs import POISON, Pair
from transports.pools import PoolSpec, wide
from transports.processes import PeerProcess, RemoteWorker, eventually, free_ports

from kvlink import LeaseEnd, Ticket, Worker
from kvlink.errors import (
    Cancelled,
    ConfigError,
    CoordinatorError,
    KVLinkError,
    PeerUnreachable,
    StaleBlocks,
    StaleReason,
    UnknownRequest,
)
from kvlink.ticket import LeaseSeat

NewPair = Callable[..., Pair]


def test_settling_gives_the_blocks_back_and_a_second_pull_is_stale(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    ticket = pair.offer([3, 9, 4], request_id="first")
    assert pair.owner.do("counts")["active"] == 1
    assert pair.pull(ticket, [0, 1, 2]).stats.settled
    assert pair.owner.fate_of("first") == "settled"
    counts = pair.owner.do("counts")
    assert (counts["active"], counts["granted"], counts["settled"]) == (0, 1, 1)
    with pytest.raises(StaleBlocks, match="first"):
        pair.start(ticket, [5, 6, 7]).wait(20)


def test_a_pull_that_does_not_settle_may_be_repeated(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    ticket = pair.offer([3, 9], request_id="again")
    for _ in range(3):
        assert not pair.pull(ticket, [4, 8], settle=False).stats.settled
    assert pair.owner.do("events") == []
    pair.pull(ticket, [4, 8])
    assert pair.owner.fate_of("again") == "settled"


def test_blocks_come_back_when_the_last_of_several_readers_has_settled(
    transport: str, new_owner: Callable[..., RemoteWorker], new_reader: Callable[..., Worker]
) -> None:
    owner = new_owner(PoolSpec(total_heads=4), transports=transport)
    ticket = owner.offer([1, 2, 3], request_id="shared", readers=4)
    for rank in range(4):
        assert owner.do("events") == []
        assert owner.do("counts")["active"] == 1
        reader = new_reader(PoolSpec(total_heads=4, tp_rank=rank, tp_size=4), transports=transport)
        assert reader.pull(ticket, [5, 6, 7]).wait(20)
    assert owner.fate_of("shared") == "settled"


def test_a_ticket_with_too_few_seats_says_how_many_it_needs(
    transport: str, new_owner: Callable[..., RemoteWorker], new_reader: Callable[..., Worker]
) -> None:
    owner = new_owner(PoolSpec(total_heads=4), transports=transport)
    reader = new_reader(PoolSpec(total_heads=4, tp_rank=3, tp_size=4), transports=transport)
    with pytest.raises(ConfigError, match="readers=4"):
        reader.pull(owner.offer([1], readers=3), [2]).wait(20)


def test_an_offer_that_nobody_settles_expires(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    ticket = pair.offer([3], request_id="late", ttl_s=0.05)
    assert pair.owner.fate_of("late") == "expired"
    assert pair.owner.do("counts")["expired"] == 1
    with pytest.raises(StaleBlocks):
        pair.start(ticket, [4]).wait(20)
    with pytest.raises(UnknownRequest):
        pair.owner.do("extend", request_id="late", ttl_s=5)
    pair.works()


def test_an_extended_offer_outlives_its_first_time_to_live(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    for ttl_s in (0.2, 1.0, 5.0):
        short, long = (pair.offer([3], ttl_s=ttl_s) for _ in range(2))
        try:
            pair.owner.do("extend", request_id=long.request_id, ttl_s=60.0)
            break
        except UnknownRequest:  # too late
            assert pair.owner.fate_of(long.request_id) == "expired"
    assert pair.owner.fate_of(short.request_id) == "expired"
    time.sleep(0.1)
    assert pair.owner.do("events") == []
    pair.pull(long, [4])


def test_aborting_during_a_pull_makes_it_stale(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    ticket = pair.offer(range(16), request_id="gone", ready=15)
    pull = pair.start(ticket, range(16, 32))
    assert not pull.done()
    pair.owner.do("abort", request_id="gone")
    with pytest.raises(StaleBlocks, match="the lease ended"):
        pull.wait(20)
    assert pair.owner.fate_of("gone") == "aborted"
    assert pull.done()
    with pytest.raises(StaleBlocks):
        pull.wait()
    pair.works()


def test_an_expiry_during_a_pull_makes_it_fail(transport: str, new_pair: NewPair) -> None:
    for _ in range(5):
        pair = new_pair(transport, fault="delay-data=700ms@1")
        ticket = pair.offer(range(16), ttl_s=0.3)
        try:
            pair.pull(ticket, range(16, 32))  # it may, where the owner checks its leases too late
        except (StaleBlocks, PeerUnreachable):  # unreachable where the owner can cut the reader off
            break
    else:
        pytest.fail("no pull failed")
    assert pair.owner.fate_of(ticket.request_id) == "expired"
    pair.works()


def test_a_full_lease_table_says_so_and_recovers(
    transport: str, new_owner: Callable[..., RemoteWorker]
) -> None:
    owner = new_owner(PoolSpec(), transports=transport, lease_slots=3)
    for request in "abc":
        owner.offer([1], request_id=request)
    with pytest.raises(ConfigError, match="KVLINK_LEASE_SLOTS"):
        owner.offer([1], request_id="d")
    owner.do("abort", request_id="b")
    assert owner.fate_of("b") == "aborted"
    owner.offer([1], request_id="d")
    with pytest.raises(ConfigError, match="offered already"):
        owner.offer([2], request_id="d")


@pytest.mark.parametrize("warm", [True, False])
def test_the_ticket_of_a_restarted_owner_is_refused(
    distant: str, warm: bool, new_process: Callable[..., PeerProcess], new_pair: NewPair
) -> None:
    agent_port, port = free_ports(2)
    config = {"transports": distant, "agent_port": agent_port, "port": port}
    pair = new_pair(distant)  # for its reader
    first = new_process()
    old = RemoteWorker(first, "phoenix", pair.spec, **config)
    old.do("fill", seed=1)
    if warm:
        assert pair.reader.pull(old.offer([1]), [1]).wait(20)
    ticket = old.offer([5, 6], request_id="before")
    first.kill()
    new = RemoteWorker(new_process(), "phoenix", pair.spec, **config)
    new.do("fill", seed=2)
    assert new.info["agent"] == old.info["agent"]
    assert new.info["epoch"] > old.info["epoch"]
    new_ticket = new.offer([5, 6], request_id="before")  # in the very same slot

    for _ in range(3):
        with pytest.raises((StaleBlocks, PeerUnreachable, CoordinatorError)) as refused:
            pair.start(ticket, [8, 9], timeout_s=10).wait(20)
        assert isinstance(refused.value, KVLinkError)
        assert (pair.blocks()[[8, 9]] == POISON).all()
    assert pair.start(new_ticket, [8, 9]).wait(20)
    assert (pair.blocks()[[8, 9]] != POISON).any()
    assert new.fate_of("before") == "settled"
    new.close()


def test_leases_outlast_a_stop_of_their_owner(
    new_process: Callable[..., PeerProcess], new_pair: NewPair
) -> None:
    """Their renewals would lie unread in its sockets."""
    reader = new_pair("cma")
    process = new_process()
    owner = RemoteWorker(process, "sleepy", reader.spec, transports="cma")
    tickets = {name: owner.offer([1, 2], request_id=name, ttl_s=2.0) for name in ("taken", "left")}
    process.stop()
    time.sleep(2.5)
    process.go_on()
    assert owner.do("counts")["expired"] == 0
    assert reader.start(tickets["taken"], [3, 4]).wait(20)
    assert owner.fate_of("taken") == "settled"
    assert owner.fate_of("left") == "expired"
    owner.close()


def test_a_reader_that_overslept_its_lease_is_sent_nothing_more(
    new_process: Callable[..., PeerProcess], new_pair: NewPair
) -> None:
    """tcp: its connection stays, and nobody else notices."""
    pair = new_pair("tcp", num_blocks=4096, fault="delay=20ms@2..200")
    pair.works()
    (path,) = pair.reader.peers()
    sleeper = new_process()
    slow = {"transports": "fault+tcp", "fault": "delay-data=1s@3..99", "lanes": 1}
    sleeping = RemoteWorker(sleeper, "sleeper", pair.spec, **slow)
    sleeping.do("pull", ticket=pair.offer([1]).to_text(), into=[2], timeout_s=20)
    late = pair.offer(range(4096), request_id="overslept")
    other = pair.offer(range(1024), request_id="other")

    pull = pair.start(other, range(1024, 2048))
    sleeping.do("start_pull", ticket=late.to_text(), into=list(range(4096)), timeout_s=30)
    eventually(lambda: sleeping.do("pulled_bytes") > 0)  # 1 of 64 MiB; the others take 8 s
    sleeper.stop()
    pair.owner.do("set_ttl", request_id="overslept", ttl_s=0.05)
    assert pair.owner.fate_of("overslept") == "expired"
    assert pair.owner.do("counts")["fenced_readers"] == 0
    sleeper.go_on()
    with pytest.raises(StaleBlocks):
        sleeping.do("finish_pull")

    assert pull.wait(20)
    assert pair.holds(range(1024, 2048), range(1024))
    assert pair.reader.peers() == [path]
    assert not path.connection.broken
    calls = pair.owner.peer.call("agent_calls")
    sleeping.do("pull", ticket=pair.offer([1]).to_text(), into=[2], timeout_s=20)
    assert pair.owner.peer.call("agent_calls") == calls
    sleeping.close()


@pytest.mark.parametrize("how", ["expired", "aborted"])
def test_a_lease_that_ends_unsettled_disturbs_no_other_pull(
    transport: str, new_pair: NewPair, how: str
) -> None:
    """Its reader took the blocks without settling, or gave up: the connection is not its alone."""
    pair = new_pair(transport, num_blocks=512)
    pair.works()
    (path,) = pair.reader.peers()
    taken, left = (pair.offer(range(8), request_id=name) for name in ("taken", "left"))
    pair.pull(taken, range(8), settle=False)
    given_up = pair.start(left, range(8), settle=False)
    given_up.cancel()
    with contextlib.suppress(Cancelled):  # unless it had landed
        given_up.wait()

    pull = pair.start(pair.offer(range(64, 320), request_id="other", ready=0), range(64, 320))
    for name in ("taken", "left"):
        if how == "expired":
            pair.owner.do("set_ttl", request_id=name, ttl_s=0.001)
        else:
            pair.owner.do("abort", request_id=name)
        assert pair.owner.fate_of(name) == how
    pair.owner.do("set_ready", request_id="other", ready=256)
    assert pull.wait(20)
    assert pair.holds(range(64, 320), range(64, 320))
    assert pair.reader.peers() == [path]
    assert not path.connection.broken


NewReader = Callable[..., Worker]


@pytest.fixture
def pair(transport: str, new_reader: NewReader) -> Iterator[list[Worker]]:
    """An owner of three slots and a reader, who take tickets that a test has changed."""
    options = {"transports": transport, "lease_slots": 3, "ticket_keys": "none"}
    workers = [new_reader(wide(8), **options) for _ in range(2)]
    yield workers
    workers.clear()  # pytest keeps what a fixture gave until after the leak check


def ended(owner: Worker) -> LeaseEnd:
    while True:
        for event in owner.events():
            return event.how


def why_stale(reader: Worker, ticket: Ticket) -> StaleReason:
    try:
        reader.pull(ticket, into=[3]).wait(20)
    except StaleBlocks as stale:
        return stale.why
    raise AssertionError("it was not stale")


def test_a_late_reader_is_told_how_the_lease_ended(pair: list[Worker]) -> None:
    owner, reader = pair
    settled = owner.offer("settled", [1])
    reader.pull(settled, into=[3]).wait(20)
    assert ended(owner) is LeaseEnd.SETTLED
    expired = owner.offer("expired", [1], ttl_s=1e-9)
    assert ended(owner) is LeaseEnd.EXPIRED
    aborted = owner.offer("aborted", [1])
    owner.abort("aborted")
    assert why_stale(reader, settled) is StaleReason.SETTLED
    assert why_stale(reader, expired) is StaleReason.EXPIRED
    assert why_stale(reader, aborted) is StaleReason.ABORTED
    owner.offer("another", [1])
    assert why_stale(reader, settled) is StaleReason.REUSED


def test_a_lease_that_was_never_granted_says_so(pair: list[Worker]) -> None:
    owner, reader = pair
    first = owner.offer("first", [1])
    early = dataclasses.replace(first, seats=(LeaseSeat(3, 1 << 40, 1 << 41),))
    assert why_stale(reader, early) is StaleReason.NEVER_GRANTED


def test_a_made_up_seat_is_refused_and_nothing_lands(pair: list[Worker]) -> None:
    owner, reader = pair
    owner.pool.numpy()[:] = 0xEE
    ticket = owner.offer("r", [1])
    reader.pool.numpy()[:] = 0
    header = LeaseSeat(0, int.from_bytes(b"KVLease2", "little"), 0)
    for seat in header, LeaseSeat(2, 0, 0), LeaseSeat(2, 0, 1 << 40), LeaseSeat(2, 255, 1 << 40):
        forged = dataclasses.replace(ticket)
        object.__setattr__(forged, "seats", (seat,))  # the core refuses it by itself
        with pytest.raises(ConfigError, match="the ticket is forged"):
            reader.pull(forged, into=[3]).wait(20)
        with pytest.raises(ConfigError, match="forged"):
            reader.pull(forged.to_text(), into=[3])
    assert not reader.pool.numpy().any()


@pytest.mark.parametrize("collected", [False, True])
def test_an_ended_offer_takes_nothing_more(pair: list[Worker], collected: bool) -> None:
    owner, _ = pair
    owner.offer("gone", [1], ready=0)
    owner.abort("gone")
    if collected:
        assert ended(owner) is LeaseEnd.ABORTED
    else:
        owner.abort("gone")  # an ordinary race
    for late in (
        lambda: owner.set_ready("gone", 1),
        lambda: owner.extend("gone", 60),
        lambda: owner.offers.set_ttl("gone", 60),
    ):
        with pytest.raises(UnknownRequest, match="gone"):
            late()


class Kernels:
    """Pass when told, and know whether somebody has seen it."""

    passed = seen = False

    def query(self) -> bool:
        self.seen = self.passed
        return self.passed


def test_kernels_of_an_aborted_offer_are_not_another_requests_progress(pair: list[Worker]) -> None:
    owner, reader = pair
    kernels = Kernels()
    owner.offer("late", [1], after=kernels, readers=3)
    owner.abort("late")
    assert ended(owner) is LeaseEnd.ABORTED
    following = owner.offer("next", [2], ready=0, readers=3)  # has the slots
    pull = reader.pull(following, into=[3], settle=False)
    kernels.passed = True
    while not kernels.seen:
        assert not pull.done()
    owner.set_ready("next", 1)
    assert pull.wait(20)
