# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of records that coordinators share through their store."""

from __future__ import annotations

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated
from kvlink.control.codec._wire import check_within, codec, plain
from kvlink.control.values import Claimed, Incarnation
from kvlink.v1 import record_pb2 as pb


def _write_claimed(claimed: Claimed) -> pb.ClaimRecord:
    readers = [pb.ClaimRecord.Reader(reader=reader, claim_id=name) for reader, name in claimed.readers]
    return pb.ClaimRecord(
        tickets=claimed.tickets, readers=readers, complete=claimed.complete, ttl_s=claimed.ttl_s
    )


def _read_claimed(message: pb.ClaimRecord) -> Claimed:
    readers = tuple((entry.reader, entry.claim_id) for entry in message.readers)
    check_within("ttl_s", message.ttl_s, 0.001, limits.MAX_TTL_S)
    return Claimed(tuple(message.tickets), readers, message.complete, message.ttl_s)


INCARNATION = codec(pb.LifeRecord, *plain(Incarnation, pb.LifeRecord))
_BOUNDS: Bounds = {
    1: Repeated("tickets", limits.MAX_TP_SIZE),
    2: Repeated("readers", limits.MAX_TP_SIZE),
}
CLAIMED = codec(pb.ClaimRecord, _write_claimed, _read_claimed, _BOUNDS)
