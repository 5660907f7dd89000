# SPDX-License-Identifier: Apache-2.0
"""Runs the prefill side of a benchmark: a real Worker whose blocks hold known bytes.

`python -m kvlink.benchmarks.harness.owner FD` runs one in its own process, which answers JSON messages on the
descriptor until its parent is gone.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool, KVLayout, Worker
from kvlink._bench import BaselineSource, baseline_memfd
from kvlink.errors import ConfigError, KVLinkError
from kvlink.layout import Context, Geometry, Order, Pipeline, dense, rank_of
from kvlink.layout.groups import checked_groups, region_bytes

from .contents import Contents, filled

Answer = dict[str, Any]


OWN, ANONYMOUS, HUGE = MEMORIES = ("own", "anonymous", "huge")
"""Kinds of memory: what kvlink allocates; memory of others in pages of 4 KiB, or in huge ones on request."""


def memory_for(transport: str, wanted: str = "") -> str:
    """Returns the kind of memory that benchmarks use for a transport: cma is for memory that kvlink did not allocate.

    Raises ConfigError for a kind that is not known, or that the transport cannot use.
    """
    name = transport.removeprefix("fault+")
    kind = wanted or (HUGE if name == "cma" else OWN)
    if kind not in MEMORIES:
        raise ConfigError(f"memory {kind!r} is not known; write {', '.join(MEMORIES)}")
    if kind != OWN and name in ("shm", "tcp"):
        raise ConfigError(
            f"the benchmark of {name} and of its limit needs memory that kvlink allocated; omit --memory"
        )
    return kind


def flat(block_bytes: int, num_blocks: int, planes: int = 1) -> Geometry:
    """Returns a cache of blocks without a structure, of one token each."""
    return Geometry(
        num_layers=planes, total_heads=1, row_bytes=block_bytes, num_blocks=num_blocks, block_tokens=1,
        planes_per_layer=1, dtype="uint8", model="bench",
    )  # fmt: skip


def stacked(geometries: Sequence[Geometry], order: Order = Order.NHD) -> list[KVLayout]:
    """Returns the layouts of cache groups, one after the other in one region; for one geometry that of `dense`."""
    found, end = [], 0
    for geometry in geometries:
        layout = dense(geometry, order)
        planes = tuple(replace(plane, offset=plane.offset + end) for plane in layout.planes)
        found.append(replace(layout, planes=planes))
        end = -(-found[-1].region_bytes[0] // mmap.PAGESIZE) * mmap.PAGESIZE
    return found


def pool_of(layout: KVLayout | Sequence[KVLayout], memory: str = OWN) -> BlockPool:
    """Returns a pool of that kind of memory."""
    if memory == OWN:
        return BlockPool.allocate(layout)
    sizes = region_bytes(checked_groups(layout))
    return BlockPool.from_tensors([_mapped(size, memory == HUGE) for size in sizes], layout)


def _mapped(num_bytes: int, huge: bool) -> npt.NDArray[np.uint8]:
    memory = mmap.mmap(-1, num_bytes + (mmap.PAGESIZE if num_bytes == 0 else 0))
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _filled(layouts: Sequence[KVLayout], seed: int, memory: str, gpu: int | None) -> BlockPool:
    if gpu is not None:
        return filled(layouts[0], gpu, seed)
    pool = pool_of(layouts, memory)
    for number, layout in enumerate(layouts):
        Contents(layout, seed + number).fill(pool)
    return pool


def _geometry(pipeline: dict[str, Any], context: dict[str, Any], **other: Any) -> Geometry:
    """Returns the geometry whose fields crossed as JSON."""
    stage = Pipeline(pipeline["rank"], tuple(pipeline["bounds"]))
    return Geometry(**other, pipeline=stage, context=Context(**context))


class Owner:
    """Fills a pool from a seed, and offers blocks on request."""

    def __init__(
        self,
        geometries: Sequence[dict[str, Any]],
        seed: int,
        transport: str,
        coordinator: str,
        memory: str = OWN,
        order: str = Order.NHD.name,
        gpu: int | None = None,
        number: int = 0,
    ) -> None:
        layouts = stacked([_geometry(**geometry) for geometry in geometries], Order[order])
        self._pool = _filled(layouts, seed, memory, gpu)
        name = f"bench-owner-{number}-{rank_of(layouts[0])[0]}"
        self._worker = Worker(self._pool, name, transports=transport, coordinator=coordinator)
        self._source: BaselineSource | None = None
        self._held: dict[str, tuple[Sequence[int], int, int]] = {}

    def offer(
        self, requests: dict[str, Sequence[int]], num_tokens: int | None, publish: bool, readers: int = 1
    ) -> Answer:
        """Offers each request's blocks. Returns tickets as text and the time of each `offer` call."""
        self._worker.events()  # processes leases that ended
        tickets, took_us = [], []
        for request_id, ids in requests.items():
            start = time.perf_counter_ns()
            ticket = self._worker.offer(
                request_id, ids, num_tokens=num_tokens, readers=readers, publish=publish
            )
            took_us.append((time.perf_counter_ns() - start) / 1000)
            tickets.append(ticket.to_text())
        return {"tickets": tickets, "offer_us": took_us}

    def hold(self, request_id: str, ids: Sequence[int], num_tokens: int, readers: int = 1) -> Answer:
        """Prepares a request for `offer_held`."""
        self._held[request_id] = (ids, num_tokens, readers)
        return {}

    def offer_held(self, request_id: str) -> Answer:
        """Publishes a prepared offer, so that only its name has to be sent when it is due."""
        ids, num_tokens, readers = self._held.pop(request_id)
        return self.offer({request_id: ids}, num_tokens, True, readers)

    def release(self, request_id: str) -> Answer:
        """Ends an offer that no reader read."""
        self._worker.abort(request_id)
        return {}

    def memory(self) -> Answer:
        """Returns where the pool is, for bare reads of it."""
        region = self._pool.regions[0]
        return {"address": region.address, "memfd": baseline_memfd(region.memory) if region.memory else -1}

    def listen(self) -> Answer:
        """Starts sending bare answers from the pool."""
        region = self._pool.regions[0]
        assert region.memory is not None
        self._source = self._source or BaselineSource(region.memory)
        return {"port": self._source.port}

    def leases(self) -> Answer:
        """Returns the counts of this worker's offers."""
        self._worker.events()
        return self._worker.lease_counts()._asdict()

    def close(self) -> None:
        """Closes the worker. Idempotent."""
        if self._source is not None:
            self._source.close()
        self._worker.close()


def serve(pipe: Connection) -> None:
    """Serves messages: the first one makes the Owner, the others call it."""
    owner: Owner | None = None
    try:
        while True:
            message = json.loads(pipe.recv_bytes())
            try:
                if owner is None:
                    owner, reply = Owner(**message), {}
                else:
                    reply = getattr(owner, message["do"])(**message["arguments"])
            except Exception as error:
                if not isinstance(error, KVLinkError):
                    traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            pipe.send_bytes(json.dumps(reply).encode())
    except (EOFError, OSError):
        if owner is not None:
            owner.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
