# SPDX-License-Identifier: Apache-2.0
"""An etcd inside a test: what the store uses of it, at once and without time; leases end when the test says so."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from kvlink.v1 import etcd_pb2 as pb

FULL = "etcdserver: mvcc: database space exceeded"


class Clock:
    """Is the clock of a store, which the test moves."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Data:
    cluster_id: int
    revision: int = 1
    kvs: dict[bytes, pb.KeyValue] = field(default_factory=dict)
    log: list[list[pb.Event]] = field(default_factory=list)
    leases: set[int] = field(default_factory=set)
    compacted: int = 0


class FakeEtcd:
    """Serves as the `trust` of a store: whatever it dials leads here."""

    def __init__(self, cluster_id: int = 1) -> None:
        self.data = _Data(cluster_id)
        self.is_away = False
        """Connections are refused."""
        self.is_full = False
        self.is_mute = False
        """Watches bring nothing."""
        self.calls: list[str] = []
        self._watches: list[_Call] = []
        self._ids = itertools.count(1)

    def dial(self, address: str, options: object) -> FakeEtcd:
        return self

    def advice(self, sentence: str) -> str:
        return ""

    async def close(self) -> None:
        pass

    def unary_unary(self, path: str) -> Callable[..., Any]:
        name = path.rpartition("/")[2]
        request_type, handle = {
            "Range": (pb.RangeRequest, self._range),
            "Txn": (pb.TxnRequest, self._txn),
            "Compact": (pb.CompactionRequest, self._compact),
            "LeaseGrant": (pb.LeaseGrantRequest, self._grant),
            "LeaseRevoke": (pb.LeaseRevokeRequest, self._revoke),
        }[name]

        async def call(blob: bytes, timeout: float, metadata: object) -> bytes:
            self.calls.append(name)
            await asyncio.sleep(0)
            if self.is_away:
                raise _failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
            return handle(request_type.FromString(blob)).SerializeToString()

        return call

    def stream_stream(self, path: str) -> Callable[..., Any]:
        name = path.rpartition("/")[2]
        handle = {"Watch": self._watch, "LeaseKeepAlive": self._keep_alive}[name]

        def call(metadata: object) -> _Call:
            self.calls.append(name)
            stream = _Call(handle)
            if self.is_away:
                stream.end(grpc.StatusCode.UNAVAILABLE, "connection refused")
            return stream

        return call

    def go_away(self) -> None:
        """Refuses connections and ends those that stand, until `is_away` is False."""
        self.is_away = True
        self.cut()

    def wipe(self, cluster_id: int | None = None) -> None:
        """Restarts it with nothing."""
        self.data = _Data(cluster_id or self.data.cluster_id)
        self.cut()

    def snapshot(self) -> _Data:
        return copy.deepcopy(self.data)

    def restore(self, snapshot: _Data) -> None:
        """Restarts it with what it had."""
        self.data = copy.deepcopy(snapshot)
        self.cut()

    def put(self, *pairs: tuple[bytes, bytes]) -> None:
        """By another client, in one revision."""
        self._write([_put(pair) for pair in pairs])

    def cut(self) -> None:
        """Ends the connections that stand."""
        for watch in self._watches:
            watch.end(grpc.StatusCode.UNAVAILABLE, "connection reset")
        self._watches.clear()

    def _header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(cluster_id=self.data.cluster_id, member_id=1, revision=self.data.revision)

    def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        return pb.RangeResponse(header=self._header(), kvs=self._found(request))

    def _found(self, request: pb.RangeRequest) -> list[pb.KeyValue]:
        end = request.range_end or request.key + b"\0"
        return [self.data.kvs[key] for key in sorted(self.data.kvs) if request.key <= key < end]

    def _holds(self, compare: pb.Compare) -> bool:
        kv = self.data.kvs.get(compare.key)
        if compare.target == pb.Compare.MOD:
            return (kv.mod_revision if kv else 0) == compare.mod_revision
        return kv is not None and kv.lease == compare.lease

    def _chosen(self, txn: pb.TxnRequest) -> tuple[bool, list[Any]]:
        holds = all(map(self._holds, txn.compare))
        ops = txn.success if holds else txn.failure
        nested = [self._chosen(op.request_txn) if op.HasField("request_txn") else op for op in ops]
        return holds, nested

    def _txn(self, txn: pb.TxnRequest) -> pb.TxnResponse:
        if self.is_full and _puts(txn):
            raise _failure(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
        chosen = self._chosen(txn)
        self._write(_flat(chosen))
        return self._answer(chosen)

    def _answer(self, chosen: tuple[bool, list[Any]]) -> pb.TxnResponse:
        reply = pb.TxnResponse(header=self._header(), succeeded=chosen[0])
        for op in chosen[1]:
            response = reply.responses.add()
            if isinstance(op, tuple):
                response.response_txn.CopyFrom(self._answer(op))
            elif op.HasField("request_range"):
                response.response_range.kvs.extend(self._found(op.request_range))
        return reply

    def _write(self, ops: Iterable[pb.RequestOp]) -> None:
        data, events = self.data, []
        revision = data.revision + 1
        for op in ops:
            if op.HasField("request_put"):
                put = op.request_put
                if put.lease and put.lease not in data.leases:
                    raise _failure(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
                kv = pb.KeyValue(key=put.key, value=put.value, lease=put.lease, mod_revision=revision)
                data.kvs[put.key] = kv
                events.append(pb.Event(kv=kv))
            elif op.HasField("request_delete_range") and data.kvs.pop(op.request_delete_range.key, None):
                gone = pb.KeyValue(key=op.request_delete_range.key, mod_revision=revision)
                events.append(pb.Event(type=pb.Event.DELETE, kv=gone))
        if events:
            data.revision = revision
            data.log.append(events)
            for watch in self._watches:
                self._tell(watch, [events])

    def _compact(self, request: pb.CompactionRequest) -> pb.CompactionResponse:
        self.data.compacted = request.revision
        return pb.CompactionResponse()

    def _grant(self, request: pb.LeaseGrantRequest) -> pb.LeaseGrantResponse:
        if self.is_full:
            raise _failure(grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
        lease = next(self._ids)
        self.data.leases.add(lease)
        return pb.LeaseGrantResponse(ID=lease, TTL=request.TTL)

    def _revoke(self, request: pb.LeaseRevokeRequest) -> pb.LeaseRevokeResponse:
        self.data.leases.discard(request.ID)
        mine = [key for key, kv in self.data.kvs.items() if kv.lease == request.ID]
        self._write(pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key)) for key in mine)
        return pb.LeaseRevokeResponse()

    def _keep_alive(self, stream: _Call, blob: bytes) -> None:
        lease = pb.LeaseKeepAliveRequest.FromString(blob).ID
        stream.bring(pb.LeaseKeepAliveResponse(ID=lease, TTL=10 if lease in self.data.leases else 0))

    def _watch(self, stream: _Call, blob: bytes) -> None:
        stream.asked = asked = pb.WatchRequest.FromString(blob).create_request
        stream.bring(pb.WatchResponse(header=self._header(), created=True))
        if asked.start_revision < self.data.compacted:
            stream.bring(pb.WatchResponse(header=self._header(), compact_revision=self.data.compacted))
            return
        self._watches.append(stream)
        self._tell(stream, self.data.log)

    def _tell(self, stream: _Call, log: Iterable[list[pb.Event]]) -> None:
        asked = stream.asked
        events = [
            event
            for revision in log
            for event in revision
            if event.kv.mod_revision >= asked.start_revision and asked.key <= event.kv.key < asked.range_end
        ]
        if events and not self.is_mute:
            stream.bring(pb.WatchResponse(header=self._header(), events=events))


class _Call:
    """The part of a grpc.aio stream that `Stream` uses."""

    def __init__(self, handle: Callable[[_Call, bytes], None]) -> None:
        self._handle = handle
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._callbacks: list[Callable[[_Call], None]] = []
        self._ended: tuple[grpc.StatusCode, str] | None = None
        self.asked = pb.WatchCreateRequest()

    def add_done_callback(self, callback: Callable[[_Call], None]) -> None:
        self._callbacks.append(callback)
        if self._ended:
            callback(self)

    def bring(self, reply: Any) -> None:
        self._replies.put_nowait(reply.SerializeToString())

    def end(self, code: grpc.StatusCode, details: str) -> None:
        if self._ended is None:
            self._ended = code, details
            self._replies.put_nowait(grpc.aio.EOF if code is grpc.StatusCode.OK else _failure(code, details))
            for callback in self._callbacks:
                callback(self)

    async def write(self, blob: bytes) -> None:
        await asyncio.sleep(0)
        if self._ended:
            raise _failure(*self._ended)
        self._handle(self, blob)

    async def read(self) -> Any:
        reply = await self._replies.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def done_writing(self) -> None:
        self.end(grpc.StatusCode.OK, "")

    def cancel(self) -> None:
        self.end(grpc.StatusCode.CANCELLED, "cancelled")

    async def code(self) -> grpc.StatusCode:
        assert self._ended
        return self._ended[0]

    async def details(self) -> str:
        assert self._ended
        return self._ended[1]

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> Any:
        return grpc.aio.Metadata()


def _failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _put(pair: tuple[bytes, bytes]) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=pair[0], value=pair[1]))


def _puts(txn: pb.TxnRequest) -> bool:
    ops = [*txn.success, *txn.failure]
    return any(
        op.HasField("request_put") or (op.HasField("request_txn") and _puts(op.request_txn)) for op in ops
    )


def _flat(chosen: tuple[bool, list[Any]]) -> list[pb.RequestOp]:
    return [one for op in chosen[1] for one in (_flat(op) if isinstance(op, tuple) else [op])]
