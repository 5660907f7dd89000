# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of membership and the worker agent. kvlink.control.values documents the fields."""

from __future__ import annotations

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated
from kvlink.control.codec._cards import seal, unseal
from kvlink.control.codec._version import UNSAID, check_version
from kvlink.control.codec._wire import Codec, check_name, check_opaque, check_within, codec, nothing, plain
from kvlink.control.values import (
    ConnectReply,
    ConnectRequest,
    CoordinatorStatus,
    JoinRequest,
    Membership,
    Push,
    PushKind,
    Renewal,
    SettleOrder,
    Watch,
    WorkerChanges,
    WorkerEpoch,
)
from kvlink.types import PROTOCOL_VERSION, Joined, WorkerCard, WorkerChange
from kvlink.v1 import agent_pb2 as agent
from kvlink.v1 import coordinator_pb2 as pb


def _check_worker(value: WorkerEpoch | SettleOrder) -> None:
    check_name("worker_id", value.worker_id)


def _check_membership(membership: Membership) -> None:
    check_within("lease_s", membership.lease_s, 0.001, limits.MAX_TTL_S)
    check_within("keep_alive_s", membership.keep_alive_s, 0.001, limits.MAX_TTL_S)


def _check_status(status: CoordinatorStatus) -> None:
    check_within("uptime_s", status.uptime_s, 0, 1e12)


def _write_join(request: JoinRequest) -> pb.JoinRequest:
    return pb.JoinRequest(card=seal(request.card), rejoin=request.rejoin)


def _read_join(message: pb.JoinRequest) -> JoinRequest:
    return JoinRequest(unseal(message.card), message.rejoin)


def _write_membership(membership: Membership) -> pb.JoinReply:
    _check_membership(membership)
    epoch, lease_s, keep_alive_s = membership
    return pb.JoinReply(
        epoch=epoch, lease_s=lease_s, keep_alive_s=keep_alive_s, protocol_version=PROTOCOL_VERSION
    )


def _read_membership(message: pb.JoinReply) -> Membership:
    check_version("the coordinator", message.protocol_version or UNSAID)
    membership = Membership(message.epoch, message.lease_s, message.keep_alive_s)
    _check_membership(membership)
    return membership


def _write_push(push: Push) -> pb.Push:
    return pb.Push(kind=push.kind.value, slot=push.slot, settle_nonce=push.settle_nonce)  # type: ignore[arg-type]


def _read_push(message: pb.Push) -> Push:
    return Push(PushKind(message.kind), message.slot, message.settle_nonce)


def _write_cards(cards: list[WorkerCard]) -> pb.ListWorkersReply:
    return pb.ListWorkersReply(cards=[seal(card) for card in cards])


def _read_cards(message: pb.ListWorkersReply) -> list[WorkerCard]:
    return [unseal(card) for card in message.cards]


def _check_watch(watch: Watch) -> None:
    check_within("number of workers watched", len(watch.worker_ids), 0, limits.MAX_WATCHED)
    for worker_id in watch.worker_ids:
        check_name("worker_id", worker_id)


def _write_watch(watch: Watch) -> pb.WatchWorkersRequest:
    _check_watch(watch)
    return pb.WatchWorkersRequest(worker_ids=sorted(watch.worker_ids))


def _read_watch(message: pb.WatchWorkersRequest) -> Watch:
    watch = Watch(frozenset(message.worker_ids))
    _check_watch(watch)
    return watch


def _write_changes(changes: WorkerChanges) -> pb.WatchWorkersReply:
    return pb.WatchWorkersReply(changes=[_write_change(change) for change in changes])


def _write_change(change: WorkerChange) -> pb.WatchWorkersReply.Change:
    return pb.WatchWorkersReply.Change(down=change.what is Joined.DOWN, card=seal(change.card))


def _read_changes(message: pb.WatchWorkersReply) -> WorkerChanges:
    return [WorkerChange(Joined.DOWN if c.down else Joined.UP, unseal(c.card)) for c in message.changes]


def _write_connect(request: ConnectRequest) -> agent.ConnectRequest:
    _check_connect(request)
    return agent.ConnectRequest(
        worker_id=request.worker_id,
        epoch=request.epoch,
        transport=request.transport,
        hellos=request.hellos,
        protocol_version=PROTOCOL_VERSION,
        takes_keys=request.takes_keys,
    )


def _read_connect(message: agent.ConnectRequest) -> ConnectRequest:
    check_version("the reader", message.protocol_version or UNSAID)
    request = ConnectRequest(
        message.worker_id, message.epoch, message.transport, list(message.hellos), message.takes_keys
    )
    _check_connect(request)
    return request


def _check_connect(request: ConnectRequest) -> None:
    check_name("worker_id", request.worker_id)
    check_name("transport", request.transport)
    check_within("number of hellos", len(request.hellos), 1, limits.MAX_HELLOS)
    check_opaque("a hello", *request.hellos)


