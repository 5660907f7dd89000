# SPDX-License-Identifier: Apache-2.0
"""The decode side: reads what a worker offered, checks the lease, settles."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pyverbs.enums as e
from softroce.pyverbs_peer.admitted import shown_token
from softroce.pyverbs_peer.cards import connect_request, unpack_card
from softroce.pyverbs_peer.formats import (
    NONCE,
    READER,
    SETTLED,
    SLOT_BYTES,
    WITHDRAWN,
    WORDS_BYTES,
    Key,
    Ticket,
    announcement,
    pack_hello,
    unpack_address,
    unpack_reply,
)
from softroce.pyverbs_peer.nic import Connection, Memory, Nic, Read

from kvlink.v1 import agent_pb2, agent_pb2_grpc, card_pb2

_CALL_S = 60.0


class Reader:
    """Connected to a worker by two queue pairs. `port` counts in the worker's address."""

    def __init__(self, nic: Nic, agent: str, port: int = 0) -> None:
        self._nic = nic
        self._port = port
        self._lanes = [Connection(nic) for _ in range(2)]
        self._word = Memory(nic, 4096, e.IBV_ACCESS_LOCAL_WRITE)
        with grpc.insecure_channel(agent) as channel:
            stub = agent_pb2_grpc.WorkerAgentStub(channel)
            sealed = stub.GetCard(agent_pb2.GetCardRequest(), timeout=_CALL_S, metadata=shown_token())
            self.card, self._way = unpack_card(sealed)
            self.owner_ports = unpack_address(self._way.address)
            hellos = [pack_hello(port, lane.address()) for lane in self._lanes]
            request = connect_request(self.card, hellos)
            reply = stub.Connect(request, timeout=_CALL_S, metadata=shown_token())
        self.connection_id = reply.connection_id
        for lane, blob in zip(self._lanes, reply.replies, strict=True):
            lane.connect(unpack_reply(blob))
        self.pool = [Key.unpack(blob) for blob in self._way.pool_keys]
        self.leases, self.words = (Key.unpack(blob) for blob in self._way.lease_keys)

    def header(self) -> tuple[int, int, int]:
        """Magic, epoch and number of slots, of the lease table."""
        magic, epoch, num_slots = self._fetch(self.leases, 0, 24).view(np.uint64)
        return int(magic), int(epoch), int(num_slots)

    def announce(self, ticket: Ticket) -> None:
        """Before the first read: so that the owner can cut us off when the lease runs out."""
        self.store(
            self.words, self._words(ticket) + READER, announcement(self.connection_id, ticket.seats[0][1])
        )

    def withdraw(self, ticket: Ticket) -> None:
        """After the last read, where the lease is not settled."""
        word = announcement(self.connection_id | WITHDRAWN, ticket.seats[0][1])
        self.store(self.words, self._words(ticket) + READER, word)

    def blocks(self, ticket: Ticket) -> np.ndarray:
        """Every row of the request's tokens, shape [planes, tokens, heads, row_bytes]."""
        (layout,) = self.card.layouts
        shape = (len(layout.planes), ticket.num_tokens, layout.num_heads, layout.row_bytes)
        into = Memory(self._nic, int(np.prod(shape)), e.IBV_ACCESS_LOCAL_WRITE)
        reads = [
            self._read(self.pool[region], offset, into, at, num_bytes)
            for region, offset, at, num_bytes in _runs(layout, ticket)
        ]
        for number, lane in enumerate(self._lanes):
            lane.read(reads[number :: len(self._lanes)])
        return into.bytes.reshape(shape)

    def slot(self, ticket: Ticket) -> tuple[int, int]:
        """Nonce and ready, as they are now: after the data they say whether it counts."""
        nonce, ready = self._fetch(self.leases, self._slot(ticket) + NONCE, 16).view(np.uint64)
        return int(nonce), int(ready)

    def settle(self, ticket: Ticket) -> None:
        self.store(self.words, self._words(ticket) + SETTLED, ticket.seats[0][2])

    def store(self, key: Key, offset: int, value: int) -> None:
        """8 bytes. Raises WorkRefused."""
        self._lanes[0].write(
            key.base + offset, key.rkeys[self._port][offset // key.slice_bytes], value, self._word
        )

    def fetch(self, key: Key, offset: int, num_bytes: int) -> bytes:
        """Raises WorkRefused."""
        return self._fetch(key, offset, num_bytes).tobytes()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _slot(self, ticket: Ticket) -> int:
        return ticket.seats[0][0] * SLOT_BYTES

    def _words(self, ticket: Ticket) -> int:
        return ticket.seats[0][0] * WORDS_BYTES

    def _fetch(self, key: Key, offset: int, num_bytes: int) -> np.ndarray:
        into = Memory(self._nic, num_bytes, e.IBV_ACCESS_LOCAL_WRITE)
        self._lanes[0].read([self._read(key, offset, into, 0, num_bytes)])
        return into.bytes

    def _read(self, key: Key, offset: int, into: Memory, at: int, num_bytes: int) -> Read:
        rkey = key.rkeys[self._port][offset // key.slice_bytes]
        return Read(into.address + at, into.lkey, key.base + offset, rkey, num_bytes)


def _runs(layout: card_pb2.KVLayout, ticket: Ticket) -> Iterator[tuple[int, int, int, int]]:
    """(region, offset there, place here, bytes) of rows that adjoin on both sides. One owner rank has all heads."""
    run: list[int] = []
    at = 0
    for plane in layout.planes:
        for token in range(ticket.num_tokens):
            block, in_block = divmod(token, layout.block_tokens)
            row = (
                plane.offset + ticket.block_ids[block] * layout.block_stride + in_block * layout.token_stride
            )
            for head in range(layout.num_heads):
                offset = row + head * layout.head_stride
                if run and (plane.region, offset, at) == (run[0], run[1] + run[3], run[2] + run[3]):
                    run[3] += layout.row_bytes
                else:
                    if run:
                        yield tuple(run)
                    run = [plane.region, offset, at, layout.row_bytes]
                at += layout.row_bytes
    yield tuple(run)
