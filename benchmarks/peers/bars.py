# SPDX-License-Identifier: Apache-2.0
"""Judges kvlink's promises against other libraries, from the rows of a contest."""

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
_OF_OTHERS_MEMORY = "cma"
_ALLOCATED = {(mode.peer, mode.name) for mode in MODES if mode.allocates}


class Bar(NamedTuple):
    """A promise: `got` must be at least `needs` (factor) or at most (share, or ms).

    `possible` is what the bare calls of the same run would have got, which shows the bars that the machine itself rules
    out. `of_limit` is how near to them kvlink is; CPU time is over 1 if making their lists costs more than kvlink.
    """

    bar: str
    transport: str
    block_bytes: int
    blocks: int
    against: str
    needs: str
    got: float
    holds: bool
    possible: float | None = None
    of_limit: float | None = None
    limit: str = ""
    reachable: bool | None = None


def least_factor(transport: str, block_bytes: int) -> float:
    """Returns how many times as fast kvlink must be as the best mode of the best peer on the same path."""
    if transport == "cma":
        return 1.5 if block_bytes == 16_384 else 2.0
    return {"shm": 4.0, "tcp": 5.0}[transport]


def bars(rows: Iterable[Row]) -> Iterator[Bar]:
    """Yields the bars of each shape and path where a peer ran: speed and CPU time of many blocks, latency of one.

    cma is for memory that another library allocated, so peers that moved their own memory are not compared with it.
    """
    measured = [row for row in rows if "p50_us" in row]
    measured.sort(key=_where)
    for _, group in groupby(measured, _where):
        together = list(group)
        peers = [row for row in together if row["peer"] not in (KVLINK, BARE)]
        bare = [row for row in together if row["peer"] == BARE]
        if peers:
            yield from (bar for row in together if row["peer"] == KVLINK for bar in _judge(row, peers, bare))


def _judge(row: Row, peers: Sequence[Row], bare: Sequence[Row]) -> Iterator[Bar]:
    if row["mode"] == _OF_OTHERS_MEMORY:
        peers = [peer for peer in peers if (peer["peer"], peer["mode"]) not in _ALLOCATED]
    for fastest in _best(peers, "p50_us"):
        if row["blocks"] == 1:
            yield _at_most(_LATENCY, "latency of one block", "p50_us", row, fastest, bare)
        else:
            yield _times_as_fast(row, fastest, bare)
    for thriftiest in _best(peers, "cpu_s_per_gib") if row["blocks"] > 1 else ():
        yield _at_most(_CPU_SHARE, "CPU time", "cpu_s_per_gib", row, thriftiest, bare)


def _times_as_fast(row: Row, peer: Row, bare: Sequence[Row]) -> Bar:
    least = least_factor(row["mode"], row["block_bytes"])
    got, possible, of_limit, limit = _beside(row, peer, bare, "p50_us")
    got, possible = 1 / got, None if possible is None else 1 / possible
    reachable = None if possible is None else possible >= least
    return Bar(
        "times as fast", *_what(row, peer), f"≥ {least}", got, got >= least, possible, of_limit, limit, reachable
    )  # fmt: skip


def _at_most(most: float, bar: str, by: str, row: Row, peer: Row, bare: Sequence[Row]) -> Bar:
    got, possible, of_limit, limit = _beside(row, peer, bare, by)
    reachable = None if possible is None else possible <= most
    return Bar(bar, *_what(row, peer), f"≤ {most}", got, got <= most, possible, of_limit, limit, reachable)


def _beside(
    row: Row, peer: Row, bare: Sequence[Row], by: str
) -> tuple[float, float | None, float | None, str]:
    """Returns kvlink's share of the peer's value, the limit's share of it and of kvlink's, and the limit's name."""
    limit = min((each for each in bare if _limits(each, row)), key=lambda each: float(each[by]), default=None)
    if limit is None:
        return row[by] / peer[by], None, None, ""
    return row[by] / peer[by], limit[by] / peer[by], limit[by] / row[by], limit["mode"]


def _limits(bare: Row, row: Row) -> bool:
    """Returns whether `bare` limits `row`. Of two transports on one path, each has its own bare calls."""
    return bool((bare["mode"] == "process_vm_readv") == (row["mode"] == _OF_OTHERS_MEMORY))


def _what(row: Row, peer: Row) -> tuple[str, int, int, str]:
    return row["mode"], row["block_bytes"], row["blocks"], f"{peer['peer']} {peer['mode']}"


def _best(peers: Sequence[Row], by: str) -> list[Row]:
    """Returns the best of all peers. If it is UCX alone, without metadata or handles, also the best of the others."""
    ranked = sorted(peers, key=lambda peer: float(peer[by]))
    libraries = [peer for peer in ranked if peer["peer"] != _UCX]
    return ranked[:1] if ranked[:1] == libraries[:1] else [*ranked[:1], *libraries[:1]]


def _where(row: Row) -> tuple[str, int, int]:
    return row["path"], row["block_bytes"], row["blocks"]
