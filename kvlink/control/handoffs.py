# SPDX-License-Identifier: Apache-2.0
"""The coordinator's end of one hand-off stream: batches in, results out, waiting claims answered later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from kvlink.control.refusal import Refused, refusal_of
from kvlink.control.store import Store
from kvlink.control.values import Claim, HandoffBatch, HandoffKind, HandoffResults, RefusedHandoff


class HandoffServer:
    """Serves one stream. Results gather while a message is being sent."""

    def __init__(self, store: Store, send: Callable[[HandoffResults], Awaitable[None]]) -> None:
        self._store = store
        self._send = send
        self._done = dict.fromkeys(HandoffKind, 0)
        self._claimed: list[tuple[int, list[bytes]]] = []
        self._refused: list[RefusedHandoff] = []
        self._told = (0, 0)
        self._sending = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()

    async def serve(self, batches: AsyncIterator[HandoffBatch]) -> None:
        """Returns when the peer has sent its last batch and every claim is answered. Cancel to give up."""
        try:
            async for batch in batches:
                await self._carry_out(batch)
                await self._flush()
            if self._waiting:
                await asyncio.wait(self._waiting)
        finally:
            for task in self._waiting:
                task.cancel()

    async def _carry_out(self, batch: HandoffBatch) -> None:
        done = self._done
        for offer in batch.offers:
            try:
                await self._store.offer(offer)
            except Refused as refused:
                self._refuse(HandoffKind.OFFER, done[HandoffKind.OFFER], refused)
            done[HandoffKind.OFFER] += 1
        for order in batch.settles:
            try:
                await self._store.settle(order)
            except Refused as refused:
                self._refuse(HandoffKind.SETTLE, done[HandoffKind.SETTLE], refused)
            done[HandoffKind.SETTLE] += 1
        for claim in batch.claims:
            await self._claim(claim, done[HandoffKind.CLAIM])
            done[HandoffKind.CLAIM] += 1

    async def _claim(self, claim: Claim, number: int) -> None:
        try:
            tickets = await self._store.take(claim)
        except Refused as refused:
            self._refuse(HandoffKind.CLAIM, number, refused)
            return
        if tickets is not None:
            self._claimed.append((number, tickets))
            return
        task = asyncio.create_task(self._wait(claim, number))
        self._waiting.add(task)
        task.add_done_callback(self._ended)

    async def _wait(self, claim: Claim, number: int) -> None:
        try:
            tickets = await self._store.claim(claim)
            self._claimed.append((number, tickets))
        except Exception as error:
            self._refuse(HandoffKind.CLAIM, number, refusal_of(error))
        await self._flush()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        if not task.cancelled():
            task.exception()  # only sending fails, and then the whole stream has ended

    def _refuse(self, kind: HandoffKind, number: int, refused: Refused) -> None:
        self._refused.append(RefusedHandoff(kind, number, refused.reason.name, refused.sentence))

    async def _flush(self) -> None:
        async with self._sending:
            done = (self._done[HandoffKind.OFFER], self._done[HandoffKind.SETTLE])
            if done == self._told and not self._claimed and not self._refused:
                return
            results = HandoffResults(*done, self._claimed, self._refused)
            self._told, self._claimed, self._refused = done, [], []
            await self._send(results)
