# SPDX-License-Identifier: Apache-2.0
"""A second process under a worker_id: it is let in when the first one is gone, and refused while that one runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvlink.backoff import Backoff
from kvlink.control.client import AgentClient
from kvlink.control.denials import LogQuota
from kvlink.control.refusal import Reason, Refused
from kvlink.control.security import Security, caller
from kvlink.coordinator.store import Store, refusals
from kvlink.errors import CoordinatorUnavailable, KVLinkError
from kvlink.types import WorkerCard

_ANSWER_S = 1.5
"""What the first process gets to answer. Clients wait for 3 s before they ask another coordinator."""
_MOST_AT_ONCE = 256

_log = logging.getLogger("kvlink.control")

Ask = Callable[[str, str], Awaitable[WorkerCard]]
"""(agent's address, tenant) -> the card of who listens there. Raises KVLinkError."""


class Incumbents:
    """Asks the agent of the process that holds a worker_id. Belongs to the event loop that it is used on."""

    def __init__(
        self, store: Store, security: Security, ask: Ask | None = None, answer_s: float = _ANSWER_S
    ) -> None:
        self._store = store
        self._security = security
        self._ask = ask or self._ask_agent
        self._answer_s = answer_s
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)
        self._quota = LogQuota()

    async def check_gone(self, newcomer: WorkerCard) -> None:
        """Returns when a new process may have its worker_id. Raises Refused (TAKEN, and as Store.worker)."""
        incumbent = await self._incumbent(newcomer)
        if incumbent is None:
            return
        async with self._room:
            gone = await self._why_gone(incumbent)
        if not gone:
            self._warn(incumbent, newcomer)
            raise refusals.taken(incumbent, newcomer)
        _log.info(
            "another process takes over worker=%s agent=%s before=%s because=%s",
            newcomer.worker_id,
            newcomer.agent,
            incumbent.agent,
            gone,
        )

    async def _incumbent(self, newcomer: WorkerCard) -> WorkerCard | None:
        """Another process; one whose agent was where the newcomer listens itself is gone."""
        try:
            known = await self._store.worker(newcomer.worker_id, 0)
        except Refused as refused:
            if refused.reason is Reason.UNKNOWN:
                return None
            raise
        is_another = known.incarnation != newcomer.incarnation and known.agent != newcomer.agent
        return known if is_another else None

    def _warn(self, incumbent: WorkerCard, newcomer: WorkerCard) -> None:
        unsaid = self._quota.take()
        if unsaid is not None:
            _log.warning(
                "two processes have one worker_id worker=%s stays=%s refused=%s unsaid=%d",
                newcomer.worker_id,
                incumbent.agent,
                newcomer.agent,
                unsaid,
            )

    async def _why_gone(self, incumbent: WorkerCard) -> str:
        """Returns "" when it runs."""
        try:
            found = await asyncio.wait_for(self._ask(incumbent.agent, caller().tenant), self._answer_s)
        except asyncio.TimeoutError:
            return f"no answer within {self._answer_s:g} s"
        except KVLinkError as error:
            return str(error)
        return "" if found.incarnation == incumbent.incarnation else "another process listens there"

    async def _ask_agent(self, address: str, tenant: str) -> WorkerCard:
        """Asks again while the agent says that it is starting: its join may have been answered just now."""
        backoff = Backoff()
        async with AgentClient(address, self._answer_s, self._security, tenant) as client:
            while True:
                try:
                    return await client.card_at_once()
                except CoordinatorUnavailable as error:
                    if error.telling < 1:
                        raise
                await asyncio.sleep(backoff.delay_s())
