# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a results file, which has one JSON object per line.

- kind "machine": the result of machine.describe, in the first line
- kind "peers": contender.ContenderInfo (peer, mode, path, version, settings), block_bytes, blocks, then why_not, or
  p50_us, p90_us, p99_us and p999_us, each with a 95 % interval (_low_us, _high_us; null: too few values), quantiles_us
  (at contest.QUANTILES), gib_per_s and gb_per_s, cpu_s_per_gib of both processes, transfers, turns, verified, times_X
  (p50 over that of kvlink's X), other_load (share of all CPU time that other processes took)
- kind "bar": bars.Bar
- no kind: rows of `bench pull` (they have limit_gib_per_s) and `bench migrate` (they have phase), as their modules
  write them: both have the order of the block ids, p50_us, p90_us, p99_us and p999_us, each with its interval, and
  cpu_s_per_gib; migrate also has tp, at a pair of degrees prefill_ranks_read, layout, rows of the overhead (the part of
  each whole that is not wire) and of the limit (bare calls), limit (its name), of_limit (the share of its median in
  whole's), with several at a time slots, made_per_s, failed, and in an open loop arrivals, slots, offered_per_s,
  started_late, failed, and the phase late
- kind "noise" ends both: of (the run), other_load
- kind "simulation": the scene (path, model, tp, rails, load, popular, fails_after, pulls, lease_s, seed), workers, and
  the result of curve.measured
- kind "growth": of (what the number counts), cost, then number and value, or exponent, from, to, needs, holds
- kind "validation": transport, readers, requests, load; mean, p50, p90 and p99 measured (_us), simulated
  (simulated_…_us) and the difference (_error); drift (of the machine's rate between before and after), other_load,
  verified
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvlink.errors import ConfigError

from ..measurements.rank_handoffs import PHASES

Row = Mapping[str, Any]

_ORDER = "random"  # of block ids, if a row has none
_SCENE = {
    "load": "load {}",
    "popular": "{} of the requests at one worker besides its own",
    "fails_after": "a rail lost after {} of the run",
    "lease_s": "leases of {} s",
}


class Key(NamedTuple):
    """Identifies a measurement. `way` is a library and its mode, or a bare copy."""

    path: str
    block_bytes: int
    blocks: int
    way: str

    def __str__(self) -> str:
        return f"{self.way}, {self.blocks:,} × {size_text(self.block_bytes)} ({self.path})"


@dataclass(frozen=True, slots=True)
class Measure:
    """The times of one way at one shape. The true median is from `low_us` to `high_us`, if the row has an interval."""

    key: Key
    p50_us: float
    gib_per_s: float
    p99_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    cpu_s_per_gib: float | None = None
    quantiles_us: tuple[float, ...] = ()
    verified: bool = True


class Simulated(NamedTuple):
    """A fleet of a simulation's curve. `scene` has what all fleets of the curve share. There are no times if nothing
    moved.
    """

    scene: str
    workers: int
    p50_us: float | None
    p99_us: float | None
    gib_per_s: float
    expired: int
    unreachable: int
    requests: int


class Validated(NamedTuple):
    """Real pulls and their simulation."""

    transport: str
    readers: int
    p50_us: float
    simulated_p50_us: float
    p99_us: float
    simulated_p99_us: float
    other_load: float


@dataclass(slots=True)
class Results:
    """The content of one file."""

    name: str
    machine: dict[str, Any] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    settings: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """The (version, settings) by (path, way)."""
    bars: list[Row] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """The phases of each migration, with the median in µs."""
    noise: dict[str, float] = field(default_factory=dict)
    """The share of all CPU time that other processes took in each run."""
    fleets: dict[str, list[Simulated]] = field(default_factory=dict)
    """The fleets by scene."""
    validated: list[Validated] = field(default_factory=list)
    growths: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    """The costs at each number, by what the number counts and by the cost's name."""
    exponents: list[Row] = field(default_factory=list)


def results_of(name: str, rows: Iterable[Row]) -> Results:
    """Reads rows of `bench pull`, `peers`, `migrate`, `growth` and `simulate`, and ignores others.

    Raises ConfigError for malformed ones.
    """
    found = Results(name)
    for row in rows:
        kind = row.get("kind")
        if kind == "machine":
            found.machine = found.machine or {key: value for key, value in row.items() if key != "kind"}
        elif kind == "bar":
            found.bars.append(row)
        elif kind == "noise":
            found.noise[str(row.get("of"))] = _number(row, "other_load")
        elif kind == "peers" and "why_not" in row:
            found.absent.append(
                (f"{row.get('peer')} {row.get('mode')} ({row.get('path')})", str(row["why_not"]))
            )
        elif kind == "peers":
            found.measures.append(_of_peers(row))
            who = (str(row.get("path")), f"{row.get('peer')} {row.get('mode')}")
            found.settings[who] = (str(row.get("version")), str(row.get("settings")))
        elif kind == "simulation":
            fleet = _of_simulation(row)
            found.fleets.setdefault(fleet.scene, []).append(fleet)
        elif kind == "growth" and "exponent" in row:
            found.exponents.append(row)
        elif kind == "growth":
            costs = found.growths.setdefault(str(row.get("of")), {}).setdefault(str(row.get("cost")), {})
            costs[_count(row, "number")] = _number(row, "value")
        elif kind == "validation":
            times = [_number(row, name) for name in Validated._fields[2:]]
            found.validated.append(Validated(str(row.get("transport")), _count(row, "readers"), *times))
        elif "limit_gib_per_s" in row:
            found.measures += _of_pull(row)
        elif row.get("phase") in PHASES:
            what = f"{row.get('transport')}: {row.get('model')}, {_number(row, 'tokens'):,.0f} tokens{_ranks(row)}"
            what += f", {row['arrivals']}" if "arrivals" in row else ""
            what += _order(row)
            found.phases.setdefault(what, {})[str(row["phase"])] = _number(row, "p50_us")
    return found


def _of_peers(row: Row) -> Measure:
    quantiles = row.get("quantiles_us", [])
    if not isinstance(quantiles, list) or not all(isinstance(value, (int, float)) for value in quantiles):
        raise ConfigError("a row of the results has quantiles_us that are not a list of numbers")
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
    path, order = f"pull {row.get('transport')}", _order(row)
    yield Measure(
        _key(row, path, f"kvlink {row.get('transport')}{order}"),
        _number(row, "p50_us"),
        _number(row, "gib_per_s"),
        _number(row, "p99_us"),
        _perhaps(row, "p50_low_us"),
        _perhaps(row, "p50_high_us"),
        cpu_s_per_gib=_number(row, "cpu_s_per_gib"),
        verified=bool(row.get("verified")),
    )
    limit = row.get("limit_gib_per_s")
    if isinstance(limit, (int, float)) and math.isfinite(limit) and limit > 0:
        key = _key(row, path, f"bare {row.get('limit')}{order}")
        yield Measure(key, key.block_bytes * key.blocks / 2**30 / limit * 1e6, limit)


def _ranks(row: Row) -> str:
    return f", TP {row['tp']}" if ":" in str(row.get("tp")) else ""


def _order(row: Row) -> str:
    order = str(row.get("order", _ORDER))
    return "" if order == _ORDER else f", {order}"


def _of_simulation(row: Row) -> Simulated:
    details = [text.format(row[name]) for name, text in _SCENE.items() if row.get(name)]
    p50_us, p99_us = (_perhaps(row, name) for name in ("p50_us", "p99_us"))
    return Simulated(
        f"{row.get('model')} over {row.get('path')}, {', '.join(details)}",
        _count(row, "workers"),
        p50_us,
        p99_us,
        _number(row, "gib_per_s"),
        _count(row, "expired"),
        _count(row, "unreachable"),
        _count(row, "requests"),
    )


def _count(row: Row, name: str) -> int:
    return round(_number(row, name))


def _key(row: Row, path: str, way: str) -> Key:
    return Key(path, round(_number(row, "block_bytes")), round(_number(row, "blocks")), way)


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e18:
        raise ConfigError(f"a row of the results has {name} {value!r}")
    return float(value)


def _perhaps(row: Row, name: str) -> float | None:
    return None if row.get(name) is None else _number(row, name)


def size_text(num_bytes: int) -> str:
    """Formats a size: "16 KiB"."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size:,} {unit}"
    return f"{num_bytes:,} B"


def groups(measures: Sequence[Measure]) -> dict[tuple[str, int], list[Measure]]:
    """Groups measures by path and number of blocks, in the order of the file."""
    found: dict[tuple[str, int], list[Measure]] = {}
    for measure in measures:
        found.setdefault((measure.key.path, measure.key.blocks), []).append(measure)
    return found
