# SPDX-License-Identifier: Apache-2.0
"""Runs the contenders without another environment: kvlink, and the bare copies and sockets on its memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, count
from statistics import median
from typing import Any

import numpy as np

from kvlink import PreparedPull, Ticket, Worker, __version__

from ..harness.baselines import Baseline, baselines_of, thread_counts
from ..harness.block_draws import Order
from ..harness.contents import Contents
from ..harness.owner import OWN, memory_for, pool_of, stacked
from ..harness.pieces import End, Pieces, pieces_of
from ..harness.processes import BenchError, owner_process
from .contender import BARE, KVLINK, ContenderInfo, Draw, Moved, Shape

_CPU_TAIL_S = 0.002  # the owner may still process a settle
_BARE_READS = 500


class Kvlink:
    """kvlink, timed from the first `pull` of a transfer until the last `wait` returns, so plan, read, validate and
    settle. Tickets are there before.

    cma is for memory that kvlink did not allocate, so it uses the peers' kind of memory; shm and tcp use kvlink's own.
    """

    def __init__(
        self,
        transport: str,
        path: str,
        shape: Shape,
        seed: int,
        memory: str = "",
        order: Order | None = None,
    ) -> None:
        self.order, memory = order or Order(), memory or memory_for(transport)
        layouts = stacked(shape.geometries)
        self._threads = thread_counts(shape.num_bytes if shape.pieces > 1 else 0)
        settings = (
            f"its defaults, memory that {'it' if memory == OWN else 'another library'} allocated ({memory})"
        )
        self.info = ContenderInfo(KVLINK, transport, path, __version__, settings)
        here = transport.removeprefix("fault+") == "loopback"
        with ExitStack() as stack:
            self._owner = stack.enter_context(
                owner_process(shape.geometries, seed, transport, here=here, memory=memory)
            )
            self._worker = stack.enter_context(
                Worker(pool_of(layouts, memory), "bench-reader", transports=transport)
            )
            self._stack = stack.pop_all()
        self._contents = [Contents(layout, seed + number) for number, layout in enumerate(layouts)]
        self._requests = map("peers-{}".format, count())
        self._draws: Sequence[Draw] = ()
        self._pulls: list[list[tuple[Ticket, Any]]] = []
        self._prepared: PreparedPull | None = None
        self.ran_inline = True
        """Whether the last pull ran on the calling thread. Then the bare ways do so too."""

    def prepare(self, draws: Sequence[Draw]) -> None:
        """Offers the blocks and reads the tickets. Prepares the pull if all but the first are the same."""
        self.poison(draws)
        self._pulls = [self._offered(draw) for draw in draws]
        repeats = len(draws) > 2 and all(draw is draws[1] for draw in draws[1:])
        self._prepared = self._worker.prepare(*self._pulls[1][0]) if repeats else None

    def move(self) -> Moved:
        """Pulls them."""
        self._pull(0)
        cpu = self.cpu_ns()
        us = [self._pull(number) for number in range(1, len(self._draws))]
        own = time.process_time_ns()
        time.sleep(_CPU_TAIL_S)
        return Moved(us, own + self._owner.cpu_ns() - cpu)

    def wrong(self) -> int:
        """Returns how many transfers did not bring every byte."""
        return sum(not self._landed(draw) for draw in self._draws)

    def close(self) -> None:
        """Ends the owner process. Idempotent."""
        self._stack.close()

    def poison(self, draws: Sequence[Draw]) -> None:
        """Overwrites the destination, here or by a bare copy."""
        self._draws = draws
        for request in chain.from_iterable(draw.here for draw in draws):
            for contents, ids in zip(self._contents, request, strict=True):
                contents.poison(self._worker.pool, ids)

    def cpu_ns(self) -> int:
        """Returns the CPU time of both processes so far."""
        return time.process_time_ns() + self._owner.cpu_ns()

    def bare(self) -> Iterator[Bare]:
        """Yields the bare ways on this memory."""
        for baseline in baselines_of(self.info.mode, self._owner, self._threads):
            yield Bare(self, baseline)

    def pieces(self, draw: Draw, base: int) -> Pieces:
        """Returns what a bare way copies for a transfer, from the owner's memory at `base`."""
        to = self._worker.pool.regions[0].address
        layouts = self._worker.pool.groups
        return np.concatenate(
            [
                pieces_of(
                    End(layout, layout.layers, theirs, base), End(layout, layout.layers, ours, to), (0, 1), entries
                )
                for there, here in zip(draw.there, draw.here, strict=True)
                for layout, theirs, ours, entries in zip(layouts, there, here, draw.entries, strict=True)
            ]
        )  # fmt: skip

    def _offered(self, draw: Draw) -> list[tuple[Ticket, Any]]:
        """Offers the requests of a transfer. Returns what to pull, and into which blocks."""
        requests = {next(self._requests): _given([ids.tolist() for ids in each]) for each in draw.there}
        answer = self._owner.call("offer", requests=requests, num_tokens=_given(draw.entries), publish=False)
        tickets = map(Ticket.from_text, answer["tickets"])
        return [(ticket, _given(into)) for ticket, into in zip(tickets, draw.here, strict=True)]

    def _landed(self, draw: Draw) -> bool:
        return all(
            contents.equal(self._worker.pool, ours, theirs, entries)
            for there, here in zip(draw.there, draw.here, strict=True)
            for contents, theirs, ours, entries in zip(self._contents, there, here, draw.entries, strict=True)
        )

    def _pull(self, number: int) -> float:
        requests, prepared = self._pulls[number], self._prepared if number else None
        start = time.perf_counter_ns()
        if prepared is None:
            pulls = [self._worker.pull(ticket, into=into) for ticket, into in requests]
        else:
            pulls = [prepared.pull(requests[0][0])]
        for pull in pulls:
            pull.wait()
        took_us = (time.perf_counter_ns() - start) / 1000
        for pull in pulls:
            if not pull.stats.settled:
                raise BenchError(f"{pull!r} returned before it was settled")
        self.ran_inline = pull.stats.ran_inline
        self._last = pull
        return took_us

    @property
    def lanes(self) -> int:
        """Returns how many lanes the last pull had."""
        return self._last.explain()[0].lanes

    def bare_read_us(self) -> float:
        """Returns the time of the transport to read one block without plan, lease and Python, like ib_read_lat."""
        (peer,) = self._worker.peers()
        layout, to = self._worker.pool.layout, self._worker.pool.regions[0].address
        offsets = (index % layout.num_blocks * layout.block_bytes for index in range(_BARE_READS))
        return median(peer.connection.time_read(0, at, to, layout.block_bytes) for at in offsets) / 1000


