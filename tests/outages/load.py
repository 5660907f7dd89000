# SPDX-License-Identifier: Apache-2.0
"""Workers that offer and readers that claim, as one process; it knows of every handoff what became of it.

Each line on stdin, and the end of stdin, is answered by one line of JSON: `Totals` since the line before. Usage:
python -m outages.load ADDRESSES WORKERS HANDOFFS_A_SECOND SECRET, where every ticket contains SECRET.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

from control.cards import make_card, make_offer

from kvlink.control import CoordinatorClient, Session
from kvlink.control.values import SettleOrder
from kvlink.errors import CoordinatorError, CoordinatorUnavailable, UnknownRequest
from kvlink.runtime import log

PATIENCE_S = 60.0
"""Is the patience of each call: longer than every fault, so that a call that fails was refused for another reason."""
_READERS = 4
_RIVALS = 0.25
NONCE = 0x5EC2E7_5EC2E7


@dataclass
class Totals:
    """Counts the outcomes of the handoffs that ended since the last line."""

    done: int = 0
    lost: list[str] = field(default_factory=list)
    """Claims that failed after the offer was acknowledged."""
    refused: dict[str, int] = field(default_factory=dict)
    """Offers that were refused, by the name of the error."""
    doubled: int = 0
    """Tickets that a second reader got, too."""
    slowest_s: float = 0.0
    late: int = 0
    """Handoffs that took longer than a second."""
    rejoins: int = 0
    under_way: int = 0
    done_at: list[float] = field(default_factory=list)
    """When handoffs ended that began after the last line, by the clock that all processes of a host share."""


class Load:
    """Runs in one event loop until `close`."""

    def __init__(self, addresses: str, num_workers: int, rate: float, secret: str) -> None:
        self._addresses, self._num_workers, self._rate, self._secret = addresses, num_workers, rate, secret
        self.totals = Totals()
        self._asked_at = time.monotonic()
        self._under_way: set[asyncio.Task[None]] = set()
        self._sessions: list[Session] = []
        self._rejoins = 0

    async def start(self) -> None:
        self._readers = [CoordinatorClient(self._addresses, timeout_s=20.0) for _ in range(_READERS)]
        self._clients = [CoordinatorClient(self._addresses, timeout_s=20.0) for _ in range(self._num_workers)]
        for number, client in enumerate(self._clients):
            card = make_card(f"w{number}", process=number + 1)
            self._sessions.append(await Session.join(client, card, lambda slot, nonce: None, PATIENCE_S))
        self._pace = asyncio.create_task(self._begin_all())

    async def _begin_all(self) -> None:
        number, run = 0, random.randbytes(4).hex()
        while True:
            number += 1
            session = self._sessions[number % self._num_workers]
            task = asyncio.create_task(self._hand_off(session, f"{run}-{number}"))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            await asyncio.sleep(1 / self._rate)

    async def _hand_off(self, session: Session, request_id: str) -> None:
        began = time.monotonic()
        offer = make_offer(request_id, session.card.worker_id, session.card.epoch, ttl_s=2 * PATIENCE_S)
        offer = offer._replace(ticket=f"{self._secret} {request_id}".encode())
        reader, rival = random.sample(self._readers, 2)
        claiming = asyncio.create_task(reader.claim(request_id, timeout_s=PATIENCE_S))
        try:
            await session.offer(offer, timeout_s=PATIENCE_S)
        except CoordinatorError as error:
            refused, kind = self.totals.refused, type(error).__name__
            refused[kind] = refused.get(kind, 0) + 1
            claiming.cancel()
            session.forget(request_id)
            return
        try:
            assert await claiming == [offer.ticket]
        except (CoordinatorError, UnknownRequest, AssertionError) as error:
            self.totals.lost.append(f"{type(error).__name__}: {error}")
            return
        finally:
            session.forget(request_id)
        ended = time.monotonic()
        self.totals.done += 1
        self.totals.slowest_s = max(self.totals.slowest_s, ended - began)
        self.totals.late += ended - began > 1.0
        if began > self._asked_at:
            self.totals.done_at.append(ended)
        if random.random() < _RIVALS:
            await self._too_late(rival, session, request_id)

    async def _too_late(self, rival: CoordinatorClient, session: Session, request_id: str) -> None:
        try:
            await rival.claim(request_id, timeout_s=0.0)
            self.totals.doubled += 1
        except (UnknownRequest, CoordinatorUnavailable):
            pass
        with contextlib.suppress(CoordinatorError):
            await rival.settle(SettleOrder(session.card.worker_id, session.card.epoch, 1, NONCE))

    def report(self) -> str:
        totals, self.totals = self.totals, Totals()
        rejoins = sum(session.num_rejoins for session in self._sessions)
        totals.rejoins, self._rejoins = rejoins - self._rejoins, rejoins
        totals.under_way = len(self._under_way)
        self._asked_at = time.monotonic()
        return json.dumps(asdict(totals))

    async def close(self) -> None:
        """When every handoff under way has ended."""
        self._pace.cancel()
        await asyncio.gather(*self._under_way)
        for session in self._sessions:
            await session.close()
        for client in (*self._clients, *self._readers):
            await client.close()


async def _main(addresses: str, num_workers: str, rate: str, secret: str) -> None:
    log.setup("debug")
    load = Load(addresses, int(num_workers), float(rate), secret)
    await load.start()
    print(load.report(), flush=True)
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        while line := sys.stdin.readline():
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=read, daemon=True).start()
    while await lines.get():
        print(load.report(), flush=True)
    await load.close()
    print(load.report(), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
