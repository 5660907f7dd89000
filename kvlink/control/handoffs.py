# SPDX-License-Identifier: Apache-2.0
"""The coordinator's end of one hand-off stream: batches in, results out, waiting claims answered later."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable

from kvlink.control.refusal import refusal_of
from kvlink.control.store import Store
from kvlink.control.values import Claim, HandoffBatch, HandoffKind, HandoffResults, RefusedHandoff

_Answer = asyncio.Future[list[bytes]]


class HandoffServer:
    """Serves one stream. Results gather while a message is being sent."""

    def __init__(self, store: Store, send: Callable[[HandoffResults], Awaitable[None]]) -> None:
        self._store = store
        self._send = send
        self._num_offers = self._num_settles = self._num_claims = 0
        self._told = (0, 0)
        self._claimed: list[tuple[int, list[bytes]]] = []
        self._refused: list[RefusedHandoff] = []
        self._waiting: set[_Answer] = set()
        self._news = asyncio.Event()

    async def serve(self, batches: AsyncIterator[HandoffBatch]) -> None:
        """Returns when the peer has sent its last batch and every claim is answered. Cancel to give up."""
        telling = asyncio.create_task(self._tell_news())
        try:
            async for batch in batches:
                await self._carry_out(batch)
                await self._tell()
            if self._waiting:
                await asyncio.wait(self._waiting)
            await self._tell()
        finally:
            telling.cancel()
            for answer in list(self._waiting):
                answer.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _carry_out(self, batch: HandoffBatch) -> None:
        offers = [self._store.offer(offer) for offer in batch.offers]
        self._num_offers = await self._note_refused(HandoffKind.OFFER, self._num_offers, offers)
        settles = [self._store.settle(order) for order in batch.settles]
        self._num_settles = await self._note_refused(HandoffKind.SETTLE, self._num_settles, settles)
        for claim in batch.claims:
            self._claim(claim, self._num_claims)
            self._num_claims += 1

    async def _note_refused(self, kind: HandoffKind, number: int, ops: list[asyncio.Future[None]]) -> int:
        """Of operations numbered from `number` on. Returns the next number."""
        for op in ops:
            if not op.done():
                await asyncio.wait([op])
        for offset, op in enumerate(ops):
            if error := op.exception():
                self._refuse(kind, number + offset, error)
        return number + len(ops)

    def _claim(self, claim: Claim, number: int) -> None:
        answer = self._store.claim(claim)
        if answer.done():
            self._note_answer(number, answer)
        else:
            self._waiting.add(answer)
            answer.add_done_callback(functools.partial(self._answered, number))

    def _answered(self, number: int, answer: _Answer) -> None:
        self._waiting.discard(answer)
        if not answer.cancelled():
            self._note_answer(number, answer)
            self._news.set()

    def _note_answer(self, number: int, answer: _Answer) -> None:
        if error := answer.exception():
            self._refuse(HandoffKind.CLAIM, number, error)
        else:
            self._claimed.append((number, answer.result()))

    def _refuse(self, kind: HandoffKind, number: int, error: BaseException) -> None:
        refused = refusal_of(error)
        self._refused.append(RefusedHandoff(kind, number, refused.reason.name, refused.sentence))

    async def _tell_news(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._tell()

    async def _tell(self) -> None:
        done = (self._num_offers, self._num_settles)
        if done == self._told and not self._claimed and not self._refused:
            return
        results = HandoffResults(*done, self._claimed, self._refused)
        self._told, self._claimed, self._refused = done, [], []
        await self._send(results)
