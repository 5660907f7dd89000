# SPDX-License-Identifier: Apache-2.0
"""Measures the handoff of a whole request between two processes, through a coordinator, phase by phase.

- late: in an open loop, from the intended arrival until a slot was free
- offer: the prefill worker's call
- claim: the decode worker's call, which knows only the request id, without the transfer; for requests that come alone,
  claim_parts_us has its parts, and of_bare_claim compares it with the claims of as many ranks by a bare client in the
  same run
- plan, validate, settle: as the pull counts them
- post: the time to give the reads to the transport, summed over the lanes
- wire: the rest of the read

The times of a row are those of the whole: late, offer, then from the decode worker's call until it has the blocks;
nothing is flushed, since the pool is in host memory. A failed request is infinitely long. overhead is the part of each
whole that is not wire. limit has bare calls that move the pieces of another such request, after each one that comes
alone.

At a pair of degrees every rank of prefill is a process that offers, and every rank of decode a worker that pulls from
all those that have heads and layers of its own; they share this machine. offer is then the slowest rank's, whole lasts
until the last rank has its blocks, and the phases in between are those of the rank whose transfers took longest. With
several prefills each has such ranks, and requests come from each in turn.

Requests come one after the other, or as soon as one of several slots is free, or at given times (arrivals.py). In the
last case whole counts from the intended arrival: late, the message to the prefill process, and all the rest.

Beside a loop like decoding (decode_loop.py), which runs on a thread of the decode worker's process, requests come one
after the other; its row has the times of handoffs and of the loop's steps, beside each other and alone, in turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvlink import BlockPool, Worker
from kvlink.errors import ConfigError
from kvlink.layout import dense

from ..harness.block_draws import Order
from ..harness.processes import coordinator_process, owner_process
from ..workloads.arrivals import Arrivals
from ..workloads.block_budget import LAYOUTS, Cache, Degrees, taken_from
from ..workloads.grouped_models import GROUPED_MODELS
from ..workloads.models import BLOCK_TOKENS
from . import group_handoffs
from .decode_loop import step_on
from .rank_handoffs import SEED, Bench, Row
from .rank_shares import Baselines, Owner, baselines_between

_POOL_REQUESTS, _BESIDE_REQUESTS = 4, 64
_SLOTS = 16  # requests in flight at a time in an open loop by default
_RUN_BYTES = 8 << 30
_LEAST_ITERS, _MOST_ITERS = 16, 200


def rows(
    model: str,
    tokens: int | Sequence[int],
    transport: str,
    tp: str = "1",
    iters: int | None = None,
    arrivals: Arrivals | None = None,
    order: str = "random",
    block_tokens: int = BLOCK_TOKENS,
    prefill_ms: float = 0.0,
    slots: int | None = None,
    layout: str = "NHD",
    pp: str = "1:1",
    prefills: int = 1,
    slo_ms: float = math.inf,
    beside: str = "",
) -> Iterator[Row]:
    """Returns the row of the first handoffs, which connect, and then the measured row, and that of `beside`.

    `tokens` is the size of every request, or of one after the other; requests that do not fit are omitted. `tp` and
    `pp` are parsed by Degrees. `iters` None fits the size. `arrivals` has the arrival of each of `tokens`. `order` is
    parsed by Order. `prefill_ms` is the prefill time of a request before its move; 0 omits shares of
    TTFT. `slots` is the number of requests in flight, if they fit; None means one, or 16 with `arrivals`. `layout` is
    one of LAYOUTS, at both ends. `slo_ms` is the longest whole that counts for the goodput. `beside` is parsed by
    step_on; empty for no loop. Raises ConfigError, BenchError and TransferError.
    """
    if model in GROUPED_MODELS:
        if not isinstance(tokens, int) or arrivals or slots or beside:
            raise ConfigError(
                f"{model} has several kinds of caches: omit --trace, --rate, --slots and --beside"
            )
        if (pp, prefills, layout) != ("1:1", 1, "NHD"):
            raise ConfigError(f"{model} has several kinds of caches: omit --pp, --prefills and --layout")
        return group_handoffs.rows(model, tokens, transport, tp, iters, order, prefill_ms)
    return _rows_of_one_kind(
        model, tokens, transport, tp, iters, arrivals, order, block_tokens, prefill_ms, slots, layout, pp, prefills,
        slo_ms, beside,
    )  # fmt: skip


def _rows_of_one_kind(
    model: str,
    tokens: int | Sequence[int],
    transport: str,
    tp: str,
    iters: int | None,
    arrivals: Arrivals | None,
    order: str,
    block_tokens: int,
    prefill_ms: float,
    slots: int | None,
    layout: str,
    pp: str,
    prefills: int,
    slo_ms: float,
    beside: str,
) -> Iterator[Row]:
    given = [tokens] if isinstance(tokens, int) else list(tokens)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is not known; write {' or '.join(LAYOUTS)}")
    if beside and (arrivals or slots):
        raise ConfigError("--beside moves requests one after the other; omit --rate, --speed and --slots")
    step = step_on(beside) if beside else None
    cache = Cache(model, Degrees.parse(tp, pp), block_tokens, LAYOUTS[layout])
    kept = cache.fitting(given)
    lengths = [given[index] for index in kept]
    blocks = Order.parse(order, cache.blocks(max(lengths)))
    largest = blocks.whole_runs(cache.blocks(max(lengths)))
    room = max(1, cache.most_blocks() // largest)
    slots = min(room, slots or (_SLOTS if arrivals else 1))
    places = max(slots, min(room, len(lengths) if arrivals else _BESIDE_REQUESTS if step else _POOL_REQUESTS))
    with _opened(cache, largest * places, transport, prefills) as (
        owners,
        workers,
        baselines,
        coordinator,
    ):
        bench = Bench(owners, workers, cache, lengths, blocks)
        common: Row = {
            "model": model, "tp": tp, "pp": pp, "block_tokens": block_tokens, "transport": transport, "order": order,
            "layout": layout, "prefills": prefills,
        }  # fmt: skip
        yield {"kind": "cold", **common, "tokens": lengths[0], **bench.warm_up(baselines)}
        if cache.degrees.decode is not None:
            common["prefill_ranks_read"] = taken_from(
                [owner.layout for owner in owners[0]], workers[0].pool.layout
            )
        if not isinstance(tokens, int):
            common["left_out"] = len(given) - len(kept)
        block_bytes = sum(worker.pool.layout.block_bytes for worker in workers)
        mean_bytes = sum(map(cache.blocks, lengths)) * block_bytes // len(lengths)
        iters = iters or max(_LEAST_ITERS, min(_RUN_BYTES // mean_bytes, _MOST_ITERS))
        if arrivals is not None:
            common |= {"arrivals": arrivals.name}
            common |= bench.run_open([arrivals.at_s[index] for index in kept], largest, slots, slo_ms * 1e3)
        elif slots > 1:
            common |= bench.run_together(max(iters, slots), largest, slots)
        else:
            common |= {"slots": 1, **bench.run(iters, baselines), **bench.claim_parts(coordinator)}
        yield common | bench.row(prefill_ms * 1e3)
        if step is not None:
            yield {
                "kind": "beside",
                **common,
                "compute": beside,
                "tokens": lengths[0],
                **bench.run_beside(step, largest),
            }


@contextmanager
def _opened(
    cache: Cache, num_blocks: int, transport: str, prefills: int
) -> Iterator[tuple[list[list[Owner]], list[Worker], Baselines, str]]:
    """Opens all ranks of both sides. The last worker's pool is closed last."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(coordinator_process())
        here = transport.endswith("loopback")
        owners = [
            [
                Owner(
                    stack.enter_context(
                        owner_process(
                            geometry,
                            SEED,
                            transport,
                            coordinator,
                            here=here,
                            order=cache.order,
                            number=number,
                        )
                    ),
                    dense(geometry, cache.order),
                )
                for geometry in cache.prefill(num_blocks)
            ]
            for number in range(prefills)
        ]
        workers = [
            stack.enter_context(
                Worker(
                    BlockPool.allocate(dense(geometry, cache.order)),
                    f"bench-reader-{rank}",
                    coordinator=coordinator,
                    transports=transport,
                )
            )
            for rank, geometry in enumerate(cache.decode(num_blocks))
        ]
        pools = [worker.pool for worker in workers]
        yield (
            owners,
            workers,
            stack.enter_context(baselines_between(transport, owners[0], pools)),
            coordinator,
        )
