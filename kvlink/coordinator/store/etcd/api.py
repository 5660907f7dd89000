# SPDX-License-Identifier: Apache-2.0
"""Implements the part of etcd's v3 API that the store uses: calls, and functions that build transactions.

Calls go over kvlink's own Channel, so members fail over like coordinators. docs/operate/etcd.md says why no client
library is used.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from kvlink.control.codec import Codec, Method
from kvlink.control.denials import LogQuota
from kvlink.control.now import now
from kvlink.control.refusal import Reason, RefusedError, refusal_of
from kvlink.control.rpc.channel import Channel
from kvlink.control.rpc.stream import Stream
from kvlink.control.security import Trust
from kvlink.control.values import StoreHealth
from kvlink.coordinator.store.etcd.history import History
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable
from kvlink.v1 import etcd_pb2 as pb

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
M = TypeVar("M", bound=Message)

_ATTEMPT_S = 0.7
"""One member has this long to answer one call."""
_PATIENCE_S = 2.5
"""This covers an election, and is less than clients wait, so that they learn the reason."""
_PATIENCE_WHEN_AWAY_S = 0.5
"""Calls wait this long after one has failed, until one succeeds."""
_MAX_RENEWED = 500
"""Leases renewed in one call. 8,000 took 0.5 s of a busy core, and a coordinator may have 10,000 workers."""
_PAGE = 1_000
"""Number of keys in one reply of `load`."""
_NO_SPACE = "database space exceeded"
"""etcd reports this under RESOURCE_EXHAUSTED, which gRPC also uses for other errors."""


def _codec(message: type[M]) -> Codec[M]:
    return Codec(lambda value: value.SerializeToString(), message.FromString)


def _method(service: str, name: str, request: type[Q], reply: type[R]) -> Method[Q, R]:
    return Method(f"etcdserverpb.{service}", name, _codec(request), _codec(reply))


_RANGE = _method("KV", "Range", pb.RangeRequest, pb.RangeResponse)
_TXN = _method("KV", "Txn", pb.TxnRequest, pb.TxnResponse)
_COMPACT = _method("KV", "Compact", pb.CompactionRequest, pb.CompactionResponse)
_WATCH = _method("Watch", "Watch", pb.WatchRequest, pb.WatchResponse)
_GRANT = _method("Lease", "LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
_REVOKE = _method("Lease", "LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
_KEEP_ALIVE = _method("Lease", "LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)


class Etcd:
    """Calls any member of "host:2379,host2:2379". Every call retries for a while, then raises CoordinatorUnavailable.

    A write that raised may have been executed. A refused call raises CoordinatorError, or StoreFull if etcd has no
    space. `history` checks every answer that a majority agreed on.
    """

    def __init__(self, addresses: str, trust: Trust | None = None, clock: Callable[[], float] = now) -> None:
        """`trust` says how to connect to members. It comes from the environment by default."""
        advice = "Check that a majority of its members runs"
        self._channel = Channel(addresses, "etcd", advice, trust=trust, attempt_s=_ATTEMPT_S)
        self._patience_s = _PATIENCE_S
        self.history = History()
        self.health = Health(clock)

    def __repr__(self) -> str:
        return repr(self._channel)

    async def _call(self, method: Method[Q, R], request: Q) -> R:
        try:
            reply = await self._channel.call(method, request, self._patience_s)
        except CoordinatorUnavailable:
            self._patience_s = _PATIENCE_WHEN_AWAY_S
            self.health.doubt()
            raise
        except CoordinatorError as error:
            if _NO_SPACE not in str(error):
                raise
            self.health.note_full(error)
            raise StoreFull(str(error)) from None
        self._patience_s = _PATIENCE_S
        return reply

    async def _call_even_if_refused(self, method: Method[Q, R], request: Q) -> None:
        try:
            await self._call(method, request)
        except CoordinatorUnavailable:
            raise
        except CoordinatorError:
            pass

    async def close(self) -> None:
        """Closes the channel. Closing again has no effect."""
        await self._channel.close()

    async def commit(self, txn: pb.TxnRequest) -> pb.TxnResponse:
        """Executes one transaction."""
        began = self.history.mark()
        reply = await self._call(_TXN, txn)
        self.history.note(reply.header, began)
        if self.health.is_full and _counts_towards_quota(txn):
            self.health.note_room()
        return reply

    async def read(self, key: bytes, end: bytes = b"") -> pb.RangeResponse:
        """Returns what a majority agrees on now: `key`, or all keys from it up to but without `end`."""
        return await self._range(pb.RangeRequest(key=key, range_end=end))

    async def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        began = self.history.mark()
        reply = await self._call(_RANGE, request)
        self.history.note(reply.header, began)
        return reply

    async def load(self, prefix: bytes) -> tuple[int, list[pb.KeyValue]]:
        """Returns a revision and all keys under a prefix as of that revision."""
        start, end, revision = prefix, after(prefix), 0
        found: list[pb.KeyValue] = []
        while True:
            request = pb.RangeRequest(key=start, range_end=end, limit=_PAGE, revision=revision)
            reply = await self._range(request)
            revision = revision or reply.header.revision
            found += reply.kvs
            if not reply.more:
                return revision, found
            start = found[-1].key + b"\0"

    async def watch(self, prefix: bytes, revision: int) -> Stream[pb.WatchRequest, pb.WatchResponse]:
        """Opens a watch of every change under a prefix from `revision` on. Its first reply is only a confirmation."""
        # A member that has lost the majority ends the stream instead of falling silent.
        stream = self._channel.open(_WATCH, (("hasleader", "true"),))
        create = pb.WatchCreateRequest(key=prefix, range_end=after(prefix), start_revision=revision)
        await stream.send(pb.WatchRequest(create_request=create))
        return stream

    async def compact(self, revision: int) -> None:
        """Drops the history of keys before `revision`. Raises nothing if it was already compacted."""
        await self._call_even_if_refused(_COMPACT, pb.CompactionRequest(revision=revision))

    async def grant(self, ttl_s: int) -> int:
        """Creates a lease and returns its id. etcd may make it longer."""
        return (await self._call(_GRANT, pb.LeaseGrantRequest(TTL=ttl_s))).ID

    async def revoke(self, lease: int) -> None:
        """Ends a lease and deletes all of its keys. Raises nothing if it does not exist."""
        await self._call_even_if_refused(_REVOKE, pb.LeaseRevokeRequest(ID=lease))

    async def keep_alive(self, leases: Iterable[int]) -> set[int]:
        """Renews leases and returns those that exist. They are split over several calls, each with its own timeout."""
        alive: set[int] = set()
        left = iter(leases)
        while some := list(itertools.islice(left, _MAX_RENEWED)):
            alive |= await self._renew(some)
        return alive

    async def _renew(self, leases: list[int]) -> set[int]:
        """Renews leases at one member, without a retry."""
        alive = set()
        stream = self._channel.open(_KEEP_ALIVE)

        async def exchange() -> None:
            for lease in leases:
                await stream.send(pb.LeaseKeepAliveRequest(ID=lease))
            await stream.finish()
            while (reply := await stream.receive()) is not None:
                if reply.TTL > 0:
                    alive.add(reply.ID)

        try:
            await asyncio.wait_for(exchange(), _ATTEMPT_S)
        except CoordinatorUnavailable:
            self.health.doubt()
            raise
        except asyncio.TimeoutError:
            self.health.doubt()
            stream.avoid_server()
            raise CoordinatorUnavailable(
                f"{self._channel!r} did not renew {len(leases)} leases in {_ATTEMPT_S} s"
            ) from None
        finally:
            stream.cancel()
        return alive


def after(prefix: bytes) -> bytes:
    """Returns the first key after all keys that start with `prefix`, which must not end in 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def unchanged(key: bytes, revision: int) -> pb.Compare:
    """Compares: true if `key` was last written at `revision`. Revision 0 means that it is absent."""
    return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=revision)


