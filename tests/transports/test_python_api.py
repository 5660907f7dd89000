# SPDX-License-Identifier: Apache-2.0
"""The API of workers over each transport: offers, claims, prepared and warm pulls."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transports.pairs import POISON, Pair
from transports.pools import PoolSpec, wide
from transports.processes import EMULATED, Peer, PeerProcess, RemoteWorker, eventually

from kvlink import LeaseEnd, StaleBlocks, Ticket, Worker
from kvlink.errors import Cancelled, ConfigError, KVLinkError, TransferTimeout, UnknownRequest
from kvlink.transfer.pulls import Pulls

NewOwner = Callable[..., RemoteWorker]
NewReader = Callable[..., Worker]
NewPair = Callable[..., Pair]
NewProcess = Callable[..., PeerProcess]

POOL = wide(num_blocks=256)
BLOCKS = list(range(128))
INTO = list(range(255, 127, -1))


async def test_await_on_the_running_loop(transport: str, new_owner: NewOwner, new_reader: NewReader) -> None:
    owner, reader = new_owner(POOL, transports=transport), new_reader(POOL, transports=transport)
    tickets = [owner.offer(BLOCKS) for _ in range(8)]
    stats = await asyncio.gather(*(reader.pull(ticket, INTO) for ticket in tickets))
    assert {row.num_bytes for row in stats} == {len(BLOCKS) * (16 << 10)}


def test_two_loops_in_two_threads_wait_for_one_pull(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner = new_owner(POOL, transports="tcp")
    reader = new_reader(POOL, transports="fault+tcp", fault="delay=100ms@2")
    pull = reader.pull(owner.offer(BLOCKS), INTO)

    async def wait() -> int:
        return (await pull).num_bytes

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(wait()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [len(BLOCKS) * (16 << 10)] * 2


async def test_cancelling_the_task_that_waits_for_a_shield_leaves_the_pull_alone(
    new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(POOL, transports="tcp"), new_reader(POOL, transports="tcp")
    ticket = owner.offer(BLOCKS, ready=0)
    pull = reader.pull(ticket, INTO)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(pull), 0.05)
    owner.do("set_ready", request_id=ticket.request_id, ready=len(BLOCKS))
    assert (await pull).settled


@pytest.mark.parametrize("timeout_s", [0, 0.01], ids=["at once", "later"])
async def test_no_byte_lands_after_an_await_that_timed_out(
    transport: str, new_pair: NewPair, timeout_s: float
) -> None:
    pair = new_pair(transport)
    pair.works()
    for into in ([1, 2], [3, 4]):  # of one connection, and what comes later on it has come behind
        ticket = pair.offer([5, 6], ready=0)
        pull = pair.start(ticket, into)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pull, timeout_s)
        assert pull.done()
        pair.owner.do("set_ready", request_id=ticket.request_id, ready=2)
        pair.works()
        assert (pair.blocks()[into] == POISON).all()
        with pytest.raises(Cancelled):
            await pull


async def test_no_byte_lands_after_a_block_that_an_exception_left(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    for into in ([1, 2], [3, 4]):  # while it connects, and once it is connected
        tickets = [pair.offer([5, 6], ready=0) for _ in range(2)]
        with pytest.raises(LookupError):
            async with pair.start(tickets[0], into):
                raise LookupError
        with pytest.raises(LookupError), pair.start(tickets[1], into):
            raise LookupError
        for ticket in tickets:
            pair.owner.do("set_ready", request_id=ticket.request_id, ready=2)
        pair.works()
        assert (pair.blocks()[into] == POISON).all()
    async with pair.start(pair.offer([5, 6]), [1, 2]) as pull:
        pass
    assert pull.stats.settled
    assert pair.holds([1, 2], [5, 6])


def test_no_time_at_all(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, timeout_s=86400)
    with pytest.raises(TransferTimeout):
        pair.start(pair.offer([1]), [1], timeout_s=0).wait()  # which would have to connect
    pair.works()
    with pytest.raises(TransferTimeout):
        pair.start(pair.offer([1], ready=0), [1], timeout_s=0.0).wait()
    for timeout_s in (-1, -0.5, float("nan")):
        with pytest.raises(ConfigError, match="timeout_s"):
            pair.start(pair.offer([1]), [1], timeout_s=timeout_s)
    if not (transport == "verbs" and EMULATED):
        eventually(lambda: can_be_had_at_once(pair))


def can_be_had_at_once(pair: Pair) -> bool:
    try:
        return pair.start(pair.offer([1]), [1], timeout_s=0).wait()
    except TransferTimeout:
        return False


async def test_a_failed_start_is_raised_to_whoever_awaits(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner = new_owner(POOL, transports="tcp")
    reader = new_reader(wide(num_blocks=256, block_bytes=8 << 10), transports="tcp")
    pull = reader.pull(owner.offer(BLOCKS), INTO)
    with pytest.raises(KVLinkError, match="row_bytes differs"):
        await pull
    with pytest.raises(KVLinkError, match="row_bytes differs"):
        pull.wait()
    assert pull.done()


def test_wait_with_a_timeout_says_that_it_still_runs(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner, reader = new_owner(POOL, transports="shm"), new_reader(POOL, transports="shm")
    ticket = owner.offer(BLOCKS, ready=0)
    pull = reader.pull(ticket, INTO)
    assert not pull.wait(0.02)
    assert not pull.done()
    assert "running" in repr(pull)
    owner.do("set_ready", request_id=ticket.request_id, ready=len(BLOCKS))
    assert pull.wait()
    assert pull.done()


def test_cancel_ends_a_pull_that_hangs(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner = new_owner(POOL, transports="shm")
    reader = new_reader(POOL, transports="fault+shm", fault="hang@2")
    pull = reader.pull(owner.offer(BLOCKS), INTO)
    pull.wait(0.05)
    pull.cancel()
    assert pull.done()
    with pytest.raises(Cancelled):
        pull.wait()
    pull.cancel()


def test_cancel_while_it_is_still_connecting(new_process: NewProcess, new_reader: NewReader) -> None:
    owner = RemoteWorker(new_process(), "owner", POOL, transports="tcp")
    ticket = owner.offer(BLOCKS)
    owner.peer.stop()  # type: ignore[attr-defined]
    pull = new_reader(POOL, transports="tcp").pull(ticket, INTO)
    assert not pull.wait(0.05)
    pull.cancel()
    with pytest.raises(Cancelled):
        pull.wait(5)


def test_other_threads_run_while_a_pull_waits(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner, reader = new_owner(POOL, transports="tcp"), new_reader(POOL, transports="tcp")
    ticket = owner.offer(BLOCKS, ready=0)
    pull = reader.pull(ticket, INTO)

    def tick() -> None:
        for _ in range(20):
            time.sleep(0.001)
        owner.do("set_ready", request_id=ticket.request_id, ready=len(BLOCKS))

    thread = threading.Thread(target=tick)
    thread.start()
    assert pull.wait()  # which ends only if they do
    thread.join()


async def test_events_come_to_the_loop(new_reader: NewReader) -> None:
    owner, reader = new_reader(POOL, transports="loopback"), new_reader(POOL, transports="loopback")
    seen = []

    async def watch() -> None:
        async for event in owner.watch_events():
            seen.append(event)
            if len(seen) == 3:
                return

    watching = asyncio.create_task(watch())
    await reader.pull(owner.offer("settled", BLOCKS), INTO)
    owner.offer("expired", BLOCKS, ttl_s=0.01)
    owner.offer("aborted", BLOCKS)
    owner.abort("aborted")
    await asyncio.wait_for(watching, 20)
    assert {event.request_id: event.how for event in seen} == {
        "settled": LeaseEnd.SETTLED,
        "expired": LeaseEnd.EXPIRED,
        "aborted": LeaseEnd.ABORTED,
    }


def test_a_closed_worker_answers_with_errors(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner, reader = new_owner(POOL, transports="shm"), new_reader(POOL, transports="shm")
    ticket = owner.offer(BLOCKS)
    reader.pull(owner.offer(BLOCKS), INTO).wait()
    reader.close()
    reader.close()
    with pytest.raises(KVLinkError):
        reader.pull(ticket, INTO).wait(5)
    with pytest.raises(KVLinkError):
        reader.offer("late", BLOCKS)


def test_closing_with_pulls_in_flight_fails_them(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner = new_owner(POOL, transports="tcp")
    reader = new_reader(POOL, transports="fault+tcp", fault="hang@3")
    reader.pull(owner.offer(BLOCKS), INTO)
    pulls = [reader.pull(owner.offer(BLOCKS), INTO) for _ in range(4)]
    reader.close()
    for pull in pulls:
        with pytest.raises(KVLinkError):
            pull.wait(5)


def test_bad_arguments_are_refused_at_the_edge(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner, reader = new_owner(POOL, transports="shm"), new_reader(POOL, transports="shm")
    ticket = owner.offer(BLOCKS)
    for into, rest, words in [
        ([1, 1, *INTO[2:]], {}, "block"),
        (INTO[:5], {}, "block"),
        ([9999, *INTO[1:]], {}, "9999"),
        (INTO, {"tokens": (5, 4)}, "tokens"),
        ([], {"tokens": (0, 5)}, "block"),
        ([], {"tokens": (129, 129)}, "tokens"),
        (INTO, {"layers": (2, 2)}, "layers"),
        (INTO, {"tokens": (0, 10_000)}, "tokens"),
        (INTO, {"layers": (0, 7)}, "layer"),
        (np.zeros(128, np.int64), {}, "twice"),
        (np.zeros(128), {}, "0.0 at index 0"),
    ]:
        with pytest.raises(ConfigError, match=words):
            reader.pull(ticket, into, **rest).wait()
    for options, words in [
        ({"block_ids": []}, "block ids"),
        ({"block_ids": [256]}, "block ids"),
        ({"block_ids": [1], "num_tokens": 2}, "tokens"),
        ({"block_ids": [1], "readers": 0}, "readers"),
        ({"block_ids": [1], "ttl_s": -1}, "ttl_s"),
        ({"block_ids": [1], "ready": 2}, "ready"),
    ]:
        with pytest.raises(ConfigError, match=words):
            reader.offer("wrong", **options)
    reader.offer("twice", BLOCKS)
    with pytest.raises(ConfigError, match="offered already"):
        reader.offer("twice", BLOCKS)
    with pytest.raises(UnknownRequest):
        reader.abort("unheard of")
    with pytest.raises(ConfigError, match="coordinator"):
        reader.pull("by-id", INTO)
    with pytest.raises(ConfigError, match="coordinator"):
        reader.offer("published", BLOCKS, publish=True)
    assert reader.pull(ticket, INTO).wait()


def test_a_full_lease_table_takes_nothing(new_reader: NewReader) -> None:
    owner = new_reader(POOL, transports="loopback", lease_slots=4)
    owner.offer("three", BLOCKS, readers=3)
    with pytest.raises(ConfigError, match="KVLINK_LEASE_SLOTS"):
        owner.offer("two", BLOCKS, readers=2)
    assert owner.offer("one", BLOCKS).seats
    owner.abort("three")
    eventually(lambda: owner.lease_counts().active == 1)
    assert len(owner.offer("again", BLOCKS, readers=3).seats) == 3


def test_a_pulls_deadline_counts_from_its_start(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner = new_owner(POOL, transports="tcp")
    reader = new_reader(POOL, transports="fault+tcp", fault="hang@2")
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match="deadline"):
        reader.pull(owner.offer(BLOCKS), INTO, timeout_s=0.3).wait()
    assert 0.25 < time.monotonic() - started < 5


def test_a_ticket_survives_the_routers_text(new_owner: NewOwner, new_reader: NewReader) -> None:
    owner, reader = new_owner(PoolSpec(), transports="cma"), new_reader(PoolSpec(), transports="cma")
    ticket = owner.offer([1, 2, 3])
    assert reader.pull(Ticket.from_text(ticket.to_text()), [4, 5, 6]).wait()


OWNER, HERE = [9, 3, 30, 4], [1, 8, 2, 40]


def test_it_reads_the_blocks_of_each_further_ticket(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    for _ in range(4):
        pair.blocks()[HERE] = POISON
        pull = prepared.pull(pair.offer(OWNER))
        assert pull.wait(30)
        assert pair.holds(HERE, OWNER)
        assert pull.stats.settled
        assert pull.stats.num_bytes == len(OWNER) * pair.blocks().shape[1]


def test_it_validates_the_lease_of_its_own_ticket(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    first, ended = pair.offer(OWNER), pair.offer(OWNER)
    prepared = pair.reader.prepare(first, HERE)
    pair.owner.do("abort", request_id=ended.request_id)
    with pytest.raises(StaleBlocks):
        prepared.pull(ended).wait(30)
    assert prepared.pull(first).wait(30)
    assert pair.holds(HERE, OWNER)


def test_it_plans_again_for_a_new_connection(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    for _ in range(2):
        for peer in pair.reader.peers():
            peer.connection.close()
        pair.blocks()[HERE] = POISON
        assert prepared.pull(pair.offer(OWNER)).wait(30)
        assert pair.holds(HERE, OWNER)


def test_blocks_that_are_not_written_yet_are_waited_for(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    prepared = pair.reader.prepare(pair.offer(OWNER), HERE)
    ticket = pair.offer(OWNER, ready=0)
    pair.blocks()[HERE] = POISON
    pull = prepared.pull(ticket)
    assert not pull.done()
    pair.owner.do("set_ready", request_id=ticket.request_id, ready=len(OWNER))
    assert pull.wait(30)
    assert pair.holds(HERE, OWNER)


def test_a_hundred_warm_pulls_make_no_call(
    transport: str, peer: Peer, new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = new_pair(transport)
    asked: list[str] = []

    def count(of: type, name: str) -> None:
        original = getattr(of, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(of, name, call)

    count(Pulls, "_do")
    for name in ("submit", "run"):
        count(type(pair.reader._control), name)
    answered = peer.call("agent_calls")
    pair.works()
    assert asked, "the first pull connects: the count counts"
    assert peer.call("agent_calls") > answered

    tickets = [pair.offer([index % 64]) for index in range(99)] + [pair.offer(range(60))]
    asked.clear()
    answered = peer.call("agent_calls")
    for index, ticket in enumerate(tickets):
        assert pair.pull(ticket, [index % 64] if index < 99 else range(60)).stats.settled
    assert asked == []
    assert peer.call("agent_calls") == answered


def test_warm_pulls_do_without_the_readers_control_loop(distant: str, new_pair: NewPair) -> None:
    pair = new_pair(distant)
    pair.works()
    tickets = [pair.offer([3, 1, 4]) for _ in range(20)]
    release = threading.Event()
    pair.reader._control.loop.call_soon_threadsafe(release.wait)
    try:
        for ticket in tickets:
            pair.pull(ticket, [5, 6, 7])
    finally:
        release.set()


def test_small_warm_pulls_run_on_the_callers_thread(transport: str, new_pair: NewPair) -> None:
    if transport == "verbs" and EMULATED:
        pytest.skip("an emulated NIC takes longer than the 120 us up to which a pull runs inline")
    pair = new_pair(transport)
    pair.works()
    # Not at once: the progress thread may still hold the lane for a moment.
    eventually(lambda: pair.pull(pair.offer([1]), [2]).stats.ran_inline)


def test_pulls_that_take_longer_do_only_where_posting_them_is_a_launch(
    transport: str, new_pair: NewPair
) -> None:
    pair = new_pair(transport, inline_us=1)
    pair.works()

    def ran_inline() -> bool:
        return pair.pull(pair.offer(range(32)), range(32)).stats.ran_inline  # 512 KiB

    if transport == "cuda":
        eventually(ran_inline)
    else:
        assert not ran_inline()


def test_a_pull_is_predicted_by_the_last_ones_of_its_shape(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    took_us: list[float] = []

    def predicted() -> bool:
        stats = pair.pull(pair.offer(range(5)), range(5)).stats
        (peer,) = pair.reader.peers()
        took_us.append(stats.total_us)
        return peer.predict_us(stats.num_ops, stats.num_bytes) in [pytest.approx(us) for us in took_us]

    # Not at once: a pull that starts while the lane still has the one before it does not count.
    eventually(predicted)
    (path,) = pair.pull(pair.offer(range(5)), range(5)).explain()
    assert path.predicted_us in [pytest.approx(us) for us in took_us]


# The filter of all threads: getrandom fails with EPERM, all else is allowed.
_SCRIPT = """
import ctypes, struct
import kvlink
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense

pool = kvlink.BlockPool.allocate(dense(Geometry(1, 1, 64, 16)))
with kvlink.Worker(pool, "w", transports="tcp") as worker:
    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 318), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_NO_NEW_PRIVS, SECCOMP, SET_MODE_FILTER, TSYNC = 38, 317, 1, 1
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    filter_of = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(program))
    assert libc.syscall(SECCOMP, SET_MODE_FILTER, TSYNC, filter_of) == 0, ctypes.get_errno()
    for number in range(40):  # some are drawn ahead
        try:
            worker.offer(str(number), [1])
        except ConfigError as refused:
            print(refused)
            break
"""


@pytest.mark.verify
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64 system calls")
def test_an_offer_without_random_numbers_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "getentropy: Operation not permitted" in ended.stdout
    assert "seccomp" in ended.stdout
