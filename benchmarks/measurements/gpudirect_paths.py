# SPDX-License-Identifier: Apache-2.0
"""Measures pulls of GPU memory by RDMA in two ways: GPUDirect, and bounced through pinned host memory.

They need a GPU, torch and an RDMA device; `kvlink predict` models them elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvlink.errors import ConfigError
from kvlink.transfer.engine import transports_here

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


def rows(names: Sequence[str], shapes: Sequence[tuple[int, int]], iters: int | None) -> Iterator[Row]:
    """Yields one row per path and shape. Raises the errors of gpu.rows, and ConfigError without an RDMA device."""
    if why_not := transports_here()["verbs"]:
        raise ConfigError(f"no RDMA device: {why_not}; `kvlink predict` models both paths")
    for shape in shapes:
        fastest_us = None
        for name in names:
            row = _measured(name, shape, iters)
            fastest_us = fastest_us or row["p50_us"]
            yield row | {f"over_{names[0]}": row["p50_us"] / fastest_us}


def _measured(name: str, shape: tuple[int, int], iters: int | None) -> Row:
    with _only(PATHS[name]):
        (row,) = gpu.rows((0, 0), "verbs", iters, [gpu.Shape(shape[0], 1, shape[1])])
    return {"path": name, "host_copies": _HOST_COPIES[name], **row}


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
