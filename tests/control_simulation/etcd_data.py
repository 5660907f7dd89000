# SPDX-License-Identifier: Apache-2.0
"""Holds etcd's keys with all revisions since the last compaction, leases, and a quota. Takes time as a value."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import grpc

from kvlink.v1 import etcd_pb2 as pb

LEAST_TTL_S = 2
MOST_OPS = 128
_ENTRY_BYTES = 64


class Refusal(Exception):
    """Is etcd's error in place of an answer."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = f"etcdserver: {details}"


def _no_space() -> Refusal:
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "mvcc: database space exceeded")


@dataclass
class Lease:
    """Keys go with it when it expires."""

    ttl_s: int
    expires_at: float
    keys: set[bytes] = field(default_factory=set)


class Data:
    """Holds the data of one cluster. Nothing here waits or fails half-way."""

    def __init__(self, cluster_id: int, quota_bytes: int = 1 << 30) -> None:
        self.cluster_id = cluster_id
        self.quota_bytes = quota_bytes
        self.revision = 1
        self.compacted = 0
        self.num_bytes = 0
        self.alarm = False
        self.kvs: dict[bytes, pb.KeyValue] = {}
        self.leases: dict[int, Lease] = {}
        self.log: list[tuple[int, list[pb.Event]]] = []
        self._sorted: list[bytes] = []
        self._before: dict[tuple[bytes, int], pb.KeyValue | None] = {}
        """Maps a key and a revision to the value that this write replaced."""
        self._last_lease = 0x1000

    def copy(self) -> Data:
        """As a snapshot has it."""
        return copy.deepcopy(self)

    def range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """Raises Refusal for a revision that is gone or has not come."""
        if request.revision > self.revision:
            raise Refusal(grpc.StatusCode.OUT_OF_RANGE, "mvcc: required revision is a future revision")
        if 0 < request.revision < self.compacted:
            raise Refusal(grpc.StatusCode.OUT_OF_RANGE, "mvcc: required revision has been compacted")
        found = self._found(request)
        limit = request.limit or len(found)
        return pb.RangeResponse(kvs=found[:limit], more=len(found) > limit)

    def _found(self, request: pb.RangeRequest) -> list[pb.KeyValue]:
        kvs, keys = self.kvs, self._sorted
        if 0 < request.revision < self.revision:
            kvs = self._as_of(request.revision)
            keys = sorted(kvs)
        if not request.range_end:
            return [kvs[request.key]] if request.key in kvs else []
        begin, end = bisect_left(keys, request.key), bisect_left(keys, request.range_end)
        return [kvs[key] for key in keys[begin:end]]

    def _as_of(self, revision: int) -> dict[bytes, pb.KeyValue]:
        """Plays the log backwards."""
        kvs = dict(self.kvs)
        for _, events in reversed([entry for entry in self.log if entry[0] > revision]):
            for event in reversed(events):
                before = self._before[event.kv.key, event.kv.mod_revision]
                kvs.pop(event.kv.key, None)
                if before is not None:
                    kvs[event.kv.key] = before
        return kvs

    def txn(self, txn: pb.TxnRequest) -> pb.TxnResponse:
        """All comparisons first, then the operations in order, under one revision if any of them writes."""
        if max(len(txn.compare), len(txn.success), len(txn.failure)) > MOST_OPS:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too many operations in txn request")
        chosen = _Chosen(self, txn)
        writes = list(chosen.writes())
        puts = [op.request_put for op in writes if op.HasField("request_put")]
        keys = [put.key for put in puts]
        if len(set(keys)) < len(keys):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "duplicate key given in txn request")
        if any(put.lease and put.lease not in self.leases for put in puts):
            raise Refusal(grpc.StatusCode.NOT_FOUND, "requested lease not found")
        if _needs_room(txn):
            self.check_room()
        events: list[pb.Event] = []
        reply = self._carry_out(chosen, events)
        self._commit(events)
        return reply

    def check_room(self) -> None:
        """Raises Refusal, until the alarm is taken back."""
        self.alarm = self.alarm or self.num_bytes >= self.quota_bytes
        if self.alarm:
            raise _no_space()

    def _carry_out(self, chosen: _Chosen, events: list[pb.Event]) -> pb.TxnResponse:
        reply = pb.TxnResponse(succeeded=chosen.holds)
        for op in chosen.ops:
            response = reply.responses.add()
            if isinstance(op, _Chosen):
                response.response_txn.CopyFrom(self._carry_out(op, events))
            elif op.HasField("request_put"):
                self._put(op.request_put, events)
            elif op.HasField("request_delete_range"):
                of = op.request_delete_range
                found = self._found(pb.RangeRequest(key=of.key, range_end=of.range_end))
                self._delete([kv.key for kv in found], events)
            else:
                response.response_range.CopyFrom(self.range(op.request_range))
        return reply

    def _put(self, put: pb.PutRequest, events: list[pb.Event]) -> None:
        before = self.kvs.get(put.key)
        revision = self.revision + 1
        kv = pb.KeyValue(
            key=put.key,
            value=put.value,
            lease=put.lease,
            mod_revision=revision,
            create_revision=before.create_revision if before else revision,
            version=before.version + 1 if before else 1,
        )
        self._detach(before)
        if put.lease:
            self.leases[put.lease].keys.add(put.key)
        self._store(put.key, kv)
        events.append(pb.Event(kv=kv))

    def _delete(self, keys: Iterable[bytes], events: list[pb.Event]) -> None:
        for key in keys:
            self._detach(self.kvs.get(key))
            self._store(key, None)
            gone = pb.KeyValue(key=key, mod_revision=self.revision + 1)
            events.append(pb.Event(type=pb.Event.DELETE, kv=gone))

    def _detach(self, kv: pb.KeyValue | None) -> None:
        if kv is not None and kv.lease in self.leases:
            self.leases[kv.lease].keys.discard(kv.key)

    def _store(self, key: bytes, kv: pb.KeyValue | None) -> None:
        before = self.kvs.pop(key, None)
        self._before[key, self.revision + 1] = before
        if kv is None:
            del self._sorted[bisect_left(self._sorted, key)]
        else:
            self.kvs[key] = kv
            if before is None:
                insort(self._sorted, key)

    def _commit(self, events: list[pb.Event]) -> None:
        if events:
            self.revision += 1
            self.log.append((self.revision, events))
            self.num_bytes += sum(_ENTRY_BYTES + event.kv.ByteSize() for event in events)

    def compact(self, revision: int) -> None:
        """Raises Refusal for a revision that is gone or has not come."""
        if revision <= self.compacted:
            raise Refusal(grpc.StatusCode.OUT_OF_RANGE, "mvcc: required revision has been compacted")
        if revision > self.revision:
            raise Refusal(grpc.StatusCode.OUT_OF_RANGE, "mvcc: required revision is a future revision")
        self.compacted = revision
        self.log = [entry for entry in self.log if entry[0] >= revision]
        self._before = {of: kv for of, kv in self._before.items() if of[1] > revision}
        self.num_bytes = sum(_ENTRY_BYTES + kv.ByteSize() for kv in self.kvs.values())
        self.num_bytes += sum(
            _ENTRY_BYTES + event.kv.ByteSize() for _, events in self.log for event in events
        )

    def grant(self, ttl_s: int, wanted: int, now: float) -> pb.LeaseGrantResponse:
        """Raises Refusal when there is no room, or there is such a lease."""
        self.check_room()
        if wanted in self.leases:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "lease already exists")
        self._last_lease += 1
        number, ttl_s = wanted or self._last_lease, max(ttl_s, LEAST_TTL_S)
        self.leases[number] = Lease(ttl_s, now + ttl_s)
        return pb.LeaseGrantResponse(ID=number, TTL=ttl_s)

    def renew(self, number: int, now: float) -> int:
        """Its time to live; 0: there is no such lease."""
        lease = self.leases.get(number)
        if lease is None:
            return 0
        lease.expires_at = now + lease.ttl_s
        return lease.ttl_s

    def revoke(self, number: int) -> list[bytes]:
        """Deletes its keys under one revision. Raises Refusal when there is none."""
        lease = self.leases.pop(number, None)
        if lease is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "requested lease not found")
        events: list[pb.Event] = []
        keys = sorted(lease.keys)
        self._delete(keys, events)
        self._commit(events)
        return keys

    def since(self, revision: int, until: int) -> Iterator[list[pb.Event]]:
        """The events of each revision from `revision` to `until`."""
        for number, events in self.log[bisect_left(self.log, revision, key=lambda entry: entry[0]) :]:
            if number <= until:
                yield events


class _Chosen:
    """One side of a transaction, nested ones included, by what held before anything was written."""

    def __init__(self, data: Data, txn: pb.TxnRequest) -> None:
        self.holds = all(_holds(data, compare) for compare in txn.compare)
        ops = txn.success if self.holds else txn.failure
        self.ops: list[pb.RequestOp | _Chosen] = [
            _Chosen(data, op.request_txn) if op.HasField("request_txn") else op for op in ops
        ]

    def writes(self) -> Iterator[pb.RequestOp]:
        for op in self.ops:
            if isinstance(op, _Chosen):
                yield from op.writes()
            elif not op.HasField("request_range"):
                yield op


def _holds(data: Data, compare: pb.Compare) -> bool:
    kv = data.kvs.get(compare.key, pb.KeyValue())
    if compare.target == pb.Compare.MOD:
        return bool(kv.mod_revision == compare.mod_revision)
    assert compare.target == pb.Compare.LEASE, "the store compares nothing else"
    return bool(kv.lease == compare.lease)


def _needs_room(txn: pb.TxnRequest) -> bool:
    """As etcd counts it: without what nested transactions put."""
    return any(op.HasField("request_put") for op in (*txn.success, *txn.failure))
