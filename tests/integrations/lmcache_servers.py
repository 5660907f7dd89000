# SPDX-License-Identifier: Apache-2.0
"""The parts of two of LMCache's servers that need no LMCache: memories, workers, and a table of objects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from waiting import eventually

from kvlink import Worker, WorkerConfig
from kvlink.integrations.lmcache.grants import Grants, Objects
from kvlink.integrations.lmcache.pages import Name, Object, Pages, Wanted
from kvlink.integrations.lmcache.places import Places
from kvlink.integrations.lmcache.reads import Exchange, Peer, Reads

PAGE, NUM_PAGES = 512, 64


def name(number: int) -> Name:
    return f"{number:04x}", "model", 0, 0, ""


class Table:
    """Stands for LMCache's L1Manager: the place of each object, and whether it is under a read lock.

    between: is called after an object was looked up, as another thread may free it then.
    """

    def __init__(self) -> None:
        self.places: dict[Name, Object] = {}
        self.unlocked: set[Name] = set()
        self.between: Callable[[], object] = lambda: None

    def lookup(self) -> Callable[[Wanted], str]:
        return self.problem

    def problem(self, wanted: Wanted) -> str:
        at = wanted[:2]
        if wanted.name is None:
            found = at in self.places.values()
        else:
            found = self.places.get(wanted.name) == at and wanted.name not in self.unlocked
        self.between()
        return "" if found else "it is not there"


class Server:
    """The memory of one of LMCache's servers, and its worker."""

    def __init__(
        self,
        name: str,
        page_bytes: int = PAGE,
        objects: Objects | None = None,
        transports: str = "cma,tcp",
    ) -> None:
        self.memory = np.random.default_rng(len(name)).integers(0, 256, PAGE * NUM_PAGES, np.uint8)
        self.pages = Pages(page_bytes, self.memory.nbytes)
        config = WorkerConfig(transports=transports)
        self.worker = Worker(self.pages.pool(self.memory.ctypes.data), name, config=config)
        self.places = Places(self.pages)
        self.grants = Grants(self.worker, self.pages, self.places, objects)
        self.reads: list[Reads] = []

    def reads_from(self, exchange: Exchange, timeout_s: float = 60) -> Reads:
        peer = Peer("127.0.0.1:1", "127.0.0.1:2", exchange)
        self.reads.append(Reads(self.worker, self.pages, self.places, peer, timeout_s))
        return self.reads[-1]

    def bytes_of(self, each: Object) -> bytes:
        return self.memory[each[0] : sum(each)].tobytes()

    def close(self) -> None:
        for reads in self.reads:
            reads.close()
        self.worker.close()


def asking(owner: Server) -> Exchange:
    return lambda message, timeout_s: owner.grants.answer(message)


def result(
    reads: Reads, theirs: list[Wanted], ours: list[Object], late: Callable[[], object] = lambda: None
) -> list[bool]:
    """Reads, and returns the result. `late` is called after the read has ended and before its result is asked for."""
    task = reads.begin(theirs, ours)
    eventually(lambda: all(part.has_ended() for part in reads._tasks[task].parts))
    late()
    found = reads.query(task)
    assert reads.query(task) == []
    assert found is not None
    return found
