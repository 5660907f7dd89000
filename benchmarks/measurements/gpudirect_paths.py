# SPDX-License-Identifier: Apache-2.0
"""Measures pulls of GPU memory by RDMA in two ways: GPUDirect, and bounced through pinned host memory.

They are measured where there are a GPU, torch and an RDMA device. Elsewhere they are modelled, as `kvlink predict`
does, and the rows say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvlink.errors import ConfigError
from kvlink.transfer.engine import transports_here

from ..prediction.machines import Machine
from ..prediction.path import Request
from . import gpu

PATHS = {"gpudirect": "dma-buf,peermem", "bounce": "bounce"}
"""The value of KVLINK_GPUDIRECT while each path is measured."""

_HOST_COPIES = {"gpudirect": 0, "bounce": 2}
Row = dict[str, Any]


def paths_of(text: str) -> list[str]:
    """Parses "gpudirect,bounce". Raises ConfigError."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PATHS]
    if unknown:
        raise ConfigError(
            f"--path {text!r} is not known; write {' or '.join(PATHS)}, or both separated by a comma"
        )
    return names


def rows(
    names: Sequence[str], shapes: Sequence[tuple[int, int]], gbps: float, iters: int | None
) -> Iterator[Row]:
    """Yields one row per path and shape. `gbps` is the rate of the modelled NIC where there is none.

    Raises the errors of gpu.rows.
    """
    for shape in shapes:
        fastest_us = None
        for name in names:
            row = _measured(name, shape, iters) if _can_measure() else _modelled(name, shape, gbps)
            fastest_us = fastest_us or row["p50_us"]
            yield row | {f"over_{names[0]}": row["p50_us"] / fastest_us}


def _measured(name: str, shape: tuple[int, int], iters: int | None) -> Row:
    with _only(PATHS[name]):
        (row,) = gpu.rows((0, 0), "verbs", iters, [gpu.Shape(shape[0], 1, shape[1])])
    return {"path": name, "how": "measured", "host_copies": _HOST_COPIES[name], **row}


def _modelled(name: str, shape: tuple[int, int], gbps: float) -> Row:
    block_bytes, blocks = shape
    num_bytes = block_bytes * blocks
    path = next(path for path in Machine(nics=1, gbps=gbps).paths(1) if path.name == name)
    found = path.predict(Request(num_bytes, blocks, 1))
    return {
        "path": name,
        "how": f"modelled, {gbps:g} Gb/s",
        "host_copies": _HOST_COPIES[name],
        "transport": "verbs",
        "piece_bytes": block_bytes,
        "pieces": blocks,
        "bytes": num_bytes,
        "p50_us": found.total_ms * 1e3,
        "gib_per_s": found.gib_per_s(num_bytes),
        "bottleneck": found.bottleneck,
    }


def _can_measure() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return not transports_here()["verbs"] and bool(torch.cuda.is_available())


@contextmanager
def _only(ways: str) -> Iterator[None]:
    """Sets the ways of GPUDirect in the environment, which both ends read."""
    before = os.environ.get("KVLINK_GPUDIRECT")
    os.environ["KVLINK_GPUDIRECT"] = ways
    try:
        yield
    finally:
        del os.environ["KVLINK_GPUDIRECT"]
        if before is not None:
            os.environ["KVLINK_GPUDIRECT"] = before
