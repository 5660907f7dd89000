# SPDX-License-Identifier: Apache-2.0
"""What kvlink promises against other libraries, judged from the rows of a contest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from .contender import BARE, KVLINK

Row = Mapping[str, Any]

_CPU_SHARE = 0.3
_LATENCY = 1.0


class Bar(NamedTuple):
    """`got` must be at least `needs` (factor) or at most (share)."""

    bar: str
    transport: str
    block_bytes: int
    blocks: int
    against: str
    needs: str
    got: float
    holds: bool


def least_factor(transport: str, block_bytes: int) -> float:
    """How many times as fast as the best mode of the best peer on the same path."""
    if transport == "cma":
        return 1.5 if block_bytes == 16_384 else 2.0
    return {"shm": 4.0, "tcp": 5.0}[transport]


def bars(rows: Iterable[Row]) -> Iterator[Bar]:
    """For each shape and path where a peer ran. Speed of many blocks, latency of one, and CPU time of many."""
    measured = [row for row in rows if "p50_us" in row]
    measured.sort(key=_where)
    for _, group in groupby(measured, _where):
        together = list(group)
        peers = [row for row in together if row["peer"] not in (KVLINK, BARE)]
        if peers:
            yield from (bar for row in together if row["peer"] == KVLINK for bar in _judge(row, peers))


def _judge(row: Row, peers: list[Row]) -> Iterator[Bar]:
    what = (row["mode"], row["block_bytes"], row["blocks"])
    fastest = min(peers, key=lambda peer: float(peer["p50_us"]))
    if row["blocks"] == 1:
        share = row["p50_us"] / fastest["p50_us"]
        yield Bar("latency of one block", *what, _name(fastest), f"≤ {_LATENCY}", share, share <= _LATENCY)
        return
    factor, least = fastest["p50_us"] / row["p50_us"], least_factor(row["mode"], row["block_bytes"])
    yield Bar("times as fast", *what, _name(fastest), f"≥ {least}", factor, factor >= least)
    thriftiest = min(peers, key=lambda peer: float(peer["cpu_s_per_gib"]))
    share = row["cpu_s_per_gib"] / thriftiest["cpu_s_per_gib"]
    yield Bar("CPU time", *what, _name(thriftiest), f"≤ {_CPU_SHARE}", share, share <= _CPU_SHARE)


def _where(row: Row) -> tuple[str, int, int]:
    return row["path"], row["block_bytes"], row["blocks"]


def _name(row: Row) -> str:
    return f"{row['peer']} {row['mode']}"
