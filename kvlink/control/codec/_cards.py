# SPDX-License-Identifier: Apache-2.0
"""Encodes worker cards, and seals them with a checksum."""

from __future__ import annotations

import zlib

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated, Single, check
from kvlink.control.codec._wire import (
    Memoized,
    by_name,
    check_name,
    check_opaque,
    check_printable,
    check_version,
    check_within,
    codec,
)
from kvlink.errors import ConfigError
from kvlink.layout import Context, KVLayout, Pipeline, Plane
from kvlink.types import HostIdentity, NativeChannel, TransportCard, WorkerCard
from kvlink.v1 import card_pb2 as pb

_KEYS: Bounds = {
    3: Repeated("pool keys", limits.MAX_POOL_KEYS),
    4: Repeated("lease keys", limits.MAX_LEASE_KEYS * limits.MAX_TRANSPORTS),
}
_STAGES: Bounds = {2: Repeated("bounds of stages", limits.MAX_PLANES, packed=True)}
_BOUNDS: Bounds = {
    6: Repeated(
        "layouts",
        limits.MAX_LAYOUTS,
        {12: Repeated("planes", limits.MAX_PLANES), 16: Single(_STAGES)},
        together=True,
    ),
    7: Repeated("regions", limits.MAX_REGIONS, packed=True),
    8: Repeated("transports", limits.MAX_TRANSPORTS, _KEYS, together=True),
    11: Single({1: Repeated("addresses of the native channel", limits.MAX_CHANNEL_ADDRESSES)}),
}


def _seal(card: WorkerCard) -> pb.SealedCard:
    blob = _write(card).SerializeToString()
    if len(blob) > limits.MAX_CARD_BYTES:
        raise ConfigError(f"the card has {len(blob)} bytes, and at most {limits.MAX_CARD_BYTES} are accepted")
    return pb.SealedCard(card=blob, crc32=zlib.crc32(blob))


seal = Memoized(_seal, most=16_384)  # each card is sent to every watcher


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
    return _read(message)


def _check_card(card: WorkerCard) -> None:
    check_name("worker_id", card.worker_id)
    if card.agent or card.channel is None:
        check_name("agent", card.agent)
    if len(card.incarnation) != 16:
        raise ConfigError(f"the incarnation has {len(card.incarnation)} bytes, not 16")
    check_within("number of layouts", len(card.layouts), 1, limits.MAX_LAYOUTS)
    num_planes = sum(len(layout.planes) for layout in card.layouts)
    check_within("number of planes", num_planes, 0, limits.MAX_PLANES)
    check_within("number of regions", len(card.region_bytes), 0, limits.MAX_REGIONS)
    check_within("number of transports", len(card.transports), 0, limits.MAX_TRANSPORTS)
    texts = [card.host.boot_id, *(text for one in card.layouts for text in (one.model, one.dtype))]
    check_opaque("a name in the card", *texts)
    check_printable("a name in the card", *texts)
    num_keys = sum(len(transport.pool_keys) for transport in card.transports)
    check_within("number of pool keys", num_keys, 0, limits.MAX_POOL_KEYS)
    for transport in card.transports:
        check_within("number of lease keys", len(transport.lease_keys), 0, limits.MAX_LEASE_KEYS)
        check_opaque("a transport's name or address", transport.name, transport.address)
        check_printable("a transport's name", transport.name)
        check_printable("why a transport is refused", transport.refused.replace("\n", " "))
        check_opaque("a key", *transport.pool_keys, *transport.lease_keys, transport.refused)


def _check_channel(channel: NativeChannel) -> None:
    check_within(
        "number of addresses of the native channel", len(channel.addresses), 1, limits.MAX_CHANNEL_ADDRESSES
    )
    for address in channel.addresses:
        check_name("an address of the native channel", address)
    if (len(channel.instance), len(channel.secret)) != (16, 32):
        raise ConfigError(
            "the native channel has an instance or a secret of another size than 16 and 32 bytes"
        )


_write, _read = by_name(
    WorkerCard,
    pb.WorkerCard,
    _check_card,
    optional=("channel",),
    channel=by_name(NativeChannel, pb.NativeChannel, _check_channel),
    host=by_name(HostIdentity, pb.HostIdentity),
    layouts=by_name(
        KVLayout,
        pb.KVLayout,
        planes=by_name(Plane, pb.Plane),
        pipeline=by_name(Pipeline, pb.Pipeline),
        context=by_name(Context, pb.Context),
    ),
    transports=by_name(TransportCard, pb.TransportCard),
)
CARD = codec(pb.SealedCard, seal, unseal)
