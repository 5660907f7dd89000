# SPDX-License-Identifier: Apache-2.0
"""A reader of a soak: pulls what it is told to over one transport each, ends pulls in all ways, compares every byte."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from soak.contents import POISON, differences, layout, of_others, words_of
from soak.ledger import Outcome
from soak.messages import AtRest, Ending, Finish, Late, Pulled, PullThis, Release
from soak.owner import MAX_BLOCKS, tokens
from soak.places import Places

from kvlink import BlockPool, Pull, Worker, WorkerConfig
from kvlink.errors import KVLinkError, StaleBlocks

_PLACES = 12
_THREADS = 4
_REST_S = 10.0
_ENDED = (TimeoutError, asyncio.TimeoutError, asyncio.CancelledError, concurrent.futures.CancelledError)


class _Destination:
    """One worker, over one transport."""

    def __init__(self, name: str, transport: str, fault: str) -> None:
        pool = BlockPool.allocate(layout(_PLACES * MAX_BLOCKS), huge_pages=False)
        self.words = words_of(pool)
        self.places = Places(self.words, MAX_BLOCKS)
        self.pulled: dict[tuple[int, int], None] = {}
        config = WorkerConfig(transports=f"fault+{transport}" if fault else transport, fault=fault)
        self.worker = Worker(pool, f"{name}-{transport}", config=config)


class Reader:
    """Pulls on several threads and on an event loop."""

    def __init__(self, pipe: Connection, name: str, transports: Sequence[str], fault: str) -> None:
        self._pipe, self._sending = pipe, threading.Lock()
        self._destinations = {transport: _Destination(name, transport, fault) for transport in transports}
        self._orders: queue.SimpleQueue[PullThis | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        looping = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(_THREADS)]
        for thread in (looping, *self._threads):
            thread.start()

    def run(self) -> None:
        """Until it is told to finish."""
        while not isinstance(message := self._pipe.recv(), Finish):
            if isinstance(message, Release):
                self._destinations[message.transport].worker.release(message.offered.ticket)
            else:
                self._orders.put(message)
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join()
        held = self._held_at_rest()
        for transport, destination in self._destinations.items():
            destination.places.look_at_all()
            self._tell_late(transport, destination)
            destination.worker.close()
        self._send(AtRest(held))

    def _send(self, message: object) -> None:
        with self._sending:
            self._pipe.send(message)

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            destination = self._destinations[order.transport]
            while (first := destination.places.take()) is None:
                time.sleep(0.001)
            outcome = self._outcome(destination, order, first)
            destination.places.release(first)
            self._send(Pulled(order.number, outcome))
            self._tell_late(order.transport, destination)

    def _tell_late(self, transport: str, destination: _Destination) -> None:
        if late := destination.places.take_late():
            self._send(Late(transport, late))

    def _outcome(self, destination: _Destination, order: PullThis, first: int) -> Outcome:
        offered, pull = order.offered, None
        destination.pulled[offered.owner, offered.request] = None
        try:
            pull = destination.worker.pull(
                offered.ticket,
                range(first, first + offered.num_blocks),
                tokens=tokens(order.first, order.num_blocks),
                settle=order.settle,
                timeout_s=order.timeout_s,
            )
            self._wait(pull, order)
        except (KVLinkError, *_ENDED) as error:
            landed = destination.words[first : first + MAX_BLOCKS]
            landed = landed[landed != POISON]
            others = of_others(landed, offered.owner, offered.request)
            # One tcp connection carries several pulls: what follows a refused response is moved on to where it belongs.
            unknown = {whose: words for whose, words in others.items() if whose not in destination.pulled}
            return replace(
                _failed(error),
                restarted=_began_again(pull),
                transport=order.transport,
                words_of_others=unknown,
            )
        begin, end = first + order.first, first + order.first + order.num_blocks
        found = differences(destination.words[begin:end], offered.owner, offered.request, order.first)
        beside = (destination.words[first:begin], destination.words[end : first + MAX_BLOCKS])
        found["wrong"] += sum(int((words != POISON).sum()) for words in beside)
        return Outcome(settled=pull.stats.settled, differences=found, restarted=_began_again(pull))

    def _wait(self, pull: Pull, order: PullThis) -> None:
        match order.ending:
            case Ending.NONE:
                pull.wait()
            case Ending.CANCEL:
                if not pull.wait(order.ends_after_s):
                    pull.cancel()
                    pull.wait()
            case _:
                job = _await(pull, order.ending, order.ends_after_s)
                asyncio.run_coroutine_threadsafe(job, self._loop).result()

    def _held_at_rest(self) -> dict[str, int]:
        until = time.monotonic() + _REST_S
        while (held := self._pending()) and time.monotonic() < until:
            time.sleep(0.01)
        return {"transfers": held}

    def _pending(self) -> int:
        workers = [destination.worker for destination in self._destinations.values()]
        return sum(peer.connection.pending for worker in workers for peer in worker.peers())


async def _await(pull: Pull, ending: Ending, after_s: float) -> None:
    match ending:
        case Ending.WAIT_FOR:
            await asyncio.wait_for(pull, after_s)
        case Ending.TASK:
            task = asyncio.ensure_future(pull)
            await asyncio.wait([task], timeout=after_s)
            task.cancel()
            await task
        case Ending.BLOCK:
            async with pull:
                await asyncio.sleep(after_s)
                raise TimeoutError
        case _:
            await pull


def _began_again(pull: Pull | None) -> bool:
    return pull is not None and any(path.restarted for path in pull.explain())


def _failed(error: BaseException) -> Outcome:
    if isinstance(error, _ENDED):
        return Outcome("Cancelled", message=str(error))
    why = error.why.name.lower() if isinstance(error, StaleBlocks) else ""
    return Outcome(type(error).__name__, why, str(error))