class Bare:
    """A bare way. Only its calls are timed; lists are made before. Close it before its Kvlink."""

    def __init__(self, memory: Kvlink, baseline: Baseline) -> None:
        self._memory, self._baseline = memory, baseline
        self.order = memory.order
        self._thread = ThreadPoolExecutor(1)
        self.info = ContenderInfo(BARE, baseline.name, memory.info.path, "", "calls alone, lists made before")
        self._lists: list[Pieces] = []

    def prepare(self, draws: Sequence[Draw]) -> None:
        """Poisons the destination, and makes the lists."""
        self._memory.poison(draws)
        self._lists = [self._memory.pieces(draw, self._baseline.memory.base) for draw in draws]

    def move(self) -> Moved:
        """Runs the calls, on a thread of its own where kvlink has one."""
        first, *others = self._lists
        self._run(first)
        cpu = self._memory.cpu_ns()
        us = [self._run(pieces) for pieces in others]
        return Moved(us, self._memory.cpu_ns() - cpu)

    def wrong(self) -> int:
        """Returns how many transfers did not bring every byte."""
        return self._memory.wrong()

    def close(self) -> None:
        """Does nothing: its Kvlink owns the memory."""
        self._thread.shutdown()

    def _run(self, pieces: Pieces) -> float:
        if self._memory.ran_inline:
            return self._baseline.copy(pieces) / 1000
        return self._thread.submit(self._baseline.copy, pieces).result() / 1000


def _given(of_groups: Sequence[Any]) -> Any:
    """Returns an argument of `offer` or `pull`: one of each cache group, or of the only one."""
    return of_groups if len(of_groups) > 1 else of_groups[0]
