# SPDX-License-Identifier: Apache-2.0
"""A claim is a record that one coordinator creates by compare-and-set: a ticket is given once over all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from kvlink.control.codec import StoredRecords
from kvlink.control.denials import LogQuota
from kvlink.control.limits import Limits
from kvlink.control.refusal import Refused, named
from kvlink.control.values import Claim, Claimed
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.etcd.api import Etcd, after, delete, put, unchanged
from kvlink.coordinator.store.etcd.errors import as_refusal
from kvlink.coordinator.store.etcd.group_commit import Commits
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.membership import MAX_TRIES
from kvlink.coordinator.store.etcd.mirror import Mirror
from kvlink.coordinator.store.etcd.requests import Request, Serving, serve
from kvlink.coordinator.store.etcd.sync import Sync
from kvlink.coordinator.store.etcd.waiting_claims import Waiter, Waiting
from kvlink.errors import KVLinkError
from kvlink.v1 import etcd_pb2 as pb

_log = logging.getLogger("kvlink.control")

_LOOK_AGAIN_S = 0.01
_NEVER_S = 1e9


class Claiming:
    """Lives on one event loop. One claim of a request is under way at a time."""

    def __init__(
        self, etcd: Etcd, layout: Keys, mirror: Mirror, sync: Sync, commits: Commits, limits: Limits
    ) -> None:
        self._etcd = etcd
        self._layout = layout
        self._mirror = mirror
        self._sync = sync
        self._commits = commits
        self._waiting = Waiting(limits)
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._failures = LogQuota()
        self.num_claimed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def close(self) -> None:
        """Refuses who waits. Idempotent."""
        self.refuse_all(refusals.closing())
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def claim(self, claim: Claim, answer: asyncio.Future[list[bytes]], now: float) -> None:
        """Answers now or later. Raises Refused (TOO_MANY)."""
        waiter = Waiter(claim, answer)
        now_or_never = claim.timeout_s == 0
        self._waiting.add(waiter, now + (_NEVER_S if now_or_never else claim.timeout_s))
        answer.add_done_callback(lambda _: self._waiting.remove(waiter))
        if now_or_never:
            asking = asyncio.create_task(self._ask(waiter))
            answer.add_done_callback(lambda _: asking.cancel())
        else:
            self.pump(claim.request_id)

    async def give_back(self, claim: Claim) -> None:
        """Takes a reader that did not take its tickets off the record; whoever waits is served by the news of it."""
        key = self._layout.claim(claim.request_id)
        reader = claim.reader, claim.claim_id
        try:
            for _ in range(MAX_TRIES):
                request = self._mirror.requests.get(claim.request_id)
                known = request.claimed if request is not None else None
                if request is None or known is None or reader not in known.readers:
                    return
                readers = tuple(each for each in known.readers if each != reader)
                record = known._replace(readers=readers, complete=False)
                write = put(key, StoredRecords.CLAIMED.encode(record)) if readers else delete(key)
                txn = pb.TxnRequest(compare=[unchanged(key, request.claimed_revision)], success=[write])
                if (await self._commits.submit(txn, key)).succeeded:
                    return
                await self._look(claim.request_id)
        except KVLinkError as error:
            if (unsaid := self._failures.take()) is not None:
                _log.warning(
                    "a ticket that its reader gave up stays claimed request=%s unsaid=%d error=%s",
                    claim.request_id,
                    unsaid,
                    error,
                )

    def next_deadline(self) -> float:
        """`give_up` has nothing to do before."""
        return self._waiting.next_deadline()

    def give_up(self, now: float) -> None:
        """Refuses who has waited long enough."""
        for waiter in self._waiting.due(now):
            self._refuse(waiter)

    def refuse_all(self, why: Refused) -> None:
        """Sends who waits elsewhere."""
        for waiter in self._waiting.all():
            if not waiter.answer.done():
                waiter.answer.set_exception(Refused(why.reason, why.sentence))

    def pump(self, request_id: str) -> None:
        """Serves who waits for a request, one after the other."""
        if request_id in self._under_way:
            return
        request = self._mirror.requests.get(request_id)
        for waiter in self._waiting.of(request_id):
            serving = serve(request, waiter.claim) if request is not None else None
            if waiter.answer.done():
                continue
            if request is None or serving is None:
                self._refuse_if_over(request, waiter)
            elif serving.record is None:
                waiter.answer.set_result([ticket.offer.ticket for ticket in serving.tickets])
            else:
                self._start(request_id, self._give(waiter, serving, serving.record))
                return

    def _start(self, request_id: str, job: Coroutine[None, None, None]) -> None:
        async def run() -> None:
            try:
                await job
            finally:
                del self._under_way[request_id]
            self.pump(request_id)

        self._under_way[request_id] = asyncio.create_task(run())

    async def _give(self, waiter: Waiter, serving: Serving, record: Claimed) -> None:
        """Writes the record, then answers; when another coordinator was first, catches up with it."""
        name = waiter.claim.request_id
        key = self._layout.claim(name)
        compare = [
            unchanged(key, serving.before),
            *(unchanged(self._layout.ticket(name, of.offer.tp_rank), of.revision) for of in serving.tickets),
        ]
        txn = pb.TxnRequest(compare=compare, success=[put(key, StoredRecords.CLAIMED.encode(record))])
        try:
            done = await self._commits.submit(txn, *(of.key for of in compare))
            if done.succeeded:
                self.num_claimed += 1
                if not waiter.answer.done():
                    waiter.answer.set_result([ticket.offer.ticket for ticket in serving.tickets])
            else:
                waiter.tries += 1
                if waiter.tries == MAX_TRIES:
                    raise refusals.store_changes(f"request {named(name)}", MAX_TRIES)
                await self._look(name)
        except Exception as error:
            if not waiter.answer.done():
                waiter.answer.set_exception(as_refusal(error))

    async def _ask(self, waiter: Waiter) -> None:
        """For who does not wait: what etcd has now is all there is."""
        name = waiter.claim.request_id
        try:
            await self._look(name)
        except Exception as error:
            if not waiter.answer.done():
                waiter.answer.set_exception(as_refusal(error))
            return
        self.pump(name)
        while name in self._under_way:
            await asyncio.wait([self._under_way[name]])
        self._refuse(waiter)

    async def _look(self, request_id: str) -> None:
        """Returns when the mirror has of a request what etcd has."""
        prefix = self._layout.tickets(request_id)
        tickets = await self._etcd.read(prefix, after(prefix))
        claims = await self._etcd.read(self._layout.claim(request_id))
        await self._sync.reached(max((kv.mod_revision for kv in (*tickets.kvs, *claims.kvs)), default=0))
        await asyncio.sleep(_LOOK_AGAIN_S)  # what was deleted has no revision to wait for

    def _refuse_if_over(self, request: Request | None, waiter: Waiter) -> None:
        why = self._mirror.why_ended(waiter.claim.request_id)
        if why is not None and (request is None or not request.free()):
            waiter.answer.set_exception(why)

    def _refuse(self, waiter: Waiter) -> None:
        if waiter.answer.done():
            return
        request = self._mirror.requests.get(waiter.claim.request_id)
        free = request.free() if request is not None else {}
        tp_size = next((ticket.offer.tp_size for ticket in free.values()), 0)
        waiter.answer.set_exception(refusals.in_vain(waiter.claim, len(free), tp_size))
