# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of membership and the worker agent. kvlink.control.values documents the fields."""

from __future__ import annotations

from operator import attrgetter

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated
from kvlink.control.codec._cards import seal, unseal
from kvlink.control.codec._wire import (
    Codec,
    by_name,
    check_name,
    check_opaque,
    check_within,
    codec,
    nothing,
    versioned,
)
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
from kvlink.types import Joined, WorkerCard, WorkerChange
from kvlink.v1 import agent_pb2 as agent
from kvlink.v1 import coordinator_pb2 as pb


def _check_worker(value: WorkerEpoch | SettleOrder) -> None:
    check_name("worker_id", value.worker_id)


def _check_join(request: JoinRequest) -> None:
    check_name("agent", request.card.agent)  # coordinators ask it whether the worker is alive


def _check_membership(membership: Membership) -> None:
    check_within("lease_s", membership.lease_s, 0.001, limits.MAX_TTL_S)
    check_within("keep_alive_s", membership.keep_alive_s, 0.001, limits.MAX_TTL_S)


def _check_status(status: CoordinatorStatus) -> None:
    check_within("uptime_s", status.uptime_s, 0, 1e12)


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
    make, down = pb.WatchWorkersReply.Change, Joined.DOWN
    return pb.WatchWorkersReply(
        changes=[make(down=each.what is down, card=seal(each.card)) for each in changes]
    )


def _read_changes(message: pb.WatchWorkersReply) -> WorkerChanges:
    return [WorkerChange(Joined.DOWN if c.down else Joined.UP, unseal(c.card)) for c in message.changes]


def _check_connect(request: ConnectRequest) -> None:
    check_name("worker_id", request.worker_id)
    check_name("transport", request.transport)
    check_within("number of hellos", len(request.hellos), 1, limits.MAX_HELLOS)
    check_opaque("a hello", *request.hellos)


def _check_connected(reply: ConnectReply) -> None:
    check_within("number of replies", len(reply.replies), 1, limits.MAX_HELLOS)
    check_within("number of pool keys", len(reply.pool_keys), 0, limits.MAX_REGIONS)
    check_opaque("a reply", *reply.replies)
    check_within("number of lease keys", len(reply.lease_keys), 0, limits.MAX_LEASE_KEYS)
    check_within("connection_id", reply.connection_id, 0, limits.MAX_CONNECTION_ID)
    check_opaque("a key", *reply.pool_keys, *reply.lease_keys)


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


def _read_left(message: agent.DrainReply) -> int:
    return message.active_leases


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

JOIN = codec(pb.JoinRequest, *by_name(JoinRequest, pb.JoinRequest, _check_join, card=(seal, unseal)))
MEMBERSHIP = codec(
    pb.JoinReply, *versioned("the coordinator", by_name(Membership, pb.JoinReply, _check_membership))
)
PUSH = codec(pb.Push, *by_name(Push, pb.Push, kind=(attrgetter("value"), PushKind)))
LEAVE = codec(pb.LeaveRequest, *by_name(WorkerEpoch, pb.LeaveRequest, _check_worker))
LEFT = nothing(pb.LeaveReply)
GET_WORKER = codec(pb.GetWorkerRequest, *by_name(WorkerEpoch, pb.GetWorkerRequest, _check_worker))
LIST = nothing(pb.ListWorkersRequest)
CARDS = codec(pb.ListWorkersReply, _write_cards, _read_cards, {1: _LISTED})
WATCH = codec(
    pb.WatchWorkersRequest, _write_watch, _read_watch, {1: Repeated("workers watched", limits.MAX_WATCHED)}
)
CHANGES = codec(pb.WatchWorkersReply, _write_changes, _read_changes, {1: _LISTED._replace(name="changes")})

ASK_STATUS = nothing(pb.StatusRequest)
STATUS = codec(pb.StatusReply, *by_name(CoordinatorStatus, pb.StatusReply, _check_status))

GET_CARD = nothing(agent.GetCardRequest)
CONNECT = codec(
    agent.ConnectRequest,
    *versioned("the reader", by_name(ConnectRequest, agent.ConnectRequest, _check_connect)),
    _HELLOS,
)
CONNECTED = codec(agent.ConnectReply, *by_name(ConnectReply, agent.ConnectReply, _check_connected), _REPLIES)
SETTLE_SEAT = codec(agent.SettleSeatRequest, *by_name(SettleOrder, agent.SettleSeatRequest, _check_worker))
SEAT_SETTLED: Codec[bool] = codec(
    agent.SettleSeatReply,
    lambda settled: agent.SettleSeatReply(settled=settled),
    lambda message: message.settled,
)
DRAIN = codec(agent.DrainRequest, *by_name(WorkerEpoch, agent.DrainRequest, _check_worker))
LEASES_LEFT: Codec[int] = codec(
    agent.DrainReply, lambda leases: agent.DrainReply(active_leases=leases), _read_left
)
RENEW_SEATS = codec(agent.RenewSeatsRequest, _write_renewal, _read_renewal, _SEATS)
SEATS_ENDED: Codec[list[int]] = codec(
    agent.RenewSeatsReply, lambda ended: agent.RenewSeatsReply(ended=ended), _read_ended, _ENDED
)