def leased(key: bytes, lease: int) -> pb.Compare:
    """Compares: true if `key` exists under this lease."""
    return pb.Compare(target=pb.Compare.LEASE, key=key, lease=lease)


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    """Makes an operation that writes a key."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> pb.RequestOp:
    """Makes an operation that deletes a key."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


def get(key: bytes) -> pb.RequestOp:
    """Makes an operation that reads a key."""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def writes(txn: pb.TxnRequest) -> bool:
    """Returns whether a transaction may need space. Deletions do not."""
    ops = (*txn.success, *txn.failure)
    return any(op.HasField("request_put") or writes(op.request_txn) for op in ops)


def _counts_towards_quota(txn: pb.TxnRequest) -> bool:
    """Returns whether etcd checks its quota for a transaction. It accepts nested puts even if it is full."""
    return any(op.HasField("request_put") for op in (*txn.success, *txn.failure))


def nested(txn: pb.TxnRequest) -> pb.RequestOp:
    """Makes an operation from a transaction. etcd makes all comparisons before it writes anything."""
    return pb.RequestOp(request_txn=txn)


def split_url(url: str) -> tuple[str, str]:
    """Splits "etcd://a:2379,b:2379/fleet" into ("a:2379,b:2379", "fleet"). Raises ConfigError."""
    scheme, separator, rest = url.partition("://")
    addresses, _, fleet = rest.partition("/")
    if scheme != "etcd" or not separator or not addresses or "/" in fleet:
        raise ConfigError(
            f"{url!r} does not name a store: write memory, or etcd://host:2379,host2:2379, followed by /NAME if "
            "several fleets share one etcd"
        )
    return addresses, fleet or "default"


