# SPDX-License-Identifier: Apache-2.0
"""Implements the prefill side: registers memory and a lease table, admits readers. Reads and settles run nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from softroce.pyverbs_peer.cards import pack_card
from softroce.pyverbs_peer.formats import (
    ABORTED_TOMBSTONE,
    SLOT_BYTES,
    TABLE_MAGIC,
    WITHDRAWN,
    WORDS_BYTES,
    Key,
    Ticket,
    announcement,
    pack_address,
    pack_reply,
    unpack_hello,
)
from softroce.pyverbs_peer.nic import PEERS_READ, PEERS_WRITE, Connection, Memory, Nic

from kvlink.v1 import agent_pb2, card_pb2

_NUM_SLOTS = 16
_EPOCH = 77
_CONNECTION_ID = 4711


class Owner:
    """One pool region with `contents`, registered in slices, so that reads must stop at their borders.

    `wrong_keys`: the card names keys that were never given out.
    """

    def __init__(
        self,
        nic: Nic,
        worker_id: str,
        layout: card_pb2.KVLayout,
        contents: np.ndarray,
        slice_bytes: int,
        wrong_keys: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self._nic = nic
        self._pool = Memory(nic, contents.size, PEERS_READ, slice_bytes)
        self._pool.bytes[:] = contents
        self._table = Memory(nic, _NUM_SLOTS * SLOT_BYTES, PEERS_READ)
        self._slots = self._table.words().reshape(_NUM_SLOTS, -1)
        self._slots[0, :3] = TABLE_MAGIC, _EPOCH, _NUM_SLOTS
        self._words = Memory(nic, _NUM_SLOTS * WORDS_BYTES, PEERS_WRITE)
        self._output = self._words.words().reshape(_NUM_SLOTS, -1)
        self._lanes: list[Connection] = []
        self._num_offers = 0
        self.num_connects = 0
        self._server = grpc.server(ThreadPoolExecutor(1))
        calls = {
            "GetCard": _call(self._get_card, agent_pb2.GetCardRequest),
            "Connect": _call(self._connect, agent_pb2.ConnectRequest),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("kvlink.v1.WorkerAgent", calls),)
        )
        self.agent = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._card = self._make_card(layout, wrong_keys)
        self._server.start()

    def offer(self, block_ids: Sequence[int], block_tokens: int, ready: int | None = None) -> Ticket:
        """All tokens of these blocks, for one reader, until `end`. `ready`: blocks already written, or all."""
        self._num_offers += 1
        slot, nonce, settle_nonce = self._num_offers, secrets.randbits(63) + 256, secrets.randbits(63) + 256
        self._output[slot] = 0
        ready = len(block_ids) if ready is None else ready
        self._slots[slot, 1] = ready
        self._slots[slot, 0] = nonce
        num_tokens = len(block_ids) * block_tokens
        seats = ((slot, nonce, settle_nonce),)
        return Ticket(
            f"request-{slot}", self.worker_id, _EPOCH, self.agent, num_tokens, ready, seats, tuple(block_ids)
        )

    def is_settled(self, ticket: Ticket) -> bool:
        """The reader has written what the ticket says."""
        slot, _, settle_nonce = ticket.seats[0]
        return int(self._output[slot, 0]) == settle_nonce

    def is_announced(self, ticket: Ticket) -> bool:
        """The reader has said who it is."""
        slot, nonce, _ = ticket.seats[0]
        return int(self._output[slot, 1]) == announcement(_CONNECTION_ID, nonce)

    def is_withdrawn(self, ticket: Ticket) -> bool:
        """The reader has said that it reads no more."""
        slot, nonce, _ = ticket.seats[0]
        return int(self._output[slot, 1]) == announcement(_CONNECTION_ID | WITHDRAWN, nonce)

    def end(self, ticket: Ticket) -> None:
        """Ends a lease: later reads do not count."""
        self._slots[ticket.seats[0][0], 0] = ABORTED_TOMBSTONE

    def cut(self) -> None:
        """Fences every reader."""
        while self._lanes:
            lane = self._lanes.pop()
            lane.cut()
            lane.close()

    def close(self) -> None:
        self._server.stop(None).wait()
        for lane in self._lanes:
            lane.close()

    # The service, on gRPC's thread.

    def _get_card(self, _: agent_pb2.GetCardRequest, __: grpc.ServicerContext) -> card_pb2.SealedCard:
        return self._card

    def _connect(self, request: agent_pb2.ConnectRequest, _: grpc.ServicerContext) -> agent_pb2.ConnectReply:
        assert (request.worker_id, request.epoch, request.transport) == (self.worker_id, _EPOCH, "verbs")
        self.num_connects += 1
        replies = []
        for blob in request.hellos:
            port, reader = unpack_hello(blob)
            assert port == 0
            lane = Connection(self._nic)
            lane.connect(reader)
            self._lanes.append(lane)
            replies.append(pack_reply(lane.address()))
        return agent_pb2.ConnectReply(connection_id=_CONNECTION_ID, replies=replies)

    def _make_card(self, layout: card_pb2.KVLayout, wrong_keys: bool) -> card_pb2.SealedCard:
        pool = _key(self._pool, 0)
        if wrong_keys:
            pool = pool._replace(rkeys=tuple(tuple(rkey ^ 0xFF for rkey in port) for port in pool.rkeys))
        way = card_pb2.TransportCard(
            name="verbs",
            address=pack_address([self._nic.port()]),
            pool_keys=[pool.pack()],
            lease_keys=[_key(self._table, 1).pack(), _key(self._words, 2).pack()],
        )
        return pack_card(self.worker_id, _EPOCH, self.agent, layout, way, pool.num_bytes)


def _call(
    answer: Callable[[Any, grpc.ServicerContext], Any], request: Any
) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=request.FromString,
        response_serializer=lambda reply: reply.SerializeToString(),
    )


def _key(memory: Memory, writable: int) -> Key:
    """Addresses on the wire are those of this process."""
    return Key(writable, memory.address, memory.bytes.size, memory.slice_bytes, (memory.rkeys,))