def _write_connected(reply: ConnectReply) -> agent.ConnectReply:
    return agent.ConnectReply(
        connection_id=reply.connection_id,
        replies=reply.replies,
        pool_keys=reply.pool_keys,
        lease_keys=reply.lease_keys,
    )


def _read_connected(message: agent.ConnectReply) -> ConnectReply:
    reply = ConnectReply(
        message.connection_id, list(message.replies), tuple(message.pool_keys), tuple(message.lease_keys)
    )
    check_within("number of replies", len(reply.replies), 1, limits.MAX_HELLOS)
    check_within("number of pool keys", len(reply.pool_keys), 0, limits.MAX_REGIONS)
    check_opaque("a reply", *reply.replies)
    check_within("number of lease keys", len(reply.lease_keys), 0, limits.MAX_LEASE_KEYS)
    check_within("connection_id", reply.connection_id, 0, limits.MAX_CONNECTION_ID)
    check_opaque("a key", *reply.pool_keys, *reply.lease_keys)
    return reply


def _write_renewal(renewal: Renewal) -> agent.RenewSeatsRequest:
    check_name("worker_id", renewal.worker_id)
    check_within("number of seats", len(renewal.seats), 0, limits.MAX_BATCH_OPS)
    slots, nonces = zip(*renewal.seats, strict=True) if renewal.seats else ((), ())
    return agent.RenewSeatsRequest(
        worker_id=renewal.worker_id, epoch=renewal.epoch, slots=slots, settle_nonces=nonces
    )


def _read_renewal(message: agent.RenewSeatsRequest) -> Renewal:
    check_name("worker_id", message.worker_id)
    check_within("number of seats", len(message.slots), 0, limits.MAX_BATCH_OPS)
    check_within("number of nonces", len(message.settle_nonces), len(message.slots), len(message.slots))
    seats = list(zip(message.slots, message.settle_nonces, strict=True))
    return Renewal(message.worker_id, message.epoch, seats)


def _read_ended(message: agent.RenewSeatsReply) -> list[int]:
    check_within("number of ended seats", len(message.ended), 0, limits.MAX_BATCH_OPS)
    return list(message.ended)


_LISTED = Repeated("cards", limits.MAX_LISTED)
_HELLOS: Bounds = {4: Repeated("hellos", limits.MAX_HELLOS)}
_REPLIES: Bounds = {
    2: Repeated("replies", limits.MAX_HELLOS),
    3: Repeated("pool keys", limits.MAX_REGIONS),
    4: Repeated("lease keys", limits.MAX_LEASE_KEYS),
}
_SEATS: Bounds = {
    3: Repeated("seats", limits.MAX_BATCH_OPS, packed=True),
    4: Repeated("nonces", limits.MAX_BATCH_OPS, packed=True),
}
_ENDED: Bounds = {1: Repeated("ended seats", limits.MAX_BATCH_OPS, packed=True)}

JOIN = codec(pb.JoinRequest, _write_join, _read_join)
MEMBERSHIP = codec(pb.JoinReply, _write_membership, _read_membership)
PUSH = codec(pb.Push, _write_push, _read_push)
LEAVE = codec(pb.LeaveRequest, *plain(WorkerEpoch, pb.LeaveRequest, _check_worker))
LEFT = nothing(pb.LeaveReply)
GET_WORKER = codec(pb.GetWorkerRequest, *plain(WorkerEpoch, pb.GetWorkerRequest, _check_worker))
LIST = nothing(pb.ListWorkersRequest)
CARDS = codec(pb.ListWorkersReply, _write_cards, _read_cards, {1: _LISTED})
WATCH = codec(
    pb.WatchWorkersRequest, _write_watch, _read_watch, {1: Repeated("workers watched", limits.MAX_WATCHED)}
)
CHANGES = codec(pb.WatchWorkersReply, _write_changes, _read_changes, {1: _LISTED._replace(name="changes")})

ASK_STATUS = nothing(pb.StatusRequest)
STATUS = codec(pb.StatusReply, *plain(CoordinatorStatus, pb.StatusReply, _check_status))

GET_CARD = nothing(agent.GetCardRequest)
CONNECT = codec(agent.ConnectRequest, _write_connect, _read_connect, _HELLOS)
CONNECTED = codec(agent.ConnectReply, _write_connected, _read_connected, _REPLIES)
SETTLE_SEAT = codec(agent.SettleSeatRequest, *plain(SettleOrder, agent.SettleSeatRequest, _check_worker))
SEAT_SETTLED: Codec[bool] = codec(
    agent.SettleSeatReply,
    lambda settled: agent.SettleSeatReply(settled=settled),
    lambda message: message.settled,
)
RENEW_SEATS = codec(agent.RenewSeatsRequest, _write_renewal, _read_renewal, _SEATS)
SEATS_ENDED: Codec[list[int]] = codec(
    agent.RenewSeatsReply, lambda ended: agent.RenewSeatsReply(ended=ended), _read_ended, _ENDED
)
