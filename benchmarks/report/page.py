# SPDX-License-Identifier: Apache-2.0
"""Writes the page: sections of charts and tables around the results. All text from files is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median

from ..prediction.calibration import LEAST_SHAPES, Sample, cross_validated, num_shapes
from . import charts
from .comparison import compare
from .measures import Measure, Results, Row, groups, size_text

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvlink: measured</title><style>
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; } h3 { margin-bottom: .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; display: block;
  overflow-x: auto; }
th, td { padding: .15rem .7rem .15rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } .no { color: #b3261e; font-weight: 600; } .yes { color: #1a7f37; }
small, .why { color: #5b636d; }
td.long { white-space: normal; text-align: left; overflow-wrap: anywhere; }
</style></head><body>
"""


_LONG_CHARS = 24  # from which on a cell is broken into lines


def write(results: Sequence[Results]) -> str:
    """Returns the whole page: each file separately, then the second compared with the first."""
    parts = [_HEAD, "<h1>kvlink: measured</h1>"]
    for found in results:
        parts += _of_file(found)
    if len(results) == 2:
        parts += _compared(*results)
    return "\n".join([*parts, "</body></html>\n"])


def _of_file(found: Results) -> Iterator[str]:
    yield f"<h2>{escape(found.name)}</h2>"
    if found.machine:
        said = "; ".join(
            f"{name} {value}" for name, value in found.machine.items() if value not in ("", None)
        )
        yield f"<p><small>{escape(said)}</small></p>"
    if found.noise:
        said = "; ".join(f"{of} {share:.1%}" for of, share in found.noise.items())
        yield f"<p><small>CPU time that other processes took meanwhile: {escape(said)}</small></p>"
    yield from _bars(found)
    for (path, blocks), measures in groups(found.measures).items():
        yield f"<h3>{escape(path)}: {blocks:,} block{'s' if blocks > 1 else ''} a transfer</h3>"
        if len({measure.key.block_bytes for measure in measures}) > 1:
            yield charts.speeds(measures)
        yield from _distributions(measures)
        if any(measure.cpu_s_per_gib for measure in measures) and blocks > 1:
            yield charts.cpu_time(measures)
        yield _measures(measures)
    if found.phases:
        yield "<h3>Where the time of a migration goes</h3>" + charts.waterfall(found.phases)
    yield from _predictions(found)
    yield from _simulations(found)
    if found.settings:
        yield "<h3>Versions and settings</h3>"
        rows = ((path, way, *said) for (path, way), said in found.settings.items())
        yield _table(("path", "way", "version", "settings"), rows)
    if found.absent:
        yield "<h3>Not measured</h3>"
        yield _table(("what", "why"), found.absent)


def _bars(found: Results) -> Iterator[str]:
    if not found.bars:
        return
    held = sum(bool(bar.get("holds")) for bar in found.bars)
    yield f"<h3>What kvlink promises against other libraries: {held} of {len(found.bars)} hold</h3>"
    if beyond := sum(bar.get("holds") is False and bar.get("reachable") is False for bar in found.bars):
        yield (
            f"<p class='why'>{beyond} of the {len(found.bars) - held} others ask for more than bare calls on the same "
            "memory got in the same run (possible): a copy for shm, process_vm_readv for cma, a plain socket for tcp. "
            "Of limit: how near kvlink came to them.</p>"
        )
    names = ("bar", "transport", "transfer", "against", "needs", "got", "holds", "possible", "of_limit")
    rows = ([_shape(bar) if name == "transfer" else bar.get(name) for name in names] for bar in found.bars)
    yield _table([name.replace("_", " ") for name in names], rows)


def _shape(bar: Row) -> str:
    blocks, size = bar.get("blocks"), bar.get("block_bytes")
    return f"{blocks:,} × {size_text(size)}" if isinstance(blocks, int) and isinstance(size, int) else ""


def _distributions(measures: Sequence[Measure]) -> Iterator[str]:
    for size in dict.fromkeys(measure.key.block_bytes for measure in measures):
        alike = [measure for measure in measures if measure.key.block_bytes == size]
        if any(measure.quantiles_us for measure in alike):
            yield f'<div class="why">{size_text(size)} blocks: how long transfers took</div>'
            yield charts.distributions(alike)


def _measures(measures: Sequence[Measure]) -> str:
    rows = (
        (
            each.key.way, size_text(each.key.block_bytes), each.p50_us, _interval(each), each.p99_us, each.gib_per_s,
            each.cpu_s_per_gib, each.verified,
        )
        for each in measures
    )  # fmt: skip
    return _table(
        ("way", "block", "p50 µs", "95 % interval", "p99 µs", "GiB/s", "CPU-s/GiB", "verified"), rows
    )


def _interval(measure: Measure) -> str:
    return (
        ""
        if measure.low_us is None or measure.high_us is None
        else f"{_text(measure.low_us)}–{_text(measure.high_us)}"
    )


def _predictions(found: Results) -> Iterator[str]:
    samples: dict[str, list[Sample]] = {}
    for measure in found.measures:
        if measure.key.way.startswith("kvlink "):
            size = measure.key.blocks * measure.key.block_bytes
            samples.setdefault(measure.key.way, []).append(Sample(measure.key.blocks, size, measure.p50_us))
    points = {}
    for way, taken in samples.items():
        if num_shapes(taken) > LEAST_SHAPES:
            errors = cross_validated(taken).errors
            points[way] = [
                (each.us, each.us * (1 + error)) for each, error in zip(taken, errors, strict=True)
            ]
    if points:
        wrong = [abs(predicted / measured - 1) for pairs in points.values() for measured, predicted in pairs]
        yield f"<h3>Prediction against measurement: wrong by {median(wrong):.0%}, at most {max(wrong):.0%}</h3>"
        yield "<p class='why'>Each point is predicted by start-up, operations and bytes fitted to the other shapes.</p>"
        yield charts.predictions(points)


def _simulations(found: Results) -> Iterator[str]:
    for scene, curve in found.fleets.items():
        yield f"<h3>Simulated fleets: {escape(scene)}</h3>"
        if sum(bool(fleet.p50_us and fleet.p99_us) for fleet in curve) > 1:
            yield charts.fleets(curve)
        names = ("workers", "p50 µs", "p99 µs", "GiB/s", "leases expired", "unreachable", "requests")
        yield _table(names, (fleet[1:] for fleet in curve))
    if found.validated:
        yield "<h3>The simulation beside real pulls</h3>"
        names = (
            "transport",
            "readers",
            "p50 µs",
            "simulated",
            "p99 µs",
            "simulated",
            "share of CPU others took",
        )
        yield _table(names, found.validated)


def _compared(before: Results, after: Results) -> Iterator[str]:
    yield f"<h2>{escape(after.name)} against {escape(before.name)}</h2>"
    rows = [
        (str(each.key), each.before_us, each.after_us, each.ratio, each.verdict)
        for each in compare(before, after)
    ]
    if rows:
        yield _table(("what", "before, µs", "after, µs", "ratio", "verdict"), rows)
    else:
        yield "<p>The two files have no measurement in common.</p>"


def _table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        said = "yes" if value else "no"
        return f'<td class="{said}">{said}</td>'
    if isinstance(value, float):
        return f"<td>{_text(value)}</td>"
    if isinstance(value, int):
        return f"<td>{value:,}</td>"
    said = "" if value is None else escape(str(value))
    return f'<td class="long">{said}</td>' if len(said) > _LONG_CHARS else f"<td>{said}</td>"


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
