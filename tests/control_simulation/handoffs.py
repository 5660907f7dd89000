# SPDX-License-Identifier: Apache-2.0
"""The handoffs of a simulated fleet, of each kind that there is."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from control_simulation.invariants import LATEST_S, Asked, Ledger
from control_simulation.processes import true_time
from control_simulation.workers import TTL_S, Worker

KINDS = (
    "plain",
    "rival",
    "two ranks",
    "two readers",
    "cancelled",
    "cancelled in a stream",
    "offered again",
    "asked again",
    "withdrawn late",
    "abandoned",
)
_OFTEN = (8, 4, 2, 2, 2, 2, 2, 2, 1, 1)
_SHORT_TTL_S = 12.0
_PATIENCE_S = 10.0
_KEPT_S = TTL_S + 25.0
"""Tickets that are over are deleted a little later, and again when that failed."""


class Handoffs:
    """Begins handoffs, and knows which are under way."""

    def __init__(self, chance: random.Random, ledger: Ledger) -> None:
        self.must_succeed = False
        self.under_way: dict[str, list[Worker]] = {}
        """Maps request ids to who waits for the tickets."""
        self._chance = chance
        self._ledger = ledger
        self._requests = itertools.count()
        self._begun: deque[float] = deque()
        """When handoffs began whose tickets may still be kept."""
        self._abandoned: list[tuple[str, float]] = []

    @property
    def num_kept(self) -> int:
        """Returns how many requests a store may still hold."""
        while self._begun and self._begun[0] < true_time() - _KEPT_S:
            self._begun.popleft()
        return len(self._begun)

    def some(self, running: Sequence[Worker]) -> None:
        """Begins one of any kind."""
        owner, reader, other = self._chance.sample(running, 3)
        self.begin(self._chance.choices(KINDS, _OFTEN)[0], owner, reader, other)

    def begin(self, kind: str, owner: Worker, reader: Worker, other: Worker) -> None:
        """Begins one; `under_way` has it until its readers have the tickets."""
        request_id = f"r{next(self._requests)}"
        self._begun.append(true_time())
        self._ledger.done[f"handoff, {kind}"] += 1
        by_stream = self._chance.random() < 0.3
        if kind == "abandoned":
            ttl_s = self._chance.choice((TTL_S, _SHORT_TTL_S))
            owner.offer(request_id, ttl_s=ttl_s)
            self._abandoned.append((request_id, true_time() + ttl_s))
            return
        owners = [owner, other] if kind == "two ranks" else [owner]
        readers = [reader, other] if kind in ("rival", "two readers") else [reader]
        ended = partial(self._ended, request_id, owners, kind)
        self.under_way[request_id] = list(readers)
        seats = 2 if kind == "two readers" else 1
        for rank, each in enumerate(owners):
            offering = each.offer(request_id, rank, len(owners), seats)
        if kind.startswith("cancelled"):
            after_s = self._chance.choice((0.0, 0.003, 0.03, 2.0)) * self._chance.random()
            reader.claim_and_cancel(request_id, after_s, "stream" in kind, partial(ended, reader))
        elif kind == "withdrawn late":
            reader.claim_and_withdraw(
                request_id, partial(self._replace, request_id, owner, other), partial(ended, reader)
            )
        elif kind == "offered again":
            self._after(
                offering,
                lambda: owner.offer(request_id, version=1),
                partial(self._race, request_id, owner, reader),
            )
        else:
            for number, each in enumerate(readers):
                seat = number if kind == "two readers" else 0
                claiming = each.claim(request_id, by_stream, partial(ended, each), seat, seats)
                if kind == "asked again":
                    self._after(claiming, lambda: None, partial(self._ask_again, each, claiming))

    def offer(self, owner: Worker) -> str:
        """Offers a request that is claimed later, if at all."""
        request_id = f"r{next(self._requests)}"
        self._begun.append(true_time())
        owner.offer(request_id)
        return request_id

    def take(self, request_id: str, owner: Worker, reader: Worker, must_succeed: bool) -> None:
        """Claims it."""
        self.under_way[request_id] = [reader]

        def ended(well: bool) -> None:
            self._ended(request_id, [owner], "refused at first", reader, well)
            if must_succeed and not well:
                self._ledger.violated(f"{request_id}, refused at first, was not offered again by {owner}")

        reader.claim(request_id, False, ended)

    def _after(
        self, first: asyncio.Task[object], then: Callable[[], object], last: Callable[[], object]
    ) -> None:
        async def run() -> None:
            await asyncio.wait([first])
            second = then()
            if isinstance(second, asyncio.Task):
                await asyncio.wait([second])
            last()

        self._task = asyncio.get_running_loop().create_task(run())

    def _race(self, request_id: str, owner: Worker, reader: Worker) -> None:
        """The claim begins as soon as another ticket has replaced the first one."""
        ended = partial(self._ended, request_id, [owner], "offered again", reader)
        reader.claim(request_id, self._chance.random() < 0.3, ended)

    async def _replace(self, request_id: str, owner: Worker, other: Worker) -> None:
        """The owner offers another ticket, which another reader gets."""
        offering = owner.offer(request_id, version=1)
        await asyncio.wait([offering], timeout=_PATIENCE_S)  # the process may be killed
        taking = other.claim(request_id, False, lambda well: None)
        await asyncio.wait([taking], timeout=_PATIENCE_S)
        third = self._chance.choice((owner, other))
        later = asyncio.get_running_loop().call_later
        later(0.3, lambda: third.claim(request_id, True, lambda well: None, timeout_s=1.0))

    def _ask_again(self, reader: Worker, claiming: asyncio.Task[Asked | None]) -> None:
        asked = claiming.result() if not claiming.cancelled() else None
        if asked is None:
            return
        must = self.must_succeed

        async def run() -> None:
            again = self._ledger.asks(asked.request_id, asked.claim_id)
            well = await reader.ask(again, self._chance.random() < 0.5, timeout_s=1.0)
            if must and self.must_succeed and not well and again.era == asked.era == self._ledger.era:
                self._ledger.violated(f"a claim of {asked.request_id} got nothing when it was sent again")
            self._ledger.done["claim sent again"] += 1

        reader.process.start(run())

    def _ended(self, request_id: str, owners: list[Worker], kind: str, by: Worker, well: bool) -> None:
        waiting = self.under_way.get(request_id)
        if waiting is None:
            return
        waiting.remove(by)
        if waiting and well == (kind == "two readers"):  # a rival may still get them; the other reader has to
            return
        del self.under_way[request_id]
        if well:
            for owner in owners:
                owner.forget(request_id)  # the reader has settled in the owner's memory
            return
        self._ledger.done["handoff in vain"] += 1
        if self.must_succeed and kind != "withdrawn late" and kind != "cancelled in a stream":
            self._ledger.violated(f"{request_id} ({kind}) from {owners} to {by!r} was in vain")

    def check_over(self) -> None:
        """Long after the last fault."""
        for request_id, waiting in self.under_way.items():
            if any(worker.process.runs for worker in waiting):
                self._ledger.violated(f"{request_id} is under way long after the last fault")
        self.under_way.clear()

    def ask_for_abandoned(self, reader: Worker) -> None:
        """Those whose time is over: nobody gets their tickets."""
        for request_id, _ in [each for each in self._abandoned if each[1] < true_time() - LATEST_S]:
            reader.claim(request_id, False, lambda well: None, timeout_s=0.5)
            self._ledger.done["claim after the end"] += 1
        self._abandoned = [each for each in self._abandoned if each[1] >= true_time() - LATEST_S]
