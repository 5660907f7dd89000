# SPDX-License-Identifier: Apache-2.0
"""Implements the client side of a handoff stream. Operations are batched while the previous batch is sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvlink.control.codec import BatchWriter
from kvlink.control.refusal import error_of
from kvlink.control.rpc.eager_future import EagerFuture
from kvlink.control.rpc.stream import Stream
from kvlink.control.values import Claim, HandoffBatch, HandoffKind, HandoffResults, Offer, SettleOrder
from kvlink.errors import CoordinatorUnavailable, KVLinkError
from kvlink.runtime.supervised import start_job

T = TypeVar("T")


class HandoffStream:
    """Sends many operations per message. When the stream breaks, unanswered operations fail and a new one is needed.

    The operations return futures. Operations of a kind are executed in order. They raise ConfigError at once for a
    value that cannot be sent.
    """

    def __init__(self, stream: Stream[HandoffBatch, HandoffResults]) -> None:
        self._stream = stream
        self._batches = deque([BatchWriter()])
        self._work = asyncio.Event()
        self._sent = dict.fromkeys(HandoffKind, 0)
        self._done = dict.fromkeys(HandoffKind, 0)
        self._pending: dict[HandoffKind, dict[int, asyncio.Future[Any]]] = {kind: {} for kind in HandoffKind}
        self._broken: KVLinkError | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks = [
            start_job("handoff sender", self._until_broken(self._send)),
            start_job("handoff receiver", self._until_broken(self._receive)),
        ]

    def __repr__(self) -> str:
        num_pending = sum(map(len, self._pending.values()))
        return f"HandoffStream({self._broken or 'open'}, {num_pending} operations pending)"

    async def __aenter__(self) -> HandoffStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def offer(self, offer: Offer) -> asyncio.Future[None]:
        """Publishes a ticket."""
        self._batch(offer).add_offer(offer)
        return self._submitted(HandoffKind.OFFER)

    def settle(self, order: SettleOrder) -> asyncio.Future[None]:
        """Asks an owner to end a seat."""
        self._batch(order).add_settle(order)
        return self._submitted(HandoffKind.SETTLE)

    def claim(self, claim: Claim) -> asyncio.Future[list[bytes]]:
        """Asks for the tickets of all ranks, which arrive once all have offered. Claims are answered in any order.

        A claim with a `claim_id` may be repeated on another stream when this one breaks. Cancel the future to stop
        waiting; others can then claim the tickets, even if they were already being sent.
        """
        self._batch(claim).add_claim(claim)
        number = self._sent[HandoffKind.CLAIM]
        future: EagerFuture[list[bytes]] = EagerFuture(loop=self._loop)
        future.on_cancel = lambda _: self._withdraw(number)
        self._submitted(HandoffKind.CLAIM, future)
        return future

    async def close(self) -> None:
        """Ends the stream and fails unanswered operations. Closing again has no effect."""
        self._break(CoordinatorUnavailable("this handoff stream was closed; open another"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stream.cancel()

    def _withdraw(self, number: int) -> None:
        if self._pending[HandoffKind.CLAIM].pop(number, None) is not None and self._broken is None:
            self._batch(None).add_withdrawn(number)
            self._work.set()

    def _batch(self, operation: Offer | SettleOrder | Claim | None) -> BatchWriter:
        if self._broken is not None:
            raise self._broken
        if not self._batches[-1].takes(operation):
            self._batches.append(BatchWriter())
        return self._batches[-1]

    def _submitted(self, kind: HandoffKind, future: asyncio.Future[Any] | None = None) -> asyncio.Future[Any]:
        future = future or self._loop.create_future()
        self._pending[kind][self._sent[kind]] = future
        self._sent[kind] += 1
        self._work.set()
        return future

    async def _until_broken(self, work: Callable[[], Awaitable[None]]) -> None:
        """Fails the unanswered operations, whatever ends `work`, because nobody would answer them."""
        try:
            await work()
        except KVLinkError as error:
            self._break(error)
        except Exception:
            self._break(CoordinatorUnavailable("this handoff stream failed; open another"))
            raise

    async def _send(self) -> None:
        while True:
            await self._work.wait()
            batch = self._batches.popleft()
            if not self._batches:
                self._batches.append(BatchWriter())
                self._work.clear()
            if batch.num_ops:
                await self._stream.send_bytes(batch.to_bytes())

    async def _receive(self) -> None:
        while (results := await self._stream.receive()) is not None:
            self._resolve(results)
        raise CoordinatorUnavailable("the coordinator ended the handoff stream; open another")

    def _resolve(self, results: HandoffResults) -> None:
        for kind, number, reason, sentence in results.refused:
            _fail(self._pending[kind].pop(number, None), error_of(reason, sentence))
        for number, tickets in results.claimed:
            _succeed(self._pending[HandoffKind.CLAIM].pop(number, None), tickets)
        self._acknowledge(HandoffKind.OFFER, results.offers_done)
        self._acknowledge(HandoffKind.SETTLE, results.settles_done)

    def _acknowledge(self, kind: HandoffKind, done: int) -> None:
        done = min(done, self._sent[kind])
        for number in range(self._done[kind], done):
            _succeed(self._pending[kind].pop(number, None), None)
        self._done[kind] = max(done, self._done[kind])

    def _break(self, error: KVLinkError) -> None:
        self._broken = self._broken or error
        for pending in self._pending.values():
            for future in pending.values():
                _fail(future, error)
                if not future.cancelled():
                    future.exception()  # marks it as retrieved, or asyncio logs it if no one waits
            pending.clear()


def _succeed(future: asyncio.Future[T] | None, result: T) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any] | None, error: KVLinkError) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
