# SPDX-License-Identifier: Apache-2.0
"""Transfers parts of handoffs through the coordinator, as numbered offers that are claimed one after the other.

It runs in the scheduler's process, on kvlink's control thread. The scheduler itself never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from concurrent.futures import Future

from kvlink import tracing
from kvlink.config import WorkerConfig
from kvlink.control import CoordinatorClient, Offer
from kvlink.errors import ConfigError, KVLinkError, UnknownRequest
from kvlink.runtime.background import ControlThread
from kvlink.runtime.supervised import survived
from kvlink.tracing import TraceParent

from ...request_names import name_of, printable
from ..wire.handoff import Owner
from ..wire.handoff_parts import Part

_log = logging.getLogger("vllm.kvlink")

_FIRST_S = 600.0
"""The wait for the first part. A prefill server may have a queue; if it dies, its router ends the wait much sooner."""
_CLAIM_S = 30.0
_CLOSE_S = 2.0


class Following:
    """The parts that one request's prefill server announces. The scheduler reads them, the control thread adds them."""

    def __init__(self, name: str, trace: TraceParent | None) -> None:
        self.name = name
        self._asked_in = trace
        self.why_ended = ""
        """Why no more parts come; empty while they do, and after the last."""
        self._parts: deque[Part] = deque()
        self._first: Part | None = None
        self._job: Future[object] | None = None

    def take(self) -> list[Part]:
        """Returns the parts that came since the last call, in order."""
        parts = []
        while self._parts:
            parts.append(self._parts.popleft())
        return parts

    @property
    def trace(self) -> TraceParent | None:
        """Returns the trace of its claims: that of the offer once it is known, before that the request's."""
        offered_in = self._first.handoff.trace if self._first else None
        return offered_in or self._asked_in

    def stop(self) -> None:
        """Stops reading. Idempotent."""
        if self._job is not None:
            self._job.cancel()

    def _add(self, blob: bytes) -> bool:
        """Adds a part. Returns whether more follow."""
        try:
            part = Part.from_bytes(blob)
        except KVLinkError as error:
            self.why_ended = str(error)
            return False
        self._first = self._first or part
        if not part.continues(self._first):
            self.why_ended = "the prefill server started over under another lease"
            return False
        self._parts.append(part)
        return not part.last


class Announcements:
    """Announces and follows parts. Safe from any thread.

    `coordinator` is host:port. `gap_s` is the longest wait for the next part after one came.
    """

    def __init__(self, coordinator: str, gap_s: float) -> None:
        self._coordinator = coordinator
        self._gap_s = gap_s
        self._control = ControlThread.shared()
        self.secret = ""
        """That of the worker in whose name it offers."""
        self._client: CoordinatorClient | None = None

    @classmethod
    def of(cls, config: WorkerConfig) -> Announcements | None:
        """Returns the announcements of a configuration, or None without a coordinator."""
        return cls(config.coordinator, config.timeout_s) if config.coordinator else None

    def announce(
        self, name: str, number: int, owner: Owner, ttl_s: float, part: bytes, trace: TraceParent | None
    ) -> Future[None]:
        """Offers part number `number` of `name` in the background, for a worker that has joined the coordinator."""
        # One rank announces to one reader: these are servers, whatever the number of their workers.
        offer = Offer(_numbered(name, number), owner.worker_id, owner.epoch, ttl_s, 0, 1, 1, part)
        return self._control.submit(self._offer(offer, trace))

    def follow(self, name: str, trace: TraceParent | None) -> Following:
        """Claims the parts of `name` one after the other, until the last or `stop`. `trace` is the reader's."""
        following = Following(name, trace)
        following._job = self._control.in_background(
            self._follow(following), f"not followed request={name}", name="parts of a handoff"
        )
        return following

    def take(self, name: str, wait_s: float) -> Future[bytes]:
        """Claims the only part of `name` in the background. Waits `wait_s` seconds for it."""
        return self._control.submit(asyncio.wait_for(self._take(name, wait_s), wait_s + _CLOSE_S))

    def close(self) -> None:
        """Closes the connection to the coordinator. Idempotent."""
        with contextlib.suppress(KVLinkError):
            self._control.run(self._close(), _CLOSE_S)

    # The following methods run on the control thread.

    async def _offer(self, offer: Offer, trace: TraceParent | None) -> None:
        try:
            with tracing.joined(trace):
                await self._coordinator_client().offer(offer)
        except KVLinkError as error:
            _log.warning("not announced request=%s error=%s", printable(offer.request_id), error)
            raise
        except Exception as error:
            survived("announcements", error)
            raise

    async def _follow(self, following: Following) -> None:
        number, goes_on = 0, True
        try:
            while goes_on:
                with tracing.joined(following.trace):
                    blob = await self._claim(following.name, number)
                goes_on = following._add(blob)
                number += 1
        except KVLinkError as error:
            following.why_ended = str(error)
        finally:
            if goes_on and not following.why_ended:
                following.why_ended = "its follower has stopped"

    async def _take(self, name: str, wait_s: float) -> bytes:
        [blob] = await self._coordinator_client().claim(_numbered(name, 0), wait_s)
        return blob

    async def _claim(self, name: str, number: int) -> bytes:
        deadline = time.monotonic() + (self._gap_s if number else _FIRST_S)
        while True:
            left_s = deadline - time.monotonic()
            try:
                [blob] = await self._coordinator_client().claim(
                    _numbered(name, number), min(max(left_s, 0.0), _CLAIM_S)
                )
            except ValueError:
                raise ConfigError(
                    f"{printable(name)} is announced by several servers; let the router choose a new name for each "
                    "request"
                ) from None
            except UnknownRequest:
                if left_s <= _CLAIM_S:
                    raise
            else:
                return blob

    def _coordinator_client(self) -> CoordinatorClient:
        if self._client is None:
            self._client = CoordinatorClient(self._coordinator)
        self._client.act_as(self.secret)
        return self._client

    async def _close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()


def _numbered(name: str, number: int) -> str:
    """Returns the name of a part, which the coordinator takes whatever the router's name is."""
    return name_of(f"{name}/{number}")