_log = logging.getLogger("kvlink.control")

_LOGGED_EVERY_S = 60.0
LOST_S = 3.0
"""The store counts as lost this long after the first doubt. An election takes less."""


class Health:
    """Tracks whether etcd is full, and whether the mirror is known to be up to date.

    `clock` returns monotonic seconds. `on_doubt` is called when `next_deadline` becomes earlier.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on_doubt: Callable[[], None] = lambda: None
        self.is_full = False
        self.is_lost = False
        self._clock = clock
        self._quota = LogQuota(1, _LOGGED_EVERY_S, clock)
        self._doubted_at = math.inf

    def note_full(self, error: Exception) -> None:
        """Notes that a write was refused for lack of space. It is logged at most once a minute."""
        self.is_full = True
        suppressed = self._quota.take()
        if suppressed is not None:
            _log.error("etcd is full, see the operator's guide suppressed=%d error=%s", suppressed, error)

    def note_room(self) -> None:
        """Notes that a write that needs space was executed."""
        if self.is_full:
            self.is_full = False
            _log.info("etcd has room again")

    def doubt(self) -> None:
        """Demands a proof, within `LOST_S` of the first demand, that the mirror has everything that etcd has."""
        if not self.is_doubted:
            self._doubted_at = self._clock()
            self.on_doubt()

    def proved(self) -> None:
        """Notes a proof that the mirror has everything that etcd has."""
        self._doubted_at = math.inf
        self.is_lost = False

    @property
    def is_doubted(self) -> bool:
        """Returns whether a proof is missing."""
        return self._doubted_at < math.inf

    def next_deadline(self) -> float:
        """Returns a time before which `expire` has nothing to do."""
        return math.inf if self.is_lost else self._doubted_at + LOST_S

    def expire(self) -> bool:
        """Returns True, once, if the proof has been missing for too long."""
        if self._clock() < self.next_deadline():
            return False
        self.is_lost = True
        return True

    def report(self) -> StoreHealth:
        """Returns the current health."""
        stale_s = self._clock() - self._doubted_at if self.is_doubted else 0.0
        return StoreHealth(self.is_full, self.is_lost, stale_s)


class StoreFull(CoordinatorError):
    """etcd has reached its quota (NOSPACE). It refuses writes, but reads, deletions and renewals continue."""


def as_refusal(error: BaseException) -> RefusedError:
    """Returns the refusal that a failed call of the store raises."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, CoordinatorUnavailable):
        return RefusedError(
            Reason.NOT_READY,
            f"the coordinator does not reach its store: {error}. Connected workers continue without it; retry",
        )
    if isinstance(error, StoreFull):
        return RefusedError(
            Reason.TOO_MANY,
            f"the coordinator's store is full: {error}. Compact it, defragment it and disarm its alarm as the "
            "operator's guide describes, then retry",
        )
    if isinstance(error, CoordinatorError):
        return RefusedError(Reason.FAILED, f"the coordinator's store refused the call: {error}")
    return refusal_of(error)
