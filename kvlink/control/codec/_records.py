# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of records that coordinators share through their store."""

from __future__ import annotations

from operator import attrgetter

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated
from kvlink.control.codec._wire import by_name, check_within, codec
from kvlink.control.values import Claimed, Incarnation
from kvlink.v1 import record_pb2 as pb


def _check_claimed(claimed: Claimed) -> None:
    check_within("ttl_s", claimed.ttl_s, 0.001, limits.MAX_TTL_S)


def _write_reader(reader: tuple[int, bytes]) -> pb.ClaimRecord.Reader:
    return pb.ClaimRecord.Reader(reader=reader[0], claim_id=reader[1])


INCARNATION = codec(pb.LifeRecord, *by_name(Incarnation, pb.LifeRecord))
_BOUNDS: Bounds = {
    1: Repeated("tickets", limits.MAX_RANKS),
    2: Repeated("readers", limits.MAX_RANKS),
}
_claimed = by_name(
    Claimed, pb.ClaimRecord, _check_claimed, readers=(_write_reader, attrgetter("reader", "claim_id"))
)
CLAIMED = codec(pb.ClaimRecord, *_claimed, _BOUNDS)
