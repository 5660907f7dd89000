# SPDX-License-Identifier: Apache-2.0
"""What the rows of a results file say: one JSON object a line.

kind "machine": what machine.describe gives, the first line. kind "peers": contender.Who (peer, mode, path, version,
settings), block_bytes, blocks, then why_not, or p50_us with p50_low_us and p50_high_us (95 % confidence), p99_us,
quantiles_us (at contest.QUANTILES), gib_per_s, cpu_s_per_gib of both processes, transfers, turns, verified, times_X
(p50 over that of kvlink's X), other_load (share of all CPU time that strangers took). kind "bar": bars.Bar. No kind:
rows of `bench pull` (they have limit_gib_per_s) and `bench migrate` (they have phase), as their modules write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvlink.errors import ConfigError

from ..migrate import PHASES

Row = Mapping[str, Any]


class Key(NamedTuple):
    """What was measured. `way`: a library and its mode, or a bare copy."""

    path: str
    block_bytes: int
    blocks: int
    way: str

    def __str__(self) -> str:
        return f"{self.way}, {self.blocks:,} × {size_text(self.block_bytes)} ({self.path})"


@dataclass(frozen=True, slots=True)
class Measure:
    """Times of one way at one shape. `low_us` to `high_us`: where the true median is, where the row knows."""

    key: Key
    p50_us: float
    gib_per_s: float
    p99_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    cpu_s_per_gib: float | None = None
    quantiles_us: tuple[float, ...] = ()
    verified: bool = True


@dataclass(slots=True)
class Results:
    """One file."""

    name: str
    machine: dict[str, Any] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    bars: list[Row] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each migration: phase by phase, the median in µs."""


def results_of(name: str, rows: Iterable[Row]) -> Results:
    """Rows of `bench pull`, `peers` and `migrate`; others are passed over. Raises ConfigError for malformed ones."""
    found = Results(name)
    for row in rows:
        kind = row.get("kind")
        if kind == "machine":
            found.machine = {key: value for key, value in row.items() if key != "kind"}
        elif kind == "bar":
            found.bars.append(row)
        elif kind == "peers" and "why_not" in row:
            found.absent.append(
                (f"{row.get('peer')} {row.get('mode')} ({row.get('path')})", str(row["why_not"]))
            )
        elif kind == "peers":
            found.measures.append(_of_peers(row))
        elif "limit_gib_per_s" in row:
            found.measures += _of_pull(row)
        elif row.get("phase") in PHASES:
            what = f"{row.get('transport')}: {row.get('model')}, {_number(row, 'tokens'):,.0f} tokens"
            found.phases.setdefault(what, {})[str(row["phase"])] = _number(row, "p50_us")
    return found


def _of_peers(row: Row) -> Measure:
    quantiles = row.get("quantiles_us", [])
    if not isinstance(quantiles, list) or not all(isinstance(value, (int, float)) for value in quantiles):
        raise ConfigError("a row of the results has quantiles_us that are no list of numbers")
    return Measure(
        _key(row, str(row.get("path")), f"{row.get('peer')} {row.get('mode')}"),
        _number(row, "p50_us"),
        _number(row, "gib_per_s"),
        _number(row, "p99_us"),
        _number(row, "p50_low_us"),
        _number(row, "p50_high_us"),
        _number(row, "cpu_s_per_gib"),
        tuple(map(float, quantiles)),
        bool(row.get("verified")),
    )


def _of_pull(row: Row) -> Iterator[Measure]:
    path = f"pull {row.get('transport')}"
    yield Measure(
        _key(row, path, f"kvlink {row.get('transport')}"),
        _number(row, "p50_us"),
        _number(row, "gib_per_s"),
        p99_us=_number(row, "p99_us"),
        cpu_s_per_gib=_number(row, "cpu_s_per_gib"),
        verified=bool(row.get("verified")),
    )
    limit = row.get("limit_gib_per_s")
    if isinstance(limit, (int, float)) and math.isfinite(limit) and limit > 0:
        key = _key(row, path, f"bare {row.get('limit')}")
        yield Measure(key, key.block_bytes * key.blocks / 2**30 / limit * 1e6, limit)


def _key(row: Row, path: str, way: str) -> Key:
    return Key(path, round(_number(row, "block_bytes")), round(_number(row, "blocks")), way)


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e18:
        raise ConfigError(f"a row of the results has {name} {value!r}")
    return float(value)


def size_text(num_bytes: int) -> str:
    """As 16 KiB."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size:,} {unit}"
    return f"{num_bytes:,} B"


def groups(measures: Sequence[Measure]) -> dict[tuple[str, int], list[Measure]]:
    """By path and number of blocks, in the order of the file."""
    found: dict[tuple[str, int], list[Measure]] = {}
    for measure in measures:
        found.setdefault((measure.key.path, measure.key.blocks), []).append(measure)
    return found
