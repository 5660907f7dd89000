# SPDX-License-Identifier: Apache-2.0
"""Drives a process in C (node.c), and carries messages between it and others, in C or in Python."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from capi.built import built

from kvlink import BlockPool, KVLayout, Worker, WorkerConfig
from kvlink.control import AgentClient
from kvlink.control.agent import WorkerAgent
from kvlink.control.codec import CARD, AgentCalls
from kvlink.control.values import ConnectReply, ConnectRequest
from kvlink.errors import KVLinkError, TransportUnavailable
from kvlink.layout import Plane
from kvlink.runtime.background import ControlThread
from kvlink.types import WorkerCard

BLOCKS, PLANES, PLANE_BYTES = 16, 8, 16 * 2 * 64
BLOCK_BYTES = PLANES * PLANE_BYTES
OK, CONFIG, MISMATCH, UNAVAILABLE, UNREACHABLE, DENIED, TIMEOUT, CANCELLED, STALE = range(9)
BUFFER, HANDLE, FORKED, MEMORY, INTERNAL, PENDING, ENDED = range(32, 39)
PULL_ENDED, OFFER_ENDED, PEER_CONNECTED = 1, 2, 3
FOR_EVER = 2**64 - 1
NOTIFY, NO_SETTLE = 1, 2
KEY = "k" * 40

REQUEST, REPLY = AgentCalls.CONNECT.request, AgentCalls.CONNECT.reply


def layout(tp_rank: int = 0, tp_size: int = 1) -> KVLayout:
    """The layout that node.c has."""
    return KVLayout(
        model="test", dtype="float16", block_tokens=16, total_heads=2 * tp_size, first_head=2 * tp_rank, num_heads=2,
        row_bytes=64, block_stride=PLANE_BYTES, token_stride=128, head_stride=64, num_blocks=BLOCKS,
        planes=tuple(Plane(0, plane // 2, plane * BLOCKS * PLANE_BYTES) for plane in range(PLANES)),
        tp_rank=tp_rank, tp_size=tp_size,
    )  # fmt: skip


def contents(seed: int) -> np.ndarray:
    """The bytes that `fill` writes, by plane and block."""
    at = np.arange(BLOCKS * BLOCK_BYTES, dtype=np.uint64)
    return (seed * 31 + at * 7 + at // 251).astype(np.uint8).reshape(PLANES, BLOCKS, PLANE_BYTES)


class CodeError(Exception):
    """A function of the library returned another code than KVL_OK."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Event(NamedTuple):
    """One of kvl_events."""

    kind: int
    handle: int
    user: int
    code: int


