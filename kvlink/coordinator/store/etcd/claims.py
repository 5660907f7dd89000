# SPDX-License-Identifier: Apache-2.0
"""Answers claims. A coordinator creates a claim's record by compare-and-set, so no other one gives out the ticket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial

from kvlink.control.codec import StoredRecords
from kvlink.control.denials import LogQuota
from kvlink.control.limits import Limits
from kvlink.control.refusal import RefusedError, named
from kvlink.control.values import Claim, Claimed
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.etcd.api import Etcd, after, as_refusal, delete, put, unchanged
from kvlink.coordinator.store.etcd.group_commit import GroupCommit
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.membership import MAX_TRIES
from kvlink.coordinator.store.etcd.mirror import Mirror
from kvlink.coordinator.store.etcd.requests import Request, Serving, serve
from kvlink.coordinator.store.etcd.sync import Sync
from kvlink.coordinator.store.waiting_claims import WaitingClaims
from kvlink.errors import KVLinkError
from kvlink.runtime.supervised import for_each, guarded, start_job, survived
from kvlink.v1 import etcd_pb2 as pb

_log = logging.getLogger("kvlink.control")

_DELETION_S = 0.01
_NEVER_S = 1e9


@dataclass(slots=True, eq=False)
class _Waiter:
    """Holds one waiting claim. The caller may cancel `answer` at any time."""

    claim: Claim
    answer: asyncio.Future[list[bytes]]
    tries: int = 0
    """Number of times that its record could not be written because etcd had changed."""

    def refuse(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class EtcdClaims:
    """Answers claims of requests in etcd. One claim per request is written at a time. Belongs to one event loop."""

    def __init__(
        self, etcd: Etcd, layout: Keys, mirror: Mirror, sync: Sync, commits: GroupCommit, limits: Limits
    ) -> None:
        self._etcd = etcd
        self._layout = layout
        self._mirror = mirror
        self._sync = sync
        self._commits = commits
        self._waiting: WaitingClaims[_Waiter] = WaitingClaims(limits)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failures = LogQuota()
        self.num_claimed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def close(self) -> None:
        """Refuses waiting claims. Closing again has no effect."""
        self.refuse_all(refusals.closing())
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def claim(self, claim: Claim, answer: asyncio.Future[list[bytes]], now: float) -> None:
        """Answers the claim now or later. Raises RefusedError (TOO_MANY)."""
        waiter = _Waiter(claim, answer)
        does_not_wait = claim.timeout_s == 0
        self._waiting.add(claim, waiter, now + (_NEVER_S if does_not_wait else claim.timeout_s))
        asking = start_job("claim at once", self._answer_at_once(waiter)) if does_not_wait else None
        answer.add_done_callback(guarded("claim ended", partial(self._end, waiter, asking)))
        if not does_not_wait:
            self.serve_waiters(claim.request_id)

    def _end(self, waiter: _Waiter, asking: asyncio.Task[None] | None, _: object) -> None:
        self._waiting.remove(waiter)
        if asking is not None:
            asking.cancel()

    async def release(self, claim: Claim) -> None:
        """Removes a reader that did not take its tickets from the record. Its change then serves the waiting claims."""
        key = self._layout.claim_record(claim.request_id)
        reader = claim.reader, claim.claim_id
        if (writing := self._running.get(claim.request_id)) is not None:
            await asyncio.wait([writing])  # it may be the record of this claim
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
                await self._catch_up(claim.request_id)
        except KVLinkError as error:
            if (suppressed := self._failures.take()) is not None:
                _log.warning(
                    "cannot make a given-up ticket available again request=%s suppressed=%d error=%s",
                    claim.request_id,
                    suppressed,
                    error,
                )

    def next_deadline(self) -> float:
        """Returns a time before which `expire` has nothing to do."""
        return self._waiting.next_deadline()

    def expire(self, now: float) -> None:
        """Refuses claims that have timed out."""
        for_each("store timer", self._refuse, self._waiting.due(now))

    def refuse_all(self, why: RefusedError) -> None:
        """Refuses all waiting claims."""
        for waiter in self._waiting.all():
            waiter.refuse(RefusedError(why.reason, why.sentence))

    def serve_waiters(self, request_id: str) -> None:
        """Serves the waiting claims of a request, one after the other."""
        if request_id in self._running:
            return
        any(self._serve(request_id, waiter) for waiter in self._waiting.of(request_id))

    def _serve(self, request_id: str, waiter: _Waiter) -> bool:
        """Serves one waiting claim if that is possible. Returns whether its record is being written."""
        try:
            return self._serve_if_possible(request_id, waiter)
        except Exception as error:
            survived("claims", error)
            waiter.refuse(as_refusal(error))
            return False

    def _serve_if_possible(self, request_id: str, waiter: _Waiter) -> bool:
        request = self._mirror.requests.get(request_id)
        serving = serve(request, waiter.claim) if request is not None else None
        if waiter.answer.done():
            return False
        if request is None or serving is None:
            self._refuse_if_over(request, waiter)
        elif serving.record is None:
            waiter.answer.set_result([ticket.offer.ticket for ticket in serving.tickets])
        else:
            self._start(waiter, self._give(waiter, serving, serving.record))
            return True
        return False

    def _start(self, waiter: _Waiter, job: Coroutine[None, None, None]) -> None:
        request_id = waiter.claim.request_id

        async def run() -> None:
            try:
                await job
            except Exception as error:
                survived("claims", error)
                waiter.refuse(as_refusal(error))
            finally:
                del self._running[request_id]
            self.serve_waiters(request_id)

        self._running[request_id] = start_job("claims", run())

    async def _give(self, waiter: _Waiter, serving: Serving, record: Claimed) -> None:
        """Writes the record, then answers the claim. If another coordinator was first, catches up with etcd."""
        name = waiter.claim.request_id
        assert record.tickets == tuple(each.digest for each in serving.tickets)
        assert (waiter.claim.reader, waiter.claim.claim_id) in record.readers
        key = self._layout.claim_record(name)
        compare = [
            unchanged(key, serving.before),
            *(
                unchanged(self._layout.ticket(name, each.offer.rank), each.revision)
                for each in serving.tickets
            ),
        ]
        txn = pb.TxnRequest(compare=compare, success=[put(key, StoredRecords.CLAIMED.encode(record))])
        try:
            done = await self._commits.submit(txn, *(each.key for each in compare))
            if done.succeeded:
                self.num_claimed += 1
                if not waiter.answer.done():
                    waiter.answer.set_result([ticket.offer.ticket for ticket in serving.tickets])
            else:
                waiter.tries += 1
                if waiter.tries == MAX_TRIES:
                    raise refusals.write_conflict(f"request {named(name)}", MAX_TRIES)
                await self._catch_up(name)
        except Exception as error:
            waiter.refuse(as_refusal(error))

    async def _answer_at_once(self, waiter: _Waiter) -> None:
        """Answers a claim that does not wait with what etcd has now."""
        name = waiter.claim.request_id
        try:
            await self._catch_up(name)
            self.serve_waiters(name)
            while name in self._running:
                await asyncio.wait([self._running[name]])
            self._refuse(waiter)
        except Exception as error:
            waiter.refuse(as_refusal(error))
            if not isinstance(error, (KVLinkError, RefusedError)):
                raise

    async def _catch_up(self, request_id: str) -> None:
        """Returns when the mirror has what etcd has of a request."""
        prefix = self._layout.tickets(request_id)
        tickets = await self._etcd.read(prefix, after(prefix))
        claims = await self._etcd.read(self._layout.claim_record(request_id))
        await self._sync.reached(max((kv.mod_revision for kv in (*tickets.kvs, *claims.kvs)), default=0))
        await asyncio.sleep(_DELETION_S)  # a deleted key has no revision to wait for

    def _refuse_if_over(self, request: Request | None, waiter: _Waiter) -> None:
        why = self._mirror.why_ended(waiter.claim.request_id)
        if why is not None and (request is None or not request.free()):
            waiter.refuse(why)

    def _refuse(self, waiter: _Waiter) -> None:
        request = self._mirror.requests.get(waiter.claim.request_id)
        free = request.free() if request is not None else {}
        num_ranks = next((ticket.offer.num_ranks for ticket in free.values()), 0)
        waiter.refuse(refusals.claim_timed_out(waiter.claim, len(free), num_ranks))
