# SPDX-License-Identifier: Apache-2.0
"""Packs and reads the gRPC messages that connect two peers. Works without pyverbs."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from softroce.pyverbs_peer.formats import PROTOCOL_VERSION

from kvlink.v1 import agent_pb2, card_pb2


def card_layout(layout: Any) -> card_pb2.KVLayout:
    """Describes blocks as the card does."""
    values = {field.name: getattr(layout, field.name) for field in card_pb2.KVLayout.DESCRIPTOR.fields}
    values["planes"] = [asdict(plane) for plane in layout.planes]
    return card_pb2.KVLayout(
        **{name: asdict(value) if is_dataclass(value) else value for name, value in values.items()}
    )


def pack_card(
    worker_id: str, epoch: int, agent: str, layout: card_pb2.KVLayout, way: card_pb2.TransportCard, size: int
) -> card_pb2.SealedCard:
    """Returns the card of a worker with one region of `size` bytes, which one transport reaches."""
    card = card_pb2.WorkerCard(
        worker_id=worker_id,
        epoch=epoch,
        incarnation=secrets.token_bytes(16),
        agent=agent,
        host=card_pb2.HostIdentity(boot_id="another host", pid=1),
        layouts=(layout,),
        region_bytes=[size],
        transports=[way],
        protocol_version=PROTOCOL_VERSION,
    ).SerializeToString()
    return card_pb2.SealedCard(card=card, crc32=zlib.crc32(card))


def unpack_card(sealed: card_pb2.SealedCard) -> tuple[card_pb2.WorkerCard, card_pb2.TransportCard]:
    """Returns the card, and how verbs reaches its worker."""
    assert zlib.crc32(sealed.card) == sealed.crc32
    card = card_pb2.WorkerCard.FromString(sealed.card)
    assert card.protocol_version == PROTOCOL_VERSION
    (way,) = (way for way in card.transports if way.name == "verbs")
    assert not way.refused
    return card, way


def connect_request(card: card_pb2.WorkerCard, hellos: Sequence[bytes]) -> agent_pb2.ConnectRequest:
    """Asks the card's worker to admit a reader over verbs."""
    return agent_pb2.ConnectRequest(
        worker_id=card.worker_id,
        epoch=card.epoch,
        transport="verbs",
        hellos=hellos,
        protocol_version=PROTOCOL_VERSION,
    )
