# SPDX-License-Identifier: Apache-2.0
"""The peer that was written from the formats alone still speaks today's protocol.

`make test-rdma` lets it read and be read over a NIC; this needs none. The blobs of verbs are in a file, which the test
of csrc/transports/verbs/protocol.cc parses, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from softroce.pyverbs_peer import cards, formats
from transports.pools import PoolSpec

from kvlink import BlockPool, Ticket, Worker, WorkerConfig
from kvlink.control.codec import CARD, AgentCalls
from kvlink.v1 import card_pb2

_BLOBS = Path(__file__).parents[1] / "cpp/transports/verbs/blobs.txt"
_GID = bytes.fromhex("00000000000000000000ffff0a000102")
_QUEUE_PAIR = formats.QueuePair(0x1234, 0xABCDE, 7, 3, 16, 8, _GID)
_PORTS = [formats.Port("mlx5_0:1", 1, 0, 400_000, _GID), formats.Port("rxe0:1", 0, 7, 1, bytes(16))]
_KEY = formats.Key(0, 1 << 40, (3 << 20) - 5, 1 << 20, ((1, 2, 3), (4, 5, 6)))

MEANT: dict[str, tuple[bytes, Callable[[bytes], Any], Any]] = {
    "address": (formats.pack_address(_PORTS), formats.unpack_address, _PORTS),
    "hello": (formats.pack_hello(1, _QUEUE_PAIR), formats.unpack_hello, (1, _QUEUE_PAIR)),
    "reply": (formats.pack_reply(_QUEUE_PAIR), formats.unpack_reply, _QUEUE_PAIR),
    "key": (_KEY.pack(), formats.Key.unpack, _KEY),
}


@pytest.mark.parametrize("name", MEANT)
def test_it_packs_and_reads_the_blobs_of_verbs(name: str) -> None:
    kept = dict(line.split() for line in _BLOBS.read_text().splitlines())
    packed, unpack, value = MEANT[name]
    assert packed.hex() == kept[name]
    assert unpack(bytes.fromhex(kept[name])) == value


def test_it_reads_the_tickets_cards_and_connects_of_a_worker_and_is_read() -> None:
    spec = PoolSpec(num_blocks=8)
    config = WorkerConfig(transports="tcp", ticket_keys="none")
    with Worker(BlockPool.allocate(spec.layout()), "owner", config=config) as owner:
        ticket = owner.offer("request", [5, 6, 1])
        seen = formats.Ticket.unpack(ticket.to_text())
        assert (seen.request_id, seen.worker_id, seen.epoch, seen.agent) == (
            "request", "owner", ticket.epoch, ticket.agent,
        )  # fmt: skip
        assert (seen.block_ids, seen.num_tokens, seen.ready) == ((5, 6, 1), ticket.num_tokens, ticket.ready)
        assert seen.seats == tuple(tuple(seat) for seat in ticket.seats)
        assert Ticket.from_text(seen.pack()).seats == ticket.seats
        way = card_pb2.TransportCard(
            name="verbs", address=b"address", pool_keys=[b"key"], lease_keys=[b"a", b"b"]
        )
        layout = cards.card_layout(spec.layout())
        sealed = cards.pack_card("peer", 77, "127.0.0.1:1", layout, way, owner.card.region_bytes[0])
        card = CARD.decode(sealed.SerializeToString())
        assert (card.layouts, card.region_bytes) == (owner.card.layouts, owner.card.region_bytes)
        theirs, _ = cards.unpack_card(card_pb2.SealedCard.FromString(CARD.encode(card)))
        assert (theirs.worker_id, theirs.epoch, theirs.layouts[0]) == ("peer", 77, layout)
        request = AgentCalls.CONNECT.request.decode(
            cards.connect_request(theirs, [b"hello"]).SerializeToString()
        )
        assert (request.worker_id, request.transport, request.hellos) == ("peer", "verbs", (b"hello",))
