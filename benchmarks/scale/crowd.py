# SPDX-License-Identifier: Apache-2.0
"""Runs many workers and watchers in a few processes: real clients and sessions, each over its own connection."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from kvlink.control import Claim, CoordinatorClient, Offer, Security, Session
from kvlink.control.overview import LinkReport, WorkerReport
from kvlink.control.security import Trust
from kvlink.control.security.reloading_channel import Options
from kvlink.layout import dense
from kvlink.types import Joined, TransportCard, WorkerCard

from ..harness.processes import BenchError
from ..measurements.control import card, in_processes, one_from_each
from ..workloads.models import MODELS

T = TypeVar("T")

_TICKET_BYTES = 1_100  # the ticket of 4,096 tokens in blocks of 16
_TTL_S = 3_600.0
_AT_ONCE = 32
"""The number of calls that one process has in flight."""
_STREAMS = 8
_WITHIN_S = 60.0
_EVERY_S = 0.01
_REPORT = WorkerReport(
    num_links=8, links=tuple(LinkReport(f"worker-0-{n}", "verbs", True, 0, 10**6, 10**12) for n in range(8))
)
_WAYS = tuple(
    TransportCard(name, bytes(64), (bytes(64),), (bytes(64), bytes(64)))
    for name in ("shm", "cma", "tcp", "verbs")
)
_CARD = replace(card(0), layouts=(dense(MODELS["llama-3.1-8b"].geometry(1, 4_096)),), transports=_WAYS)


class Crowd:
    """The requests that `Crowds` sends to one of its processes. It belongs to the event loop on which it is made."""

    def __init__(self, address: str, index: int) -> None:
        self._address = address
        self._index = index
        self._security = _Apart.from_env()
        self._clients: list[CoordinatorClient] = []
        self._sessions: list[tuple[CoordinatorClient, Session]] = []
        self._missing: list[tuple[Session, int]] = []
        self._offers: list[Offer] = []
        self._watching: list[asyncio.Task[None]] = []
        self._seen: defaultdict[int, list[float]] = defaultdict(list)
        self._beats: Counter[int] = Counter()

    async def join(self, count: int) -> None:
        """Joins `count` workers, which send heartbeats from now on."""
        self._sessions += await _few_at_once(self._join(number) for number in range(count))

    async def offer(self, each: int) -> None:
        """Lets every worker offer `each` requests, and keep them offered."""
        jobs = []
        for _, session in self._sessions:
            offers = [_offer(session.card, number) for number in range(each)]
            jobs += [session.offer(offer, _WITHIN_S) for offer in offers]
            self._offers += offers
        await _few_at_once(jobs)

    async def claim(self) -> bool:
        """Claims everything that was offered here. Returns whether each claim returned its own ticket."""
        client = self._client()
        await client.status()  # finds a coordinator that serves
        async with client.handoffs() as handoffs:
            claims = [handoffs.claim(Claim(offer.request_id, _WITHIN_S)) for offer in self._offers]
            brought = await asyncio.gather(*claims, return_exceptions=True)
        return brought == [[offer.ticket] for offer in self._offers]

    async def hand_off(self, count: int, batched: bool = False) -> bool:
        """Makes `count` handoffs from each worker here to the next. Returns whether each claim got its own ticket."""
        pairs = list(zip(self._sessions, [*self._sessions[1:], self._sessions[0]], strict=True))
        if batched:
            pairs = pairs[:_STREAMS]
        each = -(-count // len(pairs))
        jobs = [_hand_off(*pair, range(each), batched) for pair in pairs]
        return all(await _few_at_once(jobs))

    async def hand_off_in_streams(self, count: int) -> bool:
        """Makes handoffs like `hand_off`, in a few streams."""
        return await self.hand_off(count, batched=True)

    async def beats(self) -> tuple[int, int]:
        """Returns how many heartbeats were sent so far, and how often workers had to join again."""
        return self._beats.total(), sum(session.num_rejoins for _, session in self._sessions)

    async def all_beaten(self, times: int) -> bool:
        """Waits until every worker has sent `times` heartbeats. Returns whether it has."""

        def holds() -> bool:
            return all(self._beats[number] >= times for number in range(len(self._sessions)))

        await _until(holds)
        return holds()

    async def brace(self, address: str = "") -> int:
        """Prepares for the loss of the coordinator, or the one at an address. Returns how many workers must rejoin."""
        self._missing = [
            (session, session.num_rejoins)
            for client, session in self._sessions
            if address in ("", client.next_address)
        ]
        return len(self._missing)

    async def rejoined(self) -> list[float]:
        """Returns when each of them was joined again, with its live offers."""
        at: list[float] = []

        def note() -> bool:
            still = [(session, before) for session, before in self._missing if session.num_rejoins == before]
            at.extend([time.monotonic()] * (len(self._missing) - len(still)))
            self._missing = still
            return not still

        await _until(note)
        return at

    async def watch(self, count: int) -> None:
        """Starts `count` watchers of all workers."""
        self._watching += [asyncio.create_task(self._watch(self._client())) for _ in range(count)]

    async def seen(self, mark: int) -> list[float]:
        """Returns when each watcher saw the card with this mark."""
        await _until(lambda: len(self._seen[mark]) >= len(self._watching))
        return self._seen.pop(mark)

    async def _join(self, number: int) -> tuple[CoordinatorClient, Session]:
        worker, client = make_card(f"worker-{self._index}-{number}"), self._client()
        return client, await Session.join(client, worker, _ignore, _WITHIN_S, partial(self._report, number))

    async def _watch(self, client: CoordinatorClient) -> None:
        async for change in client.watch():
            if change.what is Joined.UP:
                self._seen[change.card.region_bytes[0]].append(time.monotonic())

    def _client(self) -> CoordinatorClient:
        self._clients.append(CoordinatorClient(self._address, _WITHIN_S, self._security))
        return self._clients[-1]

    def _report(self, number: int) -> WorkerReport:
        self._beats[number] += 1
        return _REPORT


def make_card(worker_id: str, mark: int = 0) -> WorkerCard:
    """Returns a card as large as that of a worker with a common model and four transports. `mark` sets its version."""
    return replace(_CARD, worker_id=worker_id, region_bytes=(mark,))


class _Apart(Security):
    """Lets every client connect separately, like clients in separate processes."""

    def coordinators(self) -> Trust:
        trust = super().coordinators()
        return _OwnConnection(trust.security, trust.wanted, trust.tokens, trust.host_tokens)


class _OwnConnection(Trust):
    def dial(self, address: str, options: Options) -> Any:
        return super().dial(address, [*options, ("grpc.use_local_subchannel_pool", 1)])


def _offer(worker: WorkerCard, number: int) -> Offer:
    request_id = f"cmpl-{worker.worker_id}-{number:016d}"
    ticket = request_id.encode().ljust(_TICKET_BYTES)
    return Offer(request_id, worker.worker_id, worker.epoch, _TTL_S, 0, 1, 1, ticket)


async def _hand_off(
    owner: tuple[CoordinatorClient, Session],
    reader: tuple[CoordinatorClient, Session],
    numbers: range,
    batched: bool,
) -> bool:
    offers = [_offer(owner[1].card, number)._replace(ttl_s=_WITHIN_S) for number in numbers]
    offers = [offer._replace(request_id=f"now-{batched}-{offer.request_id}") for offer in offers]
    if not batched:
        brought = []
        for offer in offers:
            await owner[0].offer(offer)
            brought.append(await reader[0].claim(offer.request_id, _WITHIN_S))
        return brought == [[offer.ticket] for offer in offers]
    async with owner[0].handoffs() as out, reader[0].handoffs() as into:
        sent = [out.offer(offer) for offer in offers]
        brought = await asyncio.gather(*(into.claim(Claim(offer.request_id, _WITHIN_S)) for offer in offers))
        await asyncio.gather(*sent)
    return brought == [[offer.ticket] for offer in offers]


def _ignore(slot: int, nonce: int) -> None:
    """Ignores a settle: there are none."""


async def _few_at_once(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs a few jobs at a time. Returns their results in order."""
    left = iter(enumerate(jobs))
    done: dict[int, T] = {}

    async def lane() -> None:
        for number, job in left:
            done[number] = await job

    await asyncio.gather(*(lane() for _ in range(_AT_ONCE)))
    return [done[number] for number in sorted(done)]


