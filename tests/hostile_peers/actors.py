# SPDX-License-Identifier: Apache-2.0
"""The victim and the liar of this lane: two processes with a worker each. The reader is the process of the test.

A process carries out one order a line, `module:function` with arguments, and answers with one line.
"""

from __future__ import annotations

import base64
import ctypes
import os
import pickle
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import kvlink
from kvlink.control import AgentClients
from kvlink.control.security import Security
from kvlink.control.values import SettleOrder
from kvlink.layout import Geometry, KVLayout, Order, dense
from kvlink.ticket import LeaseSeat, Ticket
from kvlink.types import TransportCard, WorkerCard

NUM_BLOCKS = 64
SECRET = b"not in any pool and never offered"
WORDS = 0x4141414142424242
"""The word that the liar would like to see written."""

Regions = tuple[tuple[bytes, ...], tuple[bytes, ...]]


def layout(num_blocks: int = NUM_BLOCKS) -> KVLayout:
    """Returns a layout with blocks of 1,024 bytes."""
    return dense(
        Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=num_blocks, planes_per_layer=1),
        Order.NHD,
    )


class Known(NamedTuple):
    """Describes a victim as a liar knows it: by a card, which any worker of the tenant gets, tickets, and addresses."""

    card: WorkerCard
    ticket: Ticket
    soft: Ticket
    secret: int
    target: int


class _State:
    worker: kvlink.Worker
    pool: kvlink.BlockPool
    secret = ctypes.create_string_buffer(SECRET, 1024)
    target = (ctypes.c_uint64 * 4)(1, 2, 3, 4)


def _open(name: str, transport: str) -> None:
    _State.pool = kvlink.BlockPool.allocate(layout(), huge_pages=False)
    _State.worker = kvlink.Worker(_State.pool, name, transports=transport)


def victim(transport: str) -> Known:
    """Starts a victim whose pool is full of "v"."""
    _open("victim", transport)
    _State.pool.numpy()[:] = ord("v")
    offers = _State.worker.offer("hard", [1], ttl_s=600), _State.worker.offer_soft("soft", [2])
    addresses = ctypes.addressof(_State.secret), ctypes.addressof(_State.target)
    return Known(_State.worker.card, *offers, *addresses)


def victim_memory() -> tuple[list[int], int]:
    """Returns what the liar wants written, and how many of the victim's leases live."""
    return list(_State.target), _State.worker._engine.lease_counts().active


def _made_up(transport: str, own: TransportCard, known: Known) -> Regions:
    """Returns keys of regions that the victim does not export, as near to its own as they can be."""
    theirs = next(card for card in known.card.transports if card.name == transport)
    pool, words = theirs.pool_keys[0], theirs.lease_keys[1]
    if transport == "cma":
        form = "<IQQIQQQ"
        magic, _, size, access, *_ = struct.unpack(form, pool)
        slots = struct.unpack(form, words)
        pool = struct.pack(form, magic, known.secret, size, access, 2**64 - 1, 0, 0)
        at = known.target - 16 * known.ticket.seats[0].slot
        words = struct.pack(form, magic, at, slots[2], slots[3], 2**64 - 1, 0, 0)
    elif transport == "shm":
        magic, number, offset, size, access = struct.unpack("<IQQQI", pool)
        pool = struct.pack("<IQQQI", magic, number, offset, 2 * size, access)
    else:
        number, size, access = struct.unpack("<QQI", pool)
        pool = struct.pack("<QQI", number, 2 * size, access)
    return (pool,), (theirs.lease_keys[0], words)


