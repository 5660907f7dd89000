# SPDX-License-Identifier: Apache-2.0
"""Decides whether a second process may take a worker_id: only when the first process no longer runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvlink.config.addresses import is_loopback, split_address
from kvlink.control.client import AgentClient
from kvlink.control.denials import LogQuota
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.security import Security, caller
from kvlink.coordinator.store import Store, refusals
from kvlink.errors import CoordinatorUnavailable, KVLinkError
from kvlink.runtime.backoff import Backoff
from kvlink.types import WorkerCard

_ANSWER_S = 1.5
"""The first process has this long to answer. Clients wait 3 s before they try another coordinator."""
_OWN_ANSWER_S = 0.5
"""So long an agent may be starting that has the newcomer's address, before it counts as the newcomer's own."""
_MOST_AT_ONCE = 256

_log = logging.getLogger("kvlink.control")

Ask = Callable[[str, str, bool], Awaitable[WorkerCard]]
"""Maps (address of an agent, tenant, whether to wait until it has started) to its worker's card. Raises KVLinkError."""


class Incumbents:
    """Asks the agent of the process that holds a worker_id whether it runs. Belongs to one event loop."""

    def __init__(
        self, store: Store, security: Security, ask: Ask | None = None, answer_s: float = _ANSWER_S
    ) -> None:
        self._store = store
        self._security = security
        self._ask = ask or self._ask_agent
        self._answer_s = answer_s
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)
        self._quota = LogQuota()

    async def check_ended(self, newcomer: WorkerCard, rejoin: bool = False) -> None:
        """Returns if a new process may have its worker_id. Raises RefusedError (TAKEN, and like Store.worker).

        A rejoin under an epoch that is not newer is left to the store, which refuses it for good.
        """
        incumbent = await self._incumbent(newcomer)
        if incumbent is None or (rejoin and newcomer.epoch <= incumbent.epoch):
            return
        async with self._room:
            why = await self._why_ended(incumbent, newcomer)
        if not why:
            self._warn(incumbent, newcomer)
            raise refusals.worker_id_taken(incumbent, newcomer)
        _log.info(
            "another process takes over worker=%s agent=%s before=%s because=%s",
            newcomer.worker_id,
            newcomer.agent,
            incumbent.agent,
            why,
        )

    async def _incumbent(self, newcomer: WorkerCard) -> WorkerCard | None:
        """Returns the card of another process with the worker_id, or None."""
        try:
            known = await self._store.worker(newcomer.worker_id, 0)
        except RefusedError as refused:
            if refused.reason is Reason.UNKNOWN:
                return None
            raise
        return known if known.incarnation != newcomer.incarnation else None

    def _warn(self, incumbent: WorkerCard, newcomer: WorkerCard) -> None:
        suppressed = self._quota.take()
        if suppressed is not None:
            _log.warning(
                "two processes have one worker_id, the second is refused worker=%s stays=%s refused=%s suppressed=%d",
                newcomer.worker_id,
                incumbent.agent,
                newcomer.agent,
                suppressed,
            )

    async def _why_ended(self, incumbent: WorkerCard, newcomer: WorkerCard) -> str:
        """Returns why the process counts as ended, or "" if it runs.

        Where both have one address, the newcomer's own agent may answer there, that it is starting. On loopback of
        another host nobody can be asked: the process runs until its lease ends.
        """
        is_same = incumbent.agent == newcomer.agent
        answer_s = _OWN_ANSWER_S if is_same else self._answer_s
        try:
            found = await asyncio.wait_for(self._ask(incumbent.agent, caller().tenant, not is_same), answer_s)
            if found.incarnation == incumbent.incarnation:
                return ""
            why = "another process listens there"
        except asyncio.TimeoutError:
            why = f"no answer within {answer_s:g} s"
        except KVLinkError as error:
            why = str(error)
        is_elsewhere = incumbent.host.boot_id != newcomer.host.boot_id
        return "" if is_same and is_elsewhere and is_loopback(split_address(incumbent.agent)[0]) else why

    async def _ask_agent(self, address: str, tenant: str, waits: bool) -> WorkerCard:
        """Fetches the card from an agent. `waits` while it is starting, as it may have joined just now."""
        backoff = Backoff()
        async with AgentClient(address, self._answer_s, self._security, tenant) as client:
            while True:
                try:
                    return await client.card_at_once()
                except CoordinatorUnavailable as error:
                    if error.telling < 1 or not waits:
                        raise
                await asyncio.sleep(backoff.delay_s())
