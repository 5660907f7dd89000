# SPDX-License-Identifier: Apache-2.0
"""The hand-off of a whole request between two processes, through a coordinator, phase by phase.

offer: the prefill worker's call. claim: what the decode worker's call, which knows only the request id, takes
besides the transfer. plan, read, validate, settle: as the pull counts them. whole: offer, then from
the decode worker's call until it has the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np

from kvlink import BlockPool, Worker
from kvlink.errors import ConfigError
from kvlink.layout import dense

from .contents import Contents, Ids
from .draws import Order
from .models import BLOCK_TOKENS, geometry_of
from .processes import BenchError, OwnerSide, coordinator_process, owner_process

Row = dict[str, Any]

PHASES = ("offer", "claim", "plan", "read", "validate", "settle", "whole")

_POOL_BYTES = 2 << 30  # of each of the two pools, at most
_POOL_REQUESTS = 4
_RUN_BYTES = 8 << 30
_LEAST_ITERS, _MOST_ITERS = 10, 200
_VERIFY_EVERY = 4  # besides the first and the last
_SEED = 20_250_102


def rows(
    model: str, tokens: int | Sequence[int], transport: str, tp: int = 1, iters: int | None = None
) -> Iterator[Row]:
    """One row a phase. `tokens`: of every request, or of one after the other, those without room left out.

    `iters` None: what fits the size. Raises ConfigError, BenchError, TransferError.
    """
    lengths = [tokens] if isinstance(tokens, int) else [count for count in tokens if count]
    if not lengths:
        raise ConfigError("none of these requests has a prompt")
    block_bytes = dense(geometry_of(model, tp, 1)).block_bytes
    most = _POOL_BYTES // block_bytes
    fitting = [count for count in lengths if _blocks(count) <= most]
    if not fitting:
        raise ConfigError(
            f"{min(lengths)} tokens of {model} at TP {tp} are {_blocks(min(lengths)) * block_bytes / 2**30:.1f} GiB, "
            f"and a pool of this benchmark has at most {_POOL_BYTES >> 30} GiB; ask for fewer tokens or more ranks"
        )
    largest = _blocks(max(fitting))
    geometry = geometry_of(model, tp, largest * min(most // largest, _POOL_REQUESTS))
    mean_bytes = sum(map(_blocks, fitting)) * block_bytes // len(fitting)
    iters = iters or max(_LEAST_ITERS, min(_RUN_BYTES // mean_bytes, _MOST_ITERS))
    with (
        coordinator_process() as coordinator,
        owner_process(geometry, _SEED, transport, coordinator, here=transport.endswith("loopback")) as owner,
        Worker(
            BlockPool.allocate(dense(geometry)), "bench-reader", coordinator=coordinator, transports=transport
        ) as worker,
    ):
        bench = _Bench(owner, worker, fitting)
        bench.run(2)  # connects and warms up
        bench.forget()
        bench.run(iters)
        left_out = {} if isinstance(tokens, int) else {"left_out": len(tokens) - len(fitting)}
        yield from bench.rows({"model": model, "tp": tp, "transport": transport} | left_out)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class _Bench:
    def __init__(self, owner: OwnerSide, worker: Worker, lengths: Sequence[int]) -> None:
        self._owner, self._worker, self._lengths = owner, worker, lengths
        self._contents = Contents(worker.pool.layout, _SEED)
        self._rng = np.random.default_rng(_SEED)
        self._next = 0
        self.forget()

    def forget(self) -> None:
        """Drops what was measured so far."""
        self._us: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self._tokens: list[int] = []
        self._bytes: list[int] = []
        self._ops: list[int] = []
        self._verified = self._wrong = 0

    def run(self, iters: int) -> None:
        """Hands over fresh requests, one after the other."""
        for number, tokens in enumerate(islice(cycle(self._lengths), iters)):
            owner_ids, ids = self._draw(tokens), self._draw(tokens)
            check = number % _VERIFY_EVERY == 0 or number == iters - 1
            if check:
                self._contents.poison(self._worker.pool, ids)
            self._hand_over(owner_ids, ids, tokens)
            if check:
                self._verified += 1
                self._wrong += not self._contents.equal(self._worker.pool, ids, owner_ids, tokens)

    def rows(self, common: Row) -> Iterator[Row]:
        """What was measured. Tokens, bytes and operations are those of the median request."""
        for phase, us in self._us.items():
            yield {
                **common,
                "tokens": round(median(self._tokens)),
                "phase": phase,
                "p50_us": float(np.median(us)),
                "p99_us": float(np.percentile(us, 99)),
                "bytes": round(median(self._bytes)),
                "ops": round(median(self._ops)),
                "iters": len(us),
                "verified": self._verified > 0 and self._wrong == 0,
            }

    def _draw(self, tokens: int) -> Ids:
        [ids] = Order().draw(self._rng, self._worker.pool.layout.num_blocks, 1, _blocks(tokens))
        return ids

    def _hand_over(self, owner_ids: Ids, ids: Ids, tokens: int) -> None:
        self._next += 1
        request_id = f"migrate-{self._next}"
        answer = self._owner.call(
            "offer", requests={request_id: owner_ids.tolist()}, num_tokens=tokens, publish=True
        )
        start = time.perf_counter_ns()
        pull = self._worker.pull(request_id, into=ids)
        pull.wait()
        took_us = (time.perf_counter_ns() - start) / 1000
        stats = pull.stats
        if not stats.settled:
            raise BenchError(f"{pull!r} returned before it was settled")
        measured = (
            answer["offer_us"][0], took_us - stats.total_us, stats.plan_us, stats.read_us,
            stats.validate_us, stats.settle_us, answer["offer_us"][0] + took_us,
        )  # fmt: skip
        for phase, us in zip(PHASES, measured, strict=True):
            self._us[phase].append(us)
        self._tokens.append(tokens)
        self._bytes.append(stats.num_bytes)
        self._ops.append(stats.num_ops)
