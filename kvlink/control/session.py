# SPDX-License-Identifier: Apache-2.0
"""Keeps a worker joined: it beats, rejoins automatically, and re-sends live offers to a coordinator that lost them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum

from kvlink.control.beats import Beats
from kvlink.control.client import CoordinatorClient
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.deadlines import Deadlines
from kvlink.control.now import now
from kvlink.control.overview import Beat, WorkerReport
from kvlink.control.refusal import NotJoined, Replaced
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.control.rpc.stream import Stream
from kvlink.control.values import Membership, Offer, Push, PushKind
from kvlink.errors import CoordinatorError, CoordinatorUnavailable, KVLinkError
from kvlink.runtime.backoff import Backoff
from kvlink.runtime.supervised import guarded, start_awaited, start_loop, survived
from kvlink.types import WorkerCard

_log = logging.getLogger("kvlink.control")

_LEAST_TTL_S = 0.001
_JOIN_TIMEOUT_S = 4.0
"""Bounds one attempt to rejoin. The next attempt follows after a back-off."""


class SessionState(Enum):
    """Says whether a Session is joined."""

    JOINED = "joined"
    REJOINING = "rejoining"
    REPLACED = "replaced"
    """Another process took the worker_id. This state is final."""
    CLOSED = "closed"


class Session:
    """Holds one worker's membership. `join` creates it; it belongs to the event loop that called `join`.

    `on_settle(slot, settle_nonce)` is called on the loop when a reader settles through the coordinator. `report` is
    called before each beat, and its result is what the coordinator shows of this worker.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        card: WorkerCard,
        membership: Membership,
        on_settle: Callable[[int, int], object],
        report: Callable[[], WorkerReport | None] = lambda: None,
    ) -> None:
        self._client = client
        self._membership = membership
        self._on_settle = guarded("session settles", on_settle)
        self._report = report
        self._offers: dict[str, tuple[Offer, float]] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._joined = asyncio.Event()
        self._joined.set()
        self._doubt = asyncio.Event()
        self.card = replace(card, epoch=membership.epoch)
        self.state = SessionState.JOINED
        self.num_rejoins = 0
        """Counts the rejoins after which all offers were sent again."""
        self._task = start_loop("session", self._stay_joined)

    @classmethod
    async def join(
        cls,
        client: CoordinatorClient,
        card: WorkerCard,
        on_settle: Callable[[int, int], object],
        timeout_s: float = 5.0,
        report: Callable[[], WorkerReport | None] = lambda: None,
    ) -> Session:
        """Joins and stays joined until `close`. `card.epoch` is a proposal; `session.card` has the granted epoch."""
        return cls(client, card, await client.join(card, timeout_s=timeout_s), on_settle, report)

    def __repr__(self) -> str:
        return (
            f"Session({self.card.worker_id!r} epoch {self.card.epoch} {self.state.value} "
            f"at {self._client.address}, {len(self._offers)} offers)"
        )

    async def offer(self, offer: Offer, timeout_s: float = 5.0) -> None:
        """Publishes a ticket and keeps it published until it expires or `forget` is called. Raises CoordinatorError.

        After CoordinatorUnavailable the ticket is not published yet; it will be when the coordinator is back.
        """
        at = now()
        for expired in self._deadlines.due(at):
            self._offers.pop(expired, None)
        ends = at + offer.ttl_s
        self._offers[offer.request_id] = (offer, ends)
        self._deadlines.set(offer.request_id, ends)
        try:
            await self._publish(offer, at + timeout_s, ends)
        except CoordinatorUnavailable:
            self._rejoin_soon()
            raise
        except BaseException:
            self.forget(offer.request_id)
            raise

    def forget(self, request_id: str) -> None:
        """Stops re-sending an offer that has ended at its owner."""
        self._offers.pop(request_id, None)
        self._deadlines.discard(request_id)

    async def close(self) -> None:
        """Leaves the coordinator and stops. Closing again has no effect.

        If the coordinator cannot be reached, the lease of the worker expires instead.
        """
        if self.state is SessionState.CLOSED:
            return
        leaves = self.state is not SessionState.REPLACED
        self.state = SessionState.CLOSED
        self._joined.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if leaves:
            try:
                await self._client.leave(self.card.worker_id, self.card.epoch, timeout_s=1.0)
            except KVLinkError as error:
                _log.info(
                    "closed without leaving the coordinator worker=%s error=%s", self.card.worker_id, error
                )

    async def _publish(self, offer: Offer, deadline: float, ends: float) -> None:
        deadline = min(deadline, ends)
        while True:
            if not self._joined.is_set():
                self._doubt.set()
            try:
                await asyncio.wait_for(self._joined.wait(), max(0.0, deadline - now()))
            except asyncio.TimeoutError:
                raise CoordinatorUnavailable(
                    f"request {offer.request_id!r} is not offered yet: {self!r} cannot reach its coordinator. It will "
                    "be offered when the coordinator is back"
                ) from None
            self._check_usable()
            left = offer._replace(ttl_s=max(_LEAST_TTL_S, min(offer.ttl_s, ends - now())))
            try:
                await self._client.offer(left, timeout_s=max(0.001, deadline - now()))
                return
            except NotJoined:  # the coordinator restarted after the last beat
                self._rejoin_soon()

    def _rejoin_soon(self) -> None:
        if self.state is SessionState.JOINED:
            self._joined.clear()
            self._doubt.set()

    def _check_usable(self) -> None:
        if self.state is SessionState.REPLACED:
            raise Replaced(
                f"{self!r}: another process joined under this worker_id; give each process its own"
            )
        if self.state is SessionState.CLOSED:
            raise CoordinatorError(f"{self!r} is closed")

    async def _stay_joined(self) -> None:
        backoff = Backoff()
        rejoined = False
        while True:
            if self.state is SessionState.JOINED:
                try:
                    await self._keep_alive(backoff, rejoined)
                except KVLinkError as error:
                    _log.warning("lost the coordinator worker=%s error=%s", self.card.worker_id, error)
                except Exception as error:
                    survived("session", error)
                self.state = SessionState.REJOINING
                self._joined.clear()
                await self._spread_out()
            await asyncio.sleep(backoff.delay_s())
            try:
                await self._rejoin()
                rejoined = True
            except Replaced as error:
                _log.error("replaced worker=%s error=%s", self.card.worker_id, error)
                self.state = SessionState.REPLACED
                self._joined.set()
                return
            except KVLinkError as error:
                _log.info("cannot join yet worker=%s error=%s", self.card.worker_id, error)
            except Exception as error:
                survived("session", error)

    async def _spread_out(self) -> None:
        """Waits a random time within the lease, or until there is something to offer.

        With several coordinators it does not wait: the others know this worker's lease and need a beat before it ends.
        """
        if self._client.has_replicas:
            return
        delay_s = random.uniform(0.0, self._beats.spread_s(now()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._doubt.wait(), delay_s)

    async def _rejoin(self) -> None:
        membership = await self._client.join(self.card, rejoin=True, timeout_s=_JOIN_TIMEOUT_S)
        if membership.epoch != self.card.epoch:
            raise Replaced(f"the coordinator granted epoch {membership.epoch} instead of {self.card.epoch}")
        self._membership = membership
        self.state = SessionState.JOINED
        self._doubt.clear()
        self._joined.set()

    async def _resend_offers(self, request_ids: Iterable[str]) -> set[str]:
        """Sends offers that have neither ended nor expired. Returns those that may be accepted later."""
        at = now()
        known = [self._offers[request_id] for request_id in request_ids if request_id in self._offers]
        live = [offer._replace(ttl_s=due - at) for offer, due in known if due > at + _LEAST_TTL_S]
        assert all(offer.ttl_s <= self._offers[offer.request_id][1] - at for offer in live)
        if not live:
            return set()
        async with self._client.handoffs() as stream:
            sending = [_start(stream, offer) for offer in live]
            results = await asyncio.gather(*sending, return_exceptions=True)
        refused = set()
        for offer, result in zip(live, results, strict=True):
            if isinstance(result, CoordinatorUnavailable):
                raise result
            if isinstance(result, KVLinkError) and result.retryable:
                refused.add(offer.request_id)
        return refused

    async def _restore_offers(self, rejoined: bool) -> None:
        """Sends all offers again after a rejoin, beside the beats. Raises if the coordinator is gone."""
        if rejoined:
            num_offers = len(self._offers)
            refused = await self._resend_offers(self._offers)
            self.num_rejoins += 1
            _log.info("rejoined worker=%s offers=%d", self.card.worker_id, num_offers)
            await self._retry_refused_offers(refused)
        await self._doubt.wait()

    async def _retry_refused_offers(self, refused: set[str]) -> None:
        backoff = Backoff()
        if refused:
            _log.warning(
                "the coordinator refused offers for now, retrying worker=%s offers=%d",
                self.card.worker_id,
                len(refused),
            )
        while refused:
            await asyncio.sleep(backoff.delay_s())
            refused = await self._resend_offers(refused)

    async def _keep_alive(self, backoff: Backoff, rejoined: bool) -> None:
        """Beats until the coordinator may no longer know this worker. Raises when the coordinator is gone."""
        beats = self._beats = Beats(self._membership, now())
        stream = self._client.keep_alive()
        tasks = [
            start_awaited(job)
            for job in (
                self._beat(stream, beats),
                self._listen(stream, beats, backoff),
                self._give_up(stream, beats),
                self._restore_offers(rejoined),
                self._doubt.wait(),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stream.cancel()

    async def _beat(self, stream: Stream[Beat, Push], beats: Beats) -> None:
        while True:
            beats.sent(now())
            await stream.send(self._next_beat())
            await asyncio.sleep(self._membership.keep_alive_s)

    def _next_beat(self) -> Beat:
        """Returns a beat, without a report if there is none that can be sent: it must not cost the membership."""
        bare = Beat(self.card.worker_id, self.card.epoch)
        try:
            beat = bare._replace(report=self._report())
            CoordinatorCalls.KEEP_ALIVE.request.encode(beat)
        except Exception as error:
            survived("session", error)
            return bare
        return beat

    async def _give_up(self, stream: Stream[Beat, Push], beats: Beats) -> None:
        """Raises CoordinatorUnavailable when beats stay unanswered although the connection is open."""
        while (left_s := beats.give_up_at() - now()) > 0:
            await asyncio.sleep(min(left_s, self._membership.keep_alive_s))
        stream.avoid_server()
        raise CoordinatorUnavailable(
            f"coordinator at {self._client.address} has answered no beat for two thirds of the lease of "
            f"{self._membership.lease_s:g} s: it is stopped, overloaded or cut off"
        )

    async def _listen(self, stream: Stream[Beat, Push], beats: Beats, backoff: Backoff) -> None:
        while (push := await stream.receive()) is not None:
            if push.kind is PushKind.REJOIN:
                return
            if push.kind is PushKind.SETTLE:
                self._on_settle(push.slot, push.settle_nonce)
            else:
                beats.answered()
                backoff.reset()


def _start(stream: HandoffStream, offer: Offer) -> asyncio.Future[None]:
    """Sends an offer. One that cannot be sent fails alone."""
    try:
        return stream.offer(offer)
    except Exception as error:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(error)
        return failed