class Node:
    """A process in C with one worker. Methods raise CodeError."""

    def __init__(
        self, name: str, transports: str = "-", *, memory: str = "alloc", agent: str = "-", keys: str = KEY,
        tp: tuple[int, int] = (0, 1), channel_port: int | str = "-",
    ) -> None:  # fmt: skip
        self.name = name
        self.process = subprocess.Popen(
            [built("kvlink_node")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.do("open", name, transports, agent, keys, BLOCKS, memory, *tp, channel_port)
        except CodeError:
            self.close()
            raise

    def do(self, *words: object) -> str:
        """Runs a command of node.c and returns its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        texts = [str(word) for word in words]
        assert all(texts), f"node.c skips empty words: {texts}"
        self.process.stdin.write(" ".join(texts) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended by {self.process.wait()}"
        code, _, rest = line.rstrip("\n").partition(" ")
        if code != "0":
            raise CodeError(int(code), rest)
        return rest

    def bytes_of(self, *words: object) -> bytes:
        """Runs a command that answers bytes."""
        return bytes.fromhex(self.do(*words))

    def refusal(self, *words: object) -> int:
        """Runs a command that must not succeed, and returns its code."""
        try:
            self.do(*words)
        except CodeError as error:
            return error.code
        raise AssertionError(f"{words} succeeded")

    def card(self) -> bytes:
        """The sealed card."""
        return self.bytes_of("card")

    def offer(
        self, blocks: Sequence[int], *, readers: int = 1, ready: int | str = "-", unit: int = 0, ttl_us: int = 0,
        num_tokens: int | None = None,
    ) -> tuple[int, bytes]:  # fmt: skip
        """Returns an offer and its ticket."""
        tokens = 16 * len(blocks) if num_tokens is None else num_tokens
        offer = int(self.do("offer", "request", _list(blocks), tokens, readers, ready, unit, ttl_us))
        return offer, self.bytes_of("ticket", offer)

    def pull(
        self, peer: int, ticket: bytes, into: Sequence[int], *, timeout_us: int = 0, flags: int = 0, how: str = "pull",
        seat: int = 0, num_readers: int = 0,
    ) -> str:  # fmt: skip
        """Starts a pull. Returns its handle, unless `how` is now."""
        return self.do(how, peer, ticket.hex(), _list(into), timeout_us, flags, seat, num_readers)

    def blocks(self, which: Sequence[int]) -> np.ndarray:
        """Some of the blocks, by plane."""
        pool = np.frombuffer(self.bytes_of("read", 0, BLOCKS * BLOCK_BYTES), np.uint8)
        return pool.reshape(PLANES, BLOCKS, PLANE_BYTES)[:, list(which)]

    def events(self) -> list[Event]:
        """Returns the rows of kvl_events."""
        rows = self.do("events").split(",")
        return [Event(*map(int, row.split(":"))) for row in rows if row]

    def close(self) -> None:
        """Lets the process end by itself, and checks that it does: a sanitizer would say what was wrong."""
        if self.process.poll() is None:
            with self.process:
                pass
            assert self.process.returncode == 0

    def kill(self) -> None:
        """Ends the process at once."""
        with self.process:
            self.process.kill()


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers)) or "-"


class COwner:
    """A node that offers, and an agent in Python that carries the messages of readers in Python to it."""

    def __init__(
        self, transports: str, memory: str, *, with_agent: bool, channel_port: int | str = "-"
    ) -> None:
        self._control = ControlThread.shared()
        self._agent = WorkerAgent(self._accept, lambda slot, nonce: False, lambda slot, nonce: False)
        address = self._control.run(self._start(), 10) if with_agent else "-"
        self.node = Node("owner", transports, memory=memory, agent=address, channel_port=channel_port)
        self.card = CARD.decode(self.node.card())
        if with_agent:
            self._control.run(self._publish(), 10)
        self.node.do("fill", 5, BLOCKS)

    async def _start(self) -> str:
        return await self._agent.start()

    async def _publish(self) -> None:
        self._agent.publish(self.card)

    def _accept(self, transport: str, hellos: list[bytes], takes_keys: bool, caller: int) -> ConnectReply:
        request = ConnectRequest(self.card.worker_id, self.card.epoch, transport, hellos, takes_keys)
        try:
            return REPLY.decode(self.answer(REQUEST.encode(request), caller))
        except CodeError as error:
            raise TransportUnavailable(str(error), "") from None

    def answer(self, message: bytes, caller: int = 0) -> bytes:
        """Carries a reader's message to the node."""
        return self.node.bytes_of("answer", caller, message.hex())

    def offer(self, blocks: Sequence[int], **options: object) -> bytes:
        """Returns a ticket."""
        return self.node.offer(blocks, **options)[1]  # type: ignore[arg-type]

    def num_settled(self) -> int:
        """How many offers were settled."""
        return int(self.node.do("counts").split(",")[2])

    def kill(self) -> None:
        """Ends both at once."""
        self.node.kill()
        self._control.run(self._agent.close(), 10)

    def close(self) -> None:
        """Ends both."""
        self._control.run(self._agent.close(), 10)
        self.node.close()


class PythonOwner:
    """A Worker that offers, whose agent readers in C ask by messages that this carries."""

    def __init__(self, transports: str, config: WorkerConfig) -> None:
        pool = BlockPool.allocate(layout(), huge_pages=False)
        self.worker = Worker(pool, "owner", transports=transports, config=config)
        pool.numpy()[:] = contents(5).reshape(-1)
        self.card = self.worker.card

    def answer(self, message: bytes, caller: int = 0) -> bytes:
        """Carries a reader's message to the agent of the worker, as a gRPC client in C would."""
        request = REQUEST.decode(message)

        async def ask() -> ConnectReply:
            client = AgentClient(self.card.agent)
            try:
                return await client.connect(
                    request.worker_id, request.epoch, request.transport, list(request.hellos)
                )
            finally:
                await client.close()

        return REPLY.encode(asyncio.run(ask()))

    def offer(self, blocks: Sequence[int]) -> bytes:
        """Returns a ticket."""
        return self.worker.offer(f"request-{blocks}", blocks).to_bytes()

    def num_settled(self) -> int:
        """How many offers were settled."""
        return self.worker._engine.lease_counts().settled

    def close(self) -> None:
        """Ends the worker."""
        self.worker.close()


def dial(reader: Node, card: bytes | WorkerCard, timeout_us: int = 0) -> int:
    """Connects a node to an owner by the native channel, and returns its peer."""
    peer = begin(reader, card, timeout_us)
    reader.do("connected", peer, FOR_EVER)
    return peer


def begin(reader: Node, card: bytes | WorkerCard, timeout_us: int = 0) -> int:
    """Begins to connect by the native channel, and returns the peer."""
    sealed = card if isinstance(card, bytes) else CARD.encode(card)
    peer = int(reader.do("peer", sealed.hex(), timeout_us))
    reader.do("connect", peer, 11)
    return peer


def connect(reader: Node, owner: COwner | PythonOwner, card: bytes | None = None) -> int:
    """Connects a node to an owner, and returns its peer. An owner that raises has not answered."""
    peer = int(reader.do("peer", (card or CARD.encode(owner.card)).hex(), 0))
    answer = b""
    while message := reader.bytes_of("step", peer, answer.hex() or "-"):
        try:
            answer = owner.answer(message)
        except (CodeError, KVLinkError):
            answer = b""
    return peer
