# SPDX-License-Identifier: Apache-2.0
"""Implements the server side of a handoff stream: it takes batches, and sends results as operations finish."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from kvlink import tracing
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.denials import LogQuota
from kvlink.control.refusal import Reason, refusal_of
from kvlink.control.rpc.call_spans import follow
from kvlink.control.rpc.eager_future import EagerFuture
from kvlink.control.values import (
    Claim,
    HandoffBatch,
    HandoffKind,
    HandoffResults,
    Offer,
    RefusedHandoff,
    SettleOrder,
)
from kvlink.coordinator.store import Store
from kvlink.runtime.supervised import start_awaited

_log = logging.getLogger("kvlink.control")
_Answer = EagerFuture[list[bytes]]

_MAX_ANSWERED = 4_096
"""Bounds the remembered claims whose tickets may still be in flight when their reader withdraws."""

_AT_ONCE = 128
"""So many operations of a batch are executed before others have their turn: about a millisecond."""

_Operation = Offer | SettleOrder | Claim


class HandoffServer:
    """Serves one stream. Results are batched while a message is being sent."""

    def __init__(
        self, store: Store, send: Callable[[HandoffResults], Awaitable[None]], failures: LogQuota
    ) -> None:
        """`failures` limits the log lines about failed operations."""
        self._store = store
        self._failures = failures
        self._send = send
        self._num_offers = self._num_settles = self._num_claims = 0
        self._acknowledged = (0, 0)
        self._claimed: list[tuple[int, list[bytes]]] = []
        self._refused: list[RefusedHandoff] = []
        self._waiting: dict[_Answer, tuple[int, Claim]] = {}
        self._answers: dict[int, _Answer] = {}
        """Maps claim numbers to the futures in `_waiting`."""
        self._answered: OrderedDict[int, Claim] = OrderedDict()
        """Maps numbers to the last claims that were answered with tickets."""
        self._late_answers = asyncio.Event()

    async def serve(self, batches: AsyncIterator[HandoffBatch]) -> None:
        """Returns when the peer has sent its last batch and every claim is answered. Cancel it to stop earlier.

        Raises what a batch or an answer raises: the stream then ends, and the peer repeats its claims on another.
        """
        tasks = [start_awaited(self._take(batches)), start_awaited(self._send_late_answers())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            while self._waiting:
                self._waiting.popitem()[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, batches: AsyncIterator[HandoffBatch]) -> None:
        async for batch in batches:
            for part in _parts(batch):
                await self._execute(part)
                if part is not batch:
                    await asyncio.sleep(0)
            await self._send_results()
        if self._waiting:
            await asyncio.wait(self._waiting)
        await self._send_results()

    async def _execute(self, batch: HandoffBatch) -> None:
        offers = [self._store.offer(offer) for offer in batch.offers]
        if tracing.spans is not None:
            follow(CoordinatorCalls.OFFER, batch.offers, offers)
        await self._note_refused(HandoffKind.OFFER, self._num_offers, batch.offers, offers)
        self._num_offers += len(offers)
        settles = [self._store.settle(order) for order in batch.settles]
        await self._note_refused(HandoffKind.SETTLE, self._num_settles, batch.settles, settles)
        self._num_settles += len(settles)
        withdrawn = set(batch.withdrawn)
        for number, asked in enumerate(batch.claims, self._num_claims):
            if number not in withdrawn:
                self._claim(asked, number)
        self._num_claims += len(batch.claims)
        for number in withdrawn:
            claim = self._answered.pop(number, None)
            if answer := self._answers.pop(number, None):
                claim = self._waiting.pop(answer)[1]
                answer.cancel()  # the store may have given out its tickets already
            if claim is not None:
                self._store.release(claim)

    async def _note_refused(
        self,
        kind: HandoffKind,
        number: int,
        operations: Sequence[_Operation],
        done: Sequence[asyncio.Future[None]],
    ) -> None:
        """Waits for operations, the first of which has `number`, and notes those that were refused."""
        for each in done:
            if not each.done():
                await asyncio.wait([each])
        for offset, each in enumerate(done):
            if error := each.exception():
                self._refuse(kind, number + offset, operations[offset], error)

    def _claim(self, claim: Claim, number: int) -> None:
        answer = self._store.claim(claim)
        if tracing.spans is not None:
            follow(CoordinatorCalls.CLAIM, [claim], [answer])
        if answer.done():
            self._note_answer(number, claim, answer)
        else:
            self._waiting[answer] = number, claim
            self._answers[number] = answer
            assert len(self._answers) == len(self._waiting)
            answer.on_answer = self._note_late_answer

    def _note_late_answer(self, answer: _Answer) -> None:
        number, claim = self._waiting.pop(answer)
        del self._answers[number]
        self._note_answer(number, claim, answer)
        self._late_answers.set()

    def _note_answer(self, number: int, claim: Claim, answer: _Answer) -> None:
        if error := answer.exception():
            self._refuse(HandoffKind.CLAIM, number, claim, error)
        else:
            self._claimed.append((number, answer.result()))
            self._answered[number] = claim
            if len(self._answered) > _MAX_ANSWERED:
                self._answered.popitem(last=False)

    def _refuse(self, kind: HandoffKind, number: int, operation: _Operation, error: BaseException) -> None:
        refused = refusal_of(error)
        if refused.reason is Reason.FAILED and (more := self._failures.take()) is not None:
            request_id = getattr(operation, "request_id", "")
            _log.error(
                "%s failed request=%s suppressed=%d", kind.name.lower(), request_id, more, exc_info=error
            )
        self._refused.append(RefusedHandoff(kind, number, refused.reason.name, refused.sentence))

    async def _send_late_answers(self) -> None:
        while True:
            await self._late_answers.wait()
            self._late_answers.clear()
            await self._send_results()

    async def _send_results(self) -> None:
        done = (self._num_offers, self._num_settles)
        if done == self._acknowledged and not self._claimed and not self._refused:
            return
        results = HandoffResults(*done, self._claimed, self._refused)
        self._acknowledged, self._claimed, self._refused = done, [], []
        await self._send(results)


def _parts(batch: HandoffBatch) -> Iterator[HandoffBatch]:
    """Divides a batch. Offers come before settles and claims, and withdrawals at the end, as in one go."""
    if len(batch.offers) + len(batch.settles) + len(batch.claims) + len(batch.withdrawn) <= _AT_ONCE:
        yield batch
        return
    for at in range(0, len(batch.offers), _AT_ONCE):
        yield HandoffBatch(batch.offers[at : at + _AT_ONCE], [], [], ())
    for at in range(0, len(batch.settles), _AT_ONCE):
        yield HandoffBatch([], batch.settles[at : at + _AT_ONCE], [], ())
    for at in range(0, len(batch.claims), _AT_ONCE):
        yield HandoffBatch([], [], batch.claims[at : at + _AT_ONCE], batch.withdrawn)
    yield HandoffBatch([], [], [], batch.withdrawn)
