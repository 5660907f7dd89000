# SPDX-License-Identifier: Apache-2.0
"""A simulated etcd: members on the simulated network that agree by majority, and speak etcd's gRPC API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from control_simulation.etcd_data import Data, Refusal
from control_simulation.network import Network
from control_simulation.processes import Process, true_time
from control_simulation.serving import SimulatedServer

from kvlink.v1 import etcd_pb2 as pb

T = TypeVar("T")

_TICK_S = 0.25
_ELECTION_S = (1.0, 2.0)
_NO_LEADER_S = 3.0
_REQUEST_S = 7.0
PORT = 2379


class SimulatedEtcd:
    """One cluster. What is written counts once a majority could have it."""

    def __init__(self, network: Network, num_members: int = 1, quota_bytes: int = 1 << 30) -> None:
        self.network = network
        self.data = Data(1, quota_bytes)
        self.on_expired: Callable[[list[bytes]], None] = lambda keys: None
        """Is told of keys whose lease was not renewed."""
        self.num_calls = 0
        self.loses_renewals = False
        self.lags_by_s = 0.0
        """Every other watch is told of changes so much later."""
        self.leader: Member | None = None
        self.one_at_a_time = asyncio.Lock()
        """For what happens to its processes and data."""
        self._leaderless_since = 0.0
        self._patience_s = 0.0
        self.members = [Member(self, f"10.0.9.{number + 1}", number) for number in range(num_members)]
        for member in self.members:
            member.start()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    @property
    def addresses(self) -> str:
        return ",".join(member.address for member in self.members)

    @property
    def hosts(self) -> list[str]:
        return [member.host for member in self.members]

    def wipe(self, cluster_id: int) -> None:
        """Starts again with nothing."""
        self.restore(Data(cluster_id, self.data.quota_bytes))

    def restore(self, snapshot: Data) -> None:
        """Starts again with what a snapshot holds."""
        for member in self.members:
            member.kill()
        self.data, self.leader = snapshot.copy(), None
        for member in self.members:
            member.applied = self.data.revision
            member.start()

    def disarm(self) -> None:
        """As operators do after they have made room."""
        self.data.alarm = False

    def quorum(self, member: Member) -> bool:
        """Whether it reaches a majority."""
        return 2 * sum(map(member.reaches, self.members)) > len(self.members)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._elect()
            if self.leader is not None:
                for number, lease in list(self.data.leases.items()):
                    if lease.expires_at < true_time():
                        self.on_expired(self.data.revoke(number))
                self.spread()

    def _elect(self) -> None:
        if self.leader is not None and self.quorum(self.leader):
            self._leaderless_since = true_time()
            self._patience_s = self.network.chance.uniform(*_ELECTION_S)
            return
        if self.leader is not None and true_time() - self._leaderless_since < self._patience_s:
            return
        self.leader = next(filter(self.quorum, self.members), None)
        if self.leader is not None:
            self.leader.applied = self.data.revision
            for lease in self.data.leases.values():
                lease.expires_at = true_time() + lease.ttl_s

    def spread(self) -> None:
        """Members that the leader reaches learn what was written."""
        for member in self.members:
            if (
                self.leader is not None
                and member.applied < self.data.revision
                and self.leader.reaches(member)
            ):
                due = true_time() + (0.0 if member is self.leader else self.network.delay_s())
                member.process.call_at(due, member.apply, self.data, self.data.revision)


class Member:
    """One address of the cluster. It keeps what it has over restarts."""

    def __init__(self, cluster: SimulatedEtcd, host: str, number: int) -> None:
        self.host = host
        self.address = f"{host}:{PORT}"
        self.applied = 1
        self._num_watches = 0
        self._cluster = cluster
        self._number = number
        self._changed = asyncio.Event()

    def start(self) -> None:
        self.process = Process(f"etcd{self._number}", self.host)
        self.process.start(self._serve())

    def kill(self) -> None:
        self._cluster.network.kill(self.process)

    def reaches(self, other: Member) -> bool:
        """And is reached."""
        network = self._cluster.network
        return (
            self.process.runs
            and other.process.runs
            and not network.is_cut(self.host, other.host)
            and not network.is_cut(other.host, self.host)
        )

    def apply(self, data: Data, revision: int) -> None:
        if data is self._cluster.data and revision > self.applied:
            self.applied = revision
            self._changed.set()
            self._changed = asyncio.Event()

    async def _serve(self) -> None:
        server = SimulatedServer(self._cluster.network, self.process)
        services = {
            "KV": {
                "Range": _unary(pb.RangeRequest, partial(self._answer, self._range)),
                "Txn": _unary(pb.TxnRequest, partial(self._answer, self._txn)),
                "Compact": _unary(pb.CompactionRequest, partial(self._answer, self._compact)),
            },
            "Lease": {
                "LeaseGrant": _unary(pb.LeaseGrantRequest, partial(self._answer, self._grant)),
                "LeaseRevoke": _unary(pb.LeaseRevokeRequest, partial(self._answer, self._revoke)),
                "LeaseKeepAlive": _stream(pb.LeaseKeepAliveRequest, self._keep_alive),
            },
            "Watch": {"Watch": _stream(pb.WatchRequest, self._watch)},
        }
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(f"etcdserverpb.{name}", methods)
                for name, methods in services.items()
            ]
        )
        server.add_insecure_port(self.address)
        await server.start()

    def _header(self) -> pb.ResponseHeader:
        data = self._cluster.data
        return pb.ResponseHeader(
            cluster_id=data.cluster_id, member_id=self._number + 1, revision=data.revision
        )

    async def _agreed(self, act: Callable[[Data], T]) -> T:
        """Carries out what a majority agrees on. Raises Refusal, too when there is none."""
        cluster = self._cluster
        cluster.num_calls += 1
        deadline = true_time() + _REQUEST_S
        while True:
            leader = cluster.leader
            if leader is not None and self.reaches(leader) and cluster.quorum(leader):
                hops = (self is not leader) + (len(cluster.members) > 1)
                await asyncio.sleep(0.0003 + sum(2 * cluster.network.delay_s() for _ in range(hops)))
                if cluster.leader is leader and self.reaches(leader) and cluster.quorum(leader):
                    break
            if true_time() > deadline:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "request timed out")
            await asyncio.sleep(_TICK_S)
        result = act(cluster.data)
        cluster.spread()
        revision = cluster.data.revision
        while self.applied < revision:
            await self._changed.wait()
        return result

    async def _answer(self, act: Callable[[Any, Data], T], request: Any, context: Any) -> T:
        try:
            return await self._agreed(partial(act, request))
        except Refusal as refusal:
            await _refuse(context, refusal)

    def _range(self, request: pb.RangeRequest, data: Data) -> pb.RangeResponse:
        reply = data.range(request)
        reply.header.CopyFrom(self._header())
        return reply

    def _txn(self, request: pb.TxnRequest, data: Data) -> pb.TxnResponse:
        reply = data.txn(request)
        reply.header.CopyFrom(self._header())
        return reply

    def _compact(self, request: pb.CompactionRequest, data: Data) -> pb.CompactionResponse:
        data.compact(request.revision)
        return pb.CompactionResponse()

    def _grant(self, request: pb.LeaseGrantRequest, data: Data) -> pb.LeaseGrantResponse:
        return data.grant(request.TTL, request.ID, true_time())

    def _revoke(self, request: pb.LeaseRevokeRequest, data: Data) -> pb.LeaseRevokeResponse:
        data.revoke(request.ID)
        return pb.LeaseRevokeResponse()

    async def _keep_alive(self, requests: AsyncIterator[pb.LeaseKeepAliveRequest], context: Any) -> None:
        try:
            async for request in requests:
                number = request.ID
                if self._cluster.loses_renewals and self._cluster.network.chance.random() < 0.5:
                    raise Refusal(grpc.StatusCode.UNAVAILABLE, "the stream was reset")
                ttl_s = await self._agreed(lambda data, number=number: data.renew(number, true_time()))  # type: ignore[misc]
                await context.write(pb.LeaseKeepAliveResponse(ID=number, TTL=ttl_s))
        except Refusal as refusal:
            await _refuse(context, refusal)

    async def _watch(self, requests: AsyncIterator[pb.WatchRequest], context: Any) -> None:
        """One watch a stream, as the store has it; asked for with `hasleader`."""
        request = (await anext(requests)).create_request
        data, begin = self._cluster.data, request.start_revision or self.applied + 1
        await context.write(pb.WatchResponse(header=self._header_applied(), created=True))
        self._num_watches += 1
        lags = self._num_watches % 2
        led_at = true_time()
        while data is self._cluster.data:
            if begin < data.compacted:
                await context.write(
                    pb.WatchResponse(
                        header=self._header_applied(), canceled=True, compact_revision=data.compacted
                    )
                )
                return
            for events in list(data.since(begin, self.applied)):
                seen = [event for event in events if request.key <= event.kv.key < request.range_end]
                if seen:
                    await asyncio.sleep(
                        lags * self._cluster.lags_by_s * self._cluster.network.chance.random()
                    )
                    await context.write(pb.WatchResponse(header=self._header_applied(), events=seen))
            begin = max(begin, self.applied + 1)
            leader = self._cluster.leader
            if leader is not None and self.reaches(leader):
                led_at = true_time()
            elif true_time() - led_at > _NO_LEADER_S:
                await _refuse(context, Refusal(grpc.StatusCode.UNAVAILABLE, "no leader"))
            changed = self._changed.wait()
            try:
                await asyncio.wait_for(changed, 1.0)
            except asyncio.TimeoutError:
                continue

    def _header_applied(self) -> pb.ResponseHeader:
        header = self._header()
        header.revision = self.applied
        return header


async def _refuse(context: Any, refusal: Refusal) -> NoReturn:
    await context.abort(refusal.code, refusal.details)
    raise AssertionError("abort raises")


def _unary(request: Any, handle: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        handle, request.FromString, lambda reply: reply.SerializeToString()
    )


def _stream(request: Any, handle: Any) -> Any:
    return grpc.stream_stream_rpc_method_handler(
        handle, request.FromString, lambda reply: reply.SerializeToString()
    )
