# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of offers, claims and settles, alone and in batches. These are the most frequent messages."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated
from kvlink.control.codec._wire import Codec, by_name, check_name, check_within, codec, encoding, nothing
from kvlink.control.values import (
    Claim,
    HandoffBatch,
    HandoffKind,
    HandoffResults,
    Offer,
    RefusedHandoff,
    SettleOrder,
)
from kvlink.errors import ConfigError
from kvlink.v1 import coordinator_pb2 as pb


def _check_offer(offer: Offer) -> None:
    request_id, worker_id, _, ttl_s, rank, num_ranks, num_seats, ticket = offer
    check_name("request_id", request_id)
    check_name("worker_id", worker_id)
    check_within("ttl_s", ttl_s, 0.001, limits.MAX_TTL_S)
    if not rank < num_ranks <= limits.MAX_RANKS:
        raise ConfigError(f"rank {rank} of {num_ranks} is out of bounds")
    check_within("num_seats", num_seats, 1, limits.MAX_SEATS)
    check_within("bytes of the ticket", len(ticket), 1, limits.MAX_TICKET_BYTES)


def _check_claim(claim: Claim) -> None:
    request_id, timeout_s, reader, num_readers, claim_id = claim
    check_name("request_id", request_id)
    check_within("timeout_s", timeout_s, 0, limits.MAX_TIMEOUT_S)
    if not reader < num_readers <= limits.MAX_RANKS:
        raise ConfigError(f"reader {reader} of {num_readers} is out of bounds")
    check_within("bytes of claim_id", len(claim_id), 0, limits.MAX_CLAIM_ID_BYTES)


def _check_settle(order: SettleOrder) -> None:
    check_name("worker_id", order.worker_id)


_write_offer, _read_offer = by_name(Offer, pb.OfferRequest, _check_offer)
_write_claim, _read_claim = by_name(Claim, pb.ClaimRequest, _check_claim)
_write_settle, _read_settle = by_name(SettleOrder, pb.SettleRequest, _check_settle)
_write_refused, _read_refused = by_name(
    RefusedHandoff, pb.HandoffResults.Refused, kind=(attrgetter("value"), HandoffKind)
)


_OVERHEAD = 160
"""Bytes that an operation takes beyond its texts and ticket: its numbers, a claim id, and protobuf's framing."""
_OPERATION = Repeated("operations in a batch", limits.MAX_BATCH_OPS)
_BATCH: Bounds = {
    1: _OPERATION,
    2: _OPERATION,
    3: _OPERATION,
    4: Repeated("operations in a batch", limits.MAX_BATCH_OPS, packed=True),
}
_RESULTS: Bounds = {
    3: Repeated("claims answered", limits.MAX_LISTED, {2: Repeated("tickets", limits.MAX_RANKS)}),
    4: Repeated("refusals", limits.MAX_LISTED),
}


class BatchWriter:
    """Gathers the operations of one batch. An `add_*` method that raises ConfigError leaves the batch unchanged."""

    def __init__(self) -> None:
        self._batch = pb.HandoffBatch()
        self._bytes = 0
        self.num_ops = 0

    def takes(self, operation: Offer | SettleOrder | Claim | None) -> bool:
        """Returns whether the batch has room for an operation, or for a withdrawal if that is None.

        An empty batch takes any operation, so one that is too large for a batch is sent alone.
        """
        if self.num_ops >= limits.MAX_BATCH_OPS:
            return False
        return not self.num_ops or self._bytes + _most_bytes(operation) <= limits.MAX_BATCH_BYTES

    def add_offer(self, offer: Offer) -> None:
        self._add(self._batch.offers, _write_offer, offer)

    def add_settle(self, order: SettleOrder) -> None:
        self._add(self._batch.settles, _write_settle, order)

    def add_claim(self, claim: Claim) -> None:
        self._add(self._batch.claims, _write_claim, claim)

    def add_withdrawn(self, number: int) -> None:
        """Withdraws a claim, given its number in the stream."""
        self._batch.withdrawn.append(number)
        self.num_ops += 1

    def _add(self, to: Any, write: Callable[[Any], Any], value: Any) -> None:
        to.append(encoding(write, value))
        self.num_ops += 1
        self._bytes += _most_bytes(value)

    def to_bytes(self) -> bytes:
        return self._batch.SerializeToString()


def _most_bytes(operation: Offer | SettleOrder | Claim | None) -> int:
    """Returns an upper bound of the bytes that an operation takes in a batch. Each character counts as four bytes."""
    if operation is None:
        return _OVERHEAD
    if isinstance(operation, Offer):
        return _OVERHEAD + 4 * (len(operation.request_id) + len(operation.worker_id)) + len(operation.ticket)
    return _OVERHEAD + 4 * len(operation[0])


def _read_batch(message: pb.HandoffBatch) -> HandoffBatch:
    num_ops = len(message.offers) + len(message.settles) + len(message.claims) + len(message.withdrawn)
    check_within("number of operations in a batch", num_ops, 0, limits.MAX_BATCH_OPS)
    return HandoffBatch(
        [_read_offer(offer) for offer in message.offers],
        [_read_settle(order) for order in message.settles],
        [_read_claim(claim) for claim in message.claims],
        tuple(message.withdrawn),
    )


def _write_batch(batch: HandoffBatch) -> pb.HandoffBatch:
    return pb.HandoffBatch(
        offers=[_write_offer(offer) for offer in batch.offers],
        settles=[_write_settle(order) for order in batch.settles],
        claims=[_write_claim(claim) for claim in batch.claims],
        withdrawn=batch.withdrawn,
    )


def _write_results(results: HandoffResults) -> pb.HandoffResults:
    message = pb.HandoffResults(
        offers_done=results.offers_done,
        settles_done=results.settles_done,
        refused=[_write_refused(refused) for refused in results.refused],
    )
    add = message.claimed.add  # passing a list of messages would copy all tickets
    for number, tickets in results.claimed:
        claimed = add()
        claimed.claim = number
        claimed.tickets.extend(tickets)
    return message


def _read_results(message: pb.HandoffResults) -> HandoffResults:
    return HandoffResults(
        message.offers_done,
        message.settles_done,
        [(claimed.claim, list(claimed.tickets)) for claimed in message.claimed],
        [_read_refused(refused) for refused in message.refused],
    )


OFFER = codec(pb.OfferRequest, _write_offer, _read_offer)
OFFERED = nothing(pb.OfferReply)
CLAIM = codec(pb.ClaimRequest, _write_claim, _read_claim)
TICKETS: Codec[list[bytes]] = codec(
    pb.ClaimReply,
    lambda tickets: pb.ClaimReply(tickets=tickets),
    lambda message: list(message.tickets),
    {1: Repeated("tickets", limits.MAX_RANKS)},
)
SETTLE = codec(pb.SettleRequest, _write_settle, _read_settle)
SETTLE_PASSED_ON = nothing(pb.SettleReply)
HANDOFF_BATCH = codec(pb.HandoffBatch, _write_batch, _read_batch, _BATCH, limits.MAX_BATCH_BYTES)
HANDOFF_RESULTS = codec(pb.HandoffResults, _write_results, _read_results, _RESULTS)