def lie(transport: str, known: Known, made_up: bool, passed_on: bool, name: str, port: int = 0) -> Ticket:
    """Starts a liar and returns a ticket for its card, which names the victim's address.

    `made_up`: with regions that the victim does not export. `passed_on`: a reader's hello goes to the victim, which
    answers it. `name`: the worker that the liar says it is. `port`: the address of tcp is this one instead.
    """
    if not hasattr(_State, "worker"):
        _open("liar", transport)
    own = next(card for card in _State.worker.card.transports if card.name == transport)
    theirs = next(card for card in known.card.transports if card.name == transport)
    address = theirs.address
    if port:
        size = struct.unpack_from("<I", address)[0]
        at = 4 + size
        address = address[:at] + struct.pack("<I", port) + address[at + 4 :]
    pool_keys, lease_keys = (
        _made_up(transport, own, known) if made_up else (theirs.pool_keys, theirs.lease_keys)
    )
    false = replace(own, address=address, pool_keys=pool_keys, lease_keys=lease_keys)
    blocks = 2 * NUM_BLOCKS if made_up and transport != "cma" else NUM_BLOCKS
    card = replace(
        _State.worker.card, worker_id=name, epoch=known.card.epoch, transports=(false,),
        layouts=(layout(blocks),), region_bytes=(1024 * blocks,),
    )  # fmt: skip
    membership = _State.worker._membership
    if passed_on:
        membership._agent._accept = _passing_on(known.card)
    _State.worker._control.loop.call_soon_threadsafe(membership._agent.publish, card)
    block = 0 if blocks == NUM_BLOCKS and made_up else NUM_BLOCKS + 1 if made_up else 1
    seat = LeaseSeat(known.ticket.seats[0].slot, known.ticket.seats[0].nonce, WORDS)
    ticket = Ticket("lie", name, card.epoch, card.agent, (seat,), array("I", [block]), 16, 1)
    return _State.worker.offers.sign(ticket)  # it is one of the tenant's workers


def _passing_on(card: WorkerCard) -> Callable[..., Any]:
    """Returns an accept that asks the agent of that card, as a reader of it would."""

    def accept(transport: str, hellos: Sequence[bytes], takes_keys: bool, caller: int) -> Any:
        async def ask() -> Any:
            clients = AgentClients(Security.of(_State.worker.config))
            try:
                reply = await clients[card.agent].connect(card.worker_id, card.epoch, transport, list(hellos))
            finally:
                await clients.close()
            return reply.connection_id, list(reply.replies), [], []

        return _State.worker._control.run(ask(), 20)

    return accept


def end_leases(transport: str, known: Known) -> list[bool]:
    """Reads under a soft ticket, and then tries to end its lease and another one, whose settle nonce it lacks."""
    _open("liar", transport)
    _State.worker.pull(known.soft, [5], timeout_s=20).wait()
    peer = _State.worker._peers.get("victim", known.card.epoch)
    assert peer is not None
    guesses = [
        1,
        known.soft.seats[0].nonce,
        known.ticket.seats[0].nonce,
        known.ticket.seats[0].nonce ^ 1,
        WORDS,
    ]
    slots = [known.soft.seats[0].slot, known.ticket.seats[0].slot]
    for slot in slots:
        for guess in guesses:
            peer.connection.settle(slot, guess)

    async def ask() -> list[bool]:
        clients = AgentClients(Security.of(_State.worker.config))
        try:
            agent = clients[known.card.agent]
            return [
                await agent.settle(SettleOrder("victim", known.card.epoch, slot, guess))
                for slot in slots
                for guess in guesses
            ]
        finally:
            await clients.close()

    return _State.worker._control.run(ask(), 20)


class Actor:
    """A process that carries out functions of this module."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hostile_peers.actors"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )  # fmt: skip

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what it returns there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = base64.b64encode(pickle.dumps((function.__name__, arguments))).decode()
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the actor ended with {self._process.wait()}"
        return pickle.loads(base64.b64decode(line))

    def close(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    from hostile_peers import actors  # the classes that travel belong to this name

    for line in sys.stdin:
        name, arguments = pickle.loads(base64.b64decode(line))
        answer = getattr(actors, name)(*arguments)
        print(base64.b64encode(pickle.dumps(answer)).decode(), flush=True)


if __name__ == "__main__":
    _serve()
