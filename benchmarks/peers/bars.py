# SPDX-License-Identifier: Apache-2.0
"""What kvlink promises against other libraries, judged from the rows of a contest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from .contender import BARE, KVLINK
from .modes import MODES

Row = Mapping[str, Any]

_CPU_SHARE = 0.3
_LATENCY = 1.0
_UCX = "ucx"
_ALLOCATED = {(mode.peer, mode.name) for mode in MODES if mode.allocates}


class Bar(NamedTuple):
    """`got` must be at least `needs` (factor) or at most (share, or ms)."""

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
    """For each shape and path where a peer ran. Speed of many blocks, latency of one, and CPU time of many.

    cma is for memory that somebody else allocated: peers that moved memory of their own are no measure of it.
    """
    measured = [row for row in rows if "p50_us" in row]
    measured.sort(key=_where)
    for _, group in groupby(measured, _where):
        together = list(group)
        peers = [row for row in together if row["peer"] not in (KVLINK, BARE)]
        if peers:
            yield from (bar for row in together if row["peer"] == KVLINK for bar in _judge(row, peers))


def _judge(row: Row, peers: Sequence[Row]) -> Iterator[Bar]:
    what = (row["mode"], row["block_bytes"], row["blocks"])
    if row["mode"] == "cma":
        peers = [peer for peer in peers if (peer["peer"], peer["mode"]) not in _ALLOCATED]
    for fastest in _best(peers, "p50_us"):
        share, name = row["p50_us"] / fastest["p50_us"], _name(fastest)
        if row["blocks"] == 1:
            yield Bar("latency of one block", *what, name, f"≤ {_LATENCY}", share, share <= _LATENCY)
        else:
            least = least_factor(row["mode"], row["block_bytes"])
            yield Bar("times as fast", *what, name, f"≥ {least}", 1 / share, 1 / share >= least)
    for thriftiest in _best(peers, "cpu_s_per_gib") if row["blocks"] > 1 else ():
        share = row["cpu_s_per_gib"] / thriftiest["cpu_s_per_gib"]
        yield Bar("CPU time", *what, _name(thriftiest), f"≤ {_CPU_SHARE}", share, share <= _CPU_SHARE)


def _best(peers: Sequence[Row], by: str) -> list[Row]:
    """Of all; where that is UCX by itself, without metadata or handles of its transfers, then also of the others."""
    ranked = sorted(peers, key=lambda peer: float(peer[by]))
    libraries = [peer for peer in ranked if peer["peer"] != _UCX]
    return ranked[:1] if ranked[:1] == libraries[:1] else [*ranked[:1], *libraries[:1]]


def _where(row: Row) -> tuple[str, int, int]:
    return row["path"], row["block_bytes"], row["blocks"]


def _name(row: Row) -> str:
    return f"{row['peer']} {row['mode']}"