async def _until(holds: Callable[[], bool]) -> None:
    """Waits until it holds, or too long, which the caller then notices."""
    deadline = time.monotonic() + _WITHIN_S
    while not holds() and time.monotonic() < deadline:
        await asyncio.sleep(_EVERY_S)


class Crowds:
    """Calls methods of every Crowd. Raises BenchError if one failed."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def each(self, do: str, *arguments: object) -> list[Any]:
        """Sends the same arguments to all. Returns each one's answer."""
        return self._ask([(do, arguments)] * len(self._pipes))

    def shared_out(self, do: str, count: int) -> list[Any]:
        """Sends each one its part of `count`."""
        parts = len(self._pipes)
        return self._ask([(do, ((count + index) // parts,)) for index in range(parts)])

    def _ask(self, calls: list[tuple[str, tuple[object, ...]]]) -> list[Any]:
        try:
            for pipe, call in zip(self._pipes, calls, strict=True):
                pipe.send(call)
            answers = one_from_each(self._pipes)
        except (EOFError, OSError):
            raise BenchError("a load process ended; see its messages above") from None
        for _, error in answers:
            if error:
                raise BenchError(f"a load process could not {calls[0][0]}: {error}")
        return [answer for answer, _ in answers]


@contextmanager
def crowds(address: str, processes: int) -> Iterator[Crowds]:
    """Runs `processes` load processes."""
    with in_processes(_run, processes, address) as pipes:
        yield Crowds(pipes)


def _run(pipe: Connection, index: int, address: str) -> None:
    logging.getLogger("kvlink").setLevel(
        logging.CRITICAL
    )  # otherwise a thousand workers log that they lost the coordinator

    async def serve() -> None:
        crowd = Crowd(address, index)
        while (call := await asyncio.to_thread(pipe.recv)) is not None:
            do, arguments = call
            pipe.send(await _answer(crowd, do, arguments))
        os._exit(0)  # a thousand farewells would take longer than the measurement

    asyncio.run(serve())


async def _answer(crowd: Crowd, do: str, arguments: tuple[object, ...]) -> tuple[Any, str]:
    try:
        return await getattr(crowd, do)(*arguments), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
