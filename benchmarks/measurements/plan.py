# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU time of planning. No byte moves, and the addresses are made up.

A descriptor is one block of one plane, or one row if the two ends nest tokens and heads differently.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any, NamedTuple

from kvlink import _bench, _core
from kvlink.layout import Geometry, KVLayout, Order, Regions, dense
from kvlink.transfer.planners import core_layout

MODEL = Geometry(num_layers=80, total_heads=8, row_bytes=256, num_blocks=8192, block_tokens=16)
ONE_RANK = replace(MODEL, tp_size=8)
SHALLOW = replace(MODEL, num_layers=5)
WIDE_BLOCKS = replace(MODEL, block_tokens=64, num_blocks=2048)
LATENT = replace(
    MODEL, num_layers=61, total_heads=1, row_bytes=1152, planes_per_layer=1, block_tokens=64, num_blocks=2048
)
LAYERS = Regions.PER_LAYER
ONE_PLANE = dense(
    Geometry(num_layers=1, total_heads=1, row_bytes=4096, num_blocks=8192, block_tokens=1, planes_per_layer=1)
)
"""The pool of `kvlink bench pull` with blocks of 4 KiB."""
REPEATS = 50
FIRST_ADDRESS = 1 << 40


class Case(NamedTuple):
    """One planning task: `num_blocks` of the reader's blocks, in random order at both ends unless `sequential`."""

    name: str
    owner: KVLayout
    reader: KVLayout
    num_blocks: int
    sequential: bool = False


def _alike(name: str, layout: KVLayout, num_blocks: int, sequential: bool = False) -> Case:
    return Case(name, layout, layout, num_blocks, sequential)


CASES = (
    _alike("nhd, one rank of 8", dense(ONE_RANK, Order.NHD, LAYERS), 256),
    _alike("nhd", dense(MODEL, Order.NHD, LAYERS), 256),
    _alike("nhd, long", dense(SHALLOW, Order.NHD, LAYERS), 4096),
    _alike("nhd, in sequence", dense(SHALLOW, Order.NHD, LAYERS), 4096, True),
    _alike("hnd, one region", dense(MODEL, Order.HND), 256),
    _alike("paired", dense(MODEL, Order.PAIRED_HND, LAYERS), 256),
    _alike("k beside v", dense(MODEL, Order.BESIDE_HND, LAYERS), 256),
    _alike("cross-layer", dense(MODEL, Order.CROSS_LAYER_HND), 256),
    Case("cross-layer to hnd", dense(MODEL, Order.CROSS_LAYER_HND), dense(MODEL, Order.HND, LAYERS), 256),
    _alike("mla", dense(LATENT, Order.NHD, LAYERS), 672),
    Case("nhd, blocks of 64 to 16", dense(WIDE_BLOCKS), dense(MODEL), 256),
    Case("nhd to hnd, row by row", dense(SHALLOW, Order.NHD), dense(SHALLOW, Order.HND), 64),
    _alike("one plane", ONE_PLANE, 256),
    _alike("nhd, one block", dense(MODEL, Order.NHD, LAYERS), 1),
)


def rows() -> Iterator[dict[str, Any]]:
    """Yields one row per case.

    `ns_per_descriptor` is CPU time, the median over repeats that refill one plan. `posted_ns_per_descriptor` is the
    extra time to check, chain and post the plan as RDMA reads, without a NIC. `fresh_ns_per_descriptor` includes a new
    plan's memory each time, like the first pulls of a process.
    """
    for case in CASES:
        yield _row(case)


def _row(case: Case) -> dict[str, Any]:
    planner = _planner(case)
    owner_blocks, reader_blocks, num_tokens = _blocks(case)
    plan = planner.plan(owner_blocks, reader_blocks, (0, num_tokens))

    def refill() -> None:
        planner.plan(owner_blocks, reader_blocks, (0, num_tokens), into=plan)

    def fresh() -> None:
        planner.plan(owner_blocks, reader_blocks, (0, num_tokens))

    descriptors = max(case.num_blocks * len(case.reader.planes), plan.num_segments)
    refilled = _cpu_ns(refill)
    return {
        "layout": case.name,
        "blocks": case.num_blocks,
        "planes": len(case.reader.planes),
        "descriptors": descriptors,
        "ops": plan.num_ops,
        "segments": plan.num_segments,
        "bytes": plan.bytes,
        "ns_per_descriptor": round(median(refilled) / descriptors, 2),
        "min_ns_per_descriptor": round(min(refilled) / descriptors, 2),
        "fresh_ns_per_descriptor": round(median(_cpu_ns(fresh)) / descriptors, 2),
        "us_per_plan": round(median(refilled) / 1000, 2),
        "posted_ns_per_descriptor": _posted_ns(plan, descriptors),
    }


def _posted_ns(plan: _core.Plan, descriptors: int) -> float | None:
    """Returns the nanoseconds to post, or None if kvlink was built without verbs."""
    return round(_bench.post_ns(plan, REPEATS) / descriptors, 2) if hasattr(_bench, "post_ns") else None


def _planner(case: Case) -> _core.Planner:
    local, address = [], FIRST_ADDRESS
    for num_bytes in case.reader.region_bytes:
        local.append((address, num_bytes))
        address += num_bytes
    remote = case.owner.region_bytes
    return _core.Planner(core_layout(case.reader), core_layout(case.owner), local, remote, range(len(remote)))


def _blocks(case: Case) -> tuple[array[int], array[int], int]:
    random = Random(case.name)
    num_tokens = case.num_blocks * case.reader.block_tokens

    def take(layout: KVLayout) -> array[int]:
        count = layout.num_blocks_for(num_tokens)
        return array("I", range(count) if case.sequential else random.sample(range(layout.num_blocks), count))

    return take(case.owner), take(case.reader), num_tokens


def _cpu_ns(call: Callable[[], None]) -> list[float]:
    """Returns CPU nanoseconds per call. A sample spans several calls, as reading the clock costs as much as one."""
    calls = 10
    samples = []
    for _ in range(REPEATS):
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        samples.append((time.thread_time_ns() - start) / calls)
    return samples
