# SPDX-License-Identifier: Apache-2.0
"""Lists what the store relies on in etcd, as cases that hold for the simulated one and for a real one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from kvlink.control.rpc.stream import Stream
from kvlink.coordinator.store.etcd.api import (
    _COMPACT,
    Etcd,
    StoreFull,
    after,
    delete,
    get,
    leased,
    nested,
    put,
    unchanged,
)
from kvlink.errors import CoordinatorError
from kvlink.v1 import etcd_pb2 as pb

Case = Callable[[Etcd, bytes], Awaitable[None]]
"""(client, prefix of the case's own keys)"""
_Watch = Stream[pb.WatchRequest, pb.WatchResponse]

CASES: list[Case] = []


def _case(case: Case) -> Case:
    CASES.append(case)
    return case


async def _write(etcd: Etcd, *ops: pb.RequestOp) -> int:
    return (await etcd.commit(pb.TxnRequest(success=ops))).header.revision


async def _values(etcd: Etcd, prefix: bytes) -> dict[bytes, bytes]:
    found = await etcd.read(prefix, after(prefix))
    return {kv.key.removeprefix(prefix): kv.value for kv in found.kvs}


async def _range(etcd: Etcd, prefix: bytes, revision: int, limit: int = 0) -> pb.RangeResponse:
    return await etcd._range(
        pb.RangeRequest(key=prefix, range_end=after(prefix), revision=revision, limit=limit)
    )


async def _next(watch: _Watch) -> pb.WatchResponse:
    reply = await asyncio.wait_for(watch.receive(), 10.0)
    assert reply is not None
    return reply


async def _events(watch: _Watch, count: int) -> list[tuple[int, int, bytes]]:
    """(revision, type, key) of the next ones, however they are spread over replies."""
    found: list[tuple[int, int, bytes]] = []
    while len(found) < count:
        found += [(event.kv.mod_revision, event.type, event.kv.key) for event in (await _next(watch)).events]
    return found


@_case
async def one_revision_a_transaction(etcd: Etcd, prefix: bytes) -> None:
    first = await _write(etcd, put(prefix + b"a", b"1"), put(prefix + b"b", b"2"))
    assert await _write(etcd, put(prefix + b"a", b"3")) == first + 1
    found = await etcd.read(prefix, after(prefix))
    assert [(kv.key, kv.value, kv.mod_revision) for kv in found.kvs] == [
        (prefix + b"a", b"3", first + 1),
        (prefix + b"b", b"2", first),
    ]
    assert found.header.revision == first + 1
    assert found.header.cluster_id


@_case
async def what_changes_nothing_has_no_revision(etcd: Etcd, prefix: bytes) -> None:
    first = await _write(etcd, put(prefix, b""))
    assert await _write(etcd, delete(prefix + b"absent"), get(prefix)) == first


@_case
async def comparisons_of_revisions_and_leases(etcd: Etcd, prefix: bytes) -> None:
    lease = await etcd.grant(60)
    revision = await _write(etcd, put(prefix, b"", lease))

    async def holds(compare: pb.Compare) -> bool:
        done = await etcd.commit(pb.TxnRequest(compare=[compare], failure=[get(prefix)]))
        assert done.succeeded or done.responses[0].response_range.kvs[0].mod_revision == revision
        return done.succeeded

    assert await holds(unchanged(prefix, revision))
    assert not await holds(unchanged(prefix, 0))
    assert await holds(unchanged(prefix + b"absent", 0))
    assert await holds(leased(prefix, lease))
    assert not await holds(leased(prefix, lease + 1))
    assert not await holds(leased(prefix + b"absent", lease))


@_case
async def nested_ones_compare_before_anything_is_written(etcd: Etcd, prefix: bytes) -> None:
    keys = [prefix + b"a", prefix + b"b"]
    inner = [
        pb.TxnRequest(compare=[unchanged(keys[0], 0)], success=[put(key, b"")], failure=[get(keys[0])])
        for key in keys
    ]
    done = await etcd.commit(pb.TxnRequest(success=[nested(txn) for txn in inner]))
    assert [response.response_txn.succeeded for response in done.responses] == [True, True]
    found = await etcd.read(prefix, after(prefix))
    assert [kv.mod_revision for kv in found.kvs] == [done.header.revision] * 2
    again = await etcd.commit(pb.TxnRequest(success=[nested(inner[1])]))
    assert again.succeeded
    assert not again.responses[0].response_txn.succeeded
    assert again.responses[0].response_txn.responses[0].response_range.kvs[0].key == keys[0]


@_case
async def a_read_sees_what_was_written_before_it(etcd: Etcd, prefix: bytes) -> None:
    done = await etcd.commit(pb.TxnRequest(success=[put(prefix, b"new"), get(prefix)]))
    assert done.responses[1].response_range.kvs[0].value == b"new"


@_case
async def what_is_refused_writes_nothing(etcd: Etcd, prefix: bytes) -> None:
    with pytest.raises(CoordinatorError, match="duplicate key"):
        await _write(etcd, put(prefix + b"a", b"1"), put(prefix + b"a", b"2"))
    with pytest.raises(CoordinatorError, match="lease not found"):
        await _write(etcd, put(prefix + b"a", b"1"), put(prefix + b"b", b"2", lease=12345))
    with pytest.raises(CoordinatorError, match="too many operations"):
        await _write(etcd, *(put(b"%b%d" % (prefix, number), b"") for number in range(129)))
    assert await _values(etcd, prefix) == {}


@_case
async def pages_are_of_one_revision(etcd: Etcd, prefix: bytes) -> None:
    await _write(etcd, *(put(b"%b%d" % (prefix, number), b"old") for number in range(5)))
    first = await _range(etcd, prefix, 0, limit=2)
    assert first.more
    assert [kv.key.removeprefix(prefix) for kv in first.kvs] == [b"0", b"1"]
    await _write(etcd, put(prefix + b"4", b"new"), delete(prefix + b"3"), put(prefix + b"5", b"new"))
    rest = await _range(etcd, prefix, first.header.revision)
    assert [(kv.key.removeprefix(prefix), kv.value) for kv in rest.kvs] == [
        (b"%d" % number, b"old") for number in range(5)
    ]
    assert not rest.more
    assert rest.header.revision == first.header.revision + 1, "the header tells what is now"


@_case
async def revisions_that_are_gone_or_to_come(etcd: Etcd, prefix: bytes) -> None:
    old = await _write(etcd, put(prefix, b"old"))
    new = await _write(etcd, put(prefix, b"new"))
    with pytest.raises(CoordinatorError, match="future revision"):
        await _range(etcd, prefix, new + 1_000)
    for _ in range(2):
        await etcd.compact(new)
    with pytest.raises(CoordinatorError, match="has been compacted"):
        await etcd._call(_COMPACT, pb.CompactionRequest(revision=new))
    with pytest.raises(CoordinatorError, match="future revision"):
        await etcd._call(_COMPACT, pb.CompactionRequest(revision=new + 1_000))
    with pytest.raises(CoordinatorError, match="has been compacted"):
        await _range(etcd, prefix, old)
    assert [kv.value for kv in (await _range(etcd, prefix, new)).kvs] == [b"new"]


@_case
async def keys_go_with_their_lease(etcd: Etcd, prefix: bytes) -> None:
    lease = await etcd.grant(60)
    names = [b"b", b"a", b"kept", b"moved"]
    await _write(etcd, *(put(prefix + name, b"", lease) for name in names))
    written = await _write(
        etcd, put(prefix + b"kept", b""), put(prefix + b"moved", b"", await etcd.grant(60))
    )
    watch = await etcd.watch(prefix, written + 1)
    await etcd.revoke(lease)
    gone = [(written + 1, pb.Event.DELETE, prefix + name) for name in (b"a", b"b")]
    assert await _events(watch, 2) == gone
    watch.cancel()
    assert set(await _values(etcd, prefix)) == {b"kept", b"moved"}
    await etcd.revoke(lease)


@_case
async def renewals_tell_which_leases_there_are(etcd: Etcd, prefix: bytes) -> None:
    leases = [await etcd.grant(60) for _ in range(3)]
    await etcd.revoke(leases[1])
    assert await etcd.keep_alive([*leases, 4711]) == {leases[0], leases[2]}


@_case
async def a_lease_that_is_not_renewed_runs_out(etcd: Etcd, prefix: bytes) -> None:
    lease, renewed = await etcd.grant(1), await etcd.grant(1)
    await _write(etcd, put(prefix + b"a", b"", lease), put(prefix + b"b", b"", renewed))
    for number in itertools.count():
        await etcd.keep_alive([renewed])
        if await _values(etcd, prefix) == {b"b": b""}:
            break
        assert number < 100
        await asyncio.sleep(0.2)
    assert await etcd.keep_alive([lease, renewed]) == {renewed}


@_case
async def a_watch_brings_each_revision_whole(etcd: Etcd, prefix: bytes) -> None:
    first = await _write(etcd, put(prefix + b"a", b"1"), put(prefix + b"b", b"1"))
    watch = await etcd.watch(prefix, first)
    created = await _next(watch)
    assert created.created
    assert not created.events
    await _write(etcd, put(prefix[:-1] + b"!", b"not under the prefix"))
    await _write(etcd, delete(prefix + b"a"), put(prefix + b"c", b"2"))
    assert await _events(watch, 4) == [
        (first, pb.Event.PUT, prefix + b"a"),
        (first, pb.Event.PUT, prefix + b"b"),
        (first + 2, pb.Event.DELETE, prefix + b"a"),
        (first + 2, pb.Event.PUT, prefix + b"c"),
    ]
    watch.cancel()


@_case
async def a_watch_of_what_was_compacted_says_so(etcd: Etcd, prefix: bytes) -> None:
    first = await _write(etcd, put(prefix, b"1"))
    last = await _write(etcd, put(prefix, b"2"))
    await etcd.compact(last)
    watch = await etcd.watch(prefix, first)
    while not (reply := await _next(watch)).compact_revision:
        assert reply.created
    assert reply.canceled
    assert reply.compact_revision == last
    watch.cancel()
    watch = await etcd.watch(prefix, last)
    assert await _events(watch, 1) == [(last, pb.Event.PUT, prefix)]
    watch.cancel()


@_case
async def a_watch_may_begin_at_a_revision_to_come(etcd: Etcd, prefix: bytes) -> None:
    now = await _write(etcd, put(prefix, b"1"))
    watch = await etcd.watch(prefix, now + 2)
    assert (await _next(watch)).created
    for _ in range(2):
        await _write(etcd, put(prefix, b"2"))
    assert await _events(watch, 1) == [(now + 2, pb.Event.PUT, prefix)]
    watch.cancel()


async def _fill(etcd: Etcd, key: bytes) -> None:
    for _ in range(1_000):
        await _write(etcd, put(key, bytes(256 << 10)))


async def a_full_one_refuses_what_needs_room(etcd: Etcd, prefix: bytes) -> None:
    lease = await etcd.grant(60)
    await _write(etcd, put(prefix + b"a", b""), put(prefix + b"b", b"", lease))
    with pytest.raises(StoreFull):
        await _fill(etcd, prefix + b"a")
    one_put = pb.TxnRequest(success=[put(prefix + b"a", b"")])
    for txn in (one_put, pb.TxnRequest(failure=one_put.success)):
        with pytest.raises(StoreFull):
            await etcd.commit(txn)
    await _write(etcd, nested(one_put))  # its room is not counted
    with pytest.raises(StoreFull):
        await etcd.grant(60)
    assert await etcd.keep_alive([lease]) == {lease}
    revision = await _write(etcd, get(prefix + b"a"), delete(prefix + b"a"))
    await etcd.compact(revision)
    assert set(await _values(etcd, prefix)) == {b"b"}
    with pytest.raises(StoreFull):  # until the alarm is taken back
        await _write(etcd, put(prefix + b"a", b""))
    await etcd.revoke(lease)
    assert await _values(etcd, prefix) == {}
