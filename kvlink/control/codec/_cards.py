# SPDX-License-Identifier: Apache-2.0
"""Encodes worker cards, and seals them with a checksum."""

from __future__ import annotations

import zlib
from operator import attrgetter

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated, Single, check
from kvlink.control.codec._memoized import Memoized
from kvlink.control.codec._version import check_version
from kvlink.control.codec._wire import check_name, check_opaque, check_printable, check_within, codec
from kvlink.errors import ConfigError
from kvlink.layout import KVLayout, Plane
from kvlink.types import HostIdentity, TransportCard, WorkerCard
from kvlink.v1 import card_pb2 as pb

_KEYS: Bounds = {
    3: Repeated("pool keys", limits.MAX_REGIONS),
    4: Repeated("lease keys", limits.MAX_LEASE_KEYS),
}
_BOUNDS: Bounds = {
    6: Single({12: Repeated("planes", limits.MAX_PLANES)}),
    7: Repeated("regions", limits.MAX_REGIONS, packed=True),
    8: Repeated("transports", limits.MAX_TRANSPORTS, _KEYS),
}
_LAYOUT_FIELDS = tuple(field.name for field in pb.KVLayout.DESCRIPTOR.fields if field.name != "planes")
_HOST_FIELDS = tuple(field.name for field in pb.HostIdentity.DESCRIPTOR.fields)
_layout_fields = attrgetter(*_LAYOUT_FIELDS)
_host_fields = attrgetter(*_HOST_FIELDS)


def _seal(card: WorkerCard) -> pb.SealedCard:
    _check_card(card)
    blob = pb.WorkerCard(
        worker_id=card.worker_id,
        epoch=card.epoch,
        incarnation=card.incarnation,
        agent=card.agent,
        host=pb.HostIdentity(**dict(zip(_HOST_FIELDS, _host_fields(card.host), strict=True))),
        layout=_write_layout(card.layout),
        region_bytes=card.region_bytes,
        transports=[_write_transport(transport) for transport in card.transports],
        protocol_version=card.protocol_version,
    ).SerializeToString()
    if len(blob) > limits.MAX_CARD_BYTES:
        raise ConfigError(f"the card has {len(blob)} bytes, and at most {limits.MAX_CARD_BYTES} are accepted")
    return pb.SealedCard(card=blob, crc32=zlib.crc32(blob))


seal = Memoized(_seal, most=4_096)  # each card is sent to every watcher


def unseal(sealed: pb.SealedCard) -> WorkerCard:
    if len(sealed.card) > limits.MAX_CARD_BYTES:
        raise ConfigError(
            f"the card has {len(sealed.card)} bytes, and at most {limits.MAX_CARD_BYTES} are accepted"
        )
    if zlib.crc32(sealed.card) != sealed.crc32:
        raise ConfigError("the checksum of the card does not match")
    check(sealed.card, _BOUNDS)
    message = pb.WorkerCard.FromString(sealed.card)
    check_version(f"worker {message.worker_id!r}", message.protocol_version)
    card = WorkerCard(
        worker_id=message.worker_id,
        epoch=message.epoch,
        incarnation=message.incarnation,
        agent=message.agent,
        host=HostIdentity(*_host_fields(message.host)),
        layout=_read_layout(message.layout),
        region_bytes=tuple(message.region_bytes),
        transports=tuple(_read_transport(transport) for transport in message.transports),
    )
    _check_card(card)
    return card


def _check_card(card: WorkerCard) -> None:
    check_name("worker_id", card.worker_id)
    check_name("agent", card.agent)
    if len(card.incarnation) != 16:
        raise ConfigError(f"the incarnation has {len(card.incarnation)} bytes, not 16")
    check_within("number of planes", len(card.layout.planes), 0, limits.MAX_PLANES)
    check_within("number of regions", len(card.region_bytes), 0, limits.MAX_REGIONS)
    check_within("number of transports", len(card.transports), 0, limits.MAX_TRANSPORTS)
    check_opaque("a name in the card", *(texts := (card.host.boot_id, card.layout.model, card.layout.dtype)))
    check_printable("a name in the card", *texts)
    for transport in card.transports:
        check_within("number of pool keys", len(transport.pool_keys), 0, limits.MAX_REGIONS)
        check_within("number of lease keys", len(transport.lease_keys), 0, limits.MAX_LEASE_KEYS)
        check_opaque("a transport's name or address", transport.name, transport.address)
        check_printable("a transport's name", transport.name)
        check_printable("why a transport is refused", transport.refused.replace("\n", " "))
        check_opaque("a key", *transport.pool_keys, *transport.lease_keys, transport.refused)


def _write_layout(layout: KVLayout) -> pb.KVLayout:
    planes = [pb.Plane(region=p.region, layer=p.layer, offset=p.offset) for p in layout.planes]
    return pb.KVLayout(planes=planes, **dict(zip(_LAYOUT_FIELDS, _layout_fields(layout), strict=True)))


def _read_layout(message: pb.KVLayout) -> KVLayout:
    planes = tuple(Plane(plane.region, plane.layer, plane.offset) for plane in message.planes)
    return KVLayout(planes=planes, **dict(zip(_LAYOUT_FIELDS, _layout_fields(message), strict=True)))


def _write_transport(card: TransportCard) -> pb.TransportCard:
    return pb.TransportCard(
        name=card.name,
        address=card.address,
        pool_keys=card.pool_keys,
        lease_keys=card.lease_keys,
        refused=card.refused,
        bounces=card.bounces,
    )


def _read_transport(message: pb.TransportCard) -> TransportCard:
    return TransportCard(
        message.name,
        message.address,
        tuple(message.pool_keys),
        tuple(message.lease_keys),
        message.refused,
        message.bounces,
    )


CARD = codec(pb.SealedCard, seal, unseal)
