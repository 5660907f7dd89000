# SPDX-License-Identifier: Apache-2.0
"""Writes the page: headlines with bars first, then details to unfold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median

from ..prediction.calibration import LEAST_SHAPES, Sample, cross_validated, num_shapes
from . import charts, headlines
from .comparison import compare
from .measures import Measure, Results, Row, groups, size_text
from .style import document
from .tables import LIMIT, folded, number_text, table

_LEAST_SIZES = 3  # of blocks, for a curve
_NAMED = {"host": "One host", "tcp": "TCP"}

_OF_CONTESTS = (
    "Median time of one transfer; shorter is better. Each library is shown in its fastest mode. The limit is bare "
    "calls that copy the same blocks and check nothing."
)
_OF_PULLS = "Median speed of one transfer at a time; longer is better. The line is the limit: bare calls."

Section = tuple[str, list[str]]
"""A title and its parts."""


def write(results: Sequence[Results], title: str = "") -> str:
    """Returns the whole page: each file separately, then the second compared with the first."""
    title = title or _title(results)
    sections: list[Section] = []
    for found in results:
        before = f"{found.name}: " if len(results) > 1 else ""
        own = [(name, parts) for name, parts in _sections(found) if any(parts)]
        sections += [(f"{before}{name}" if before else name, parts) for name, parts in own]
    if len(results) == 2:
        sections.insert(0, (f"{results[1].name} against {results[0].name}", list(_compared(*results))))
    body = [
        "<header>",
        f"<h1>{escape(title)}</h1>",
        *map(_run, results),
        _contents(sections),
        "</header><main>",
    ]
    for number, (name, parts) in enumerate(sections):
        body += [
            f'<section aria-labelledby="s{number}"><h2 id="s{number}">{escape(name)}</h2>',
            *parts,
            "</section>",
        ]
    return document(title, [*body, "</main>"])


def _title(results: Sequence[Results]) -> str:
    hosts = dict.fromkeys(str(found.machine["host"]) for found in results if found.machine.get("host"))
    return f"kvlink measured on {' and '.join(hosts)}" if hosts else "kvlink measured"


def _run(found: Results) -> str:
    """Returns where and when the results of one file were measured."""
    machine = found.machine
    cores = f"{machine['cores']} cores" if machine.get("cores") else None
    commit = f"commit {machine['commit']}" if machine.get("commit") else None
    version = f"kvlink {machine['kvlink']}" if machine.get("kvlink") else None
    said = (machine.get("host"), machine.get("cpu"), cores, _date(machine.get("at")), version, commit)
    return f'<p class="soft">{escape(" · ".join(str(each) for each in said if each) or found.name)}</p>'


def _date(at: object) -> str:
    return str(at).replace("T", " ").replace("+00:00", " UTC") if at else ""


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(
        f'<li><a href="#s{number}">{escape(name)}</a></li>' for number, (name, _) in enumerate(sections)
    )
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(sections) > 1 else ""


def _sections(found: Results) -> Iterator[Section]:
    contests = headlines.contests(found.measures)
    lead = (
        "kvlink beside other libraries"
        if any(each.others for each in contests)
        else "kvlink beside its limit"
    )
    yield (
        lead,
        [part for each in contests for part in (_titled(headlines.headline(each)), headlines.chart(each))],
    )
    yield (
        "Pulls over each transport",
        [part for said, bars in headlines.pulls(found.measures) for part in (_titled(said), bars)],
    )
    if found.phases:
        yield "Where the time of a handoff goes", [charts.waterfall(found.phases)]
    yield "How costs grow", list(_growths(found))
    yield "Simulated fleets", list(_simulations(found))
    yield "Details", list(_details(found))


def _drawn(what: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for number, (said, bars) in enumerate(pairs):
        if number == 0:
            yield f'<p class="soft">{what}</p>'
        yield _titled(said)
        yield bars


def _titled(said: str) -> str:
    return f"<h3>{escape(said)}</h3>"


def _details(found: Results) -> Iterator[str]:
    for (path, blocks), measures in groups(found.measures).items():
        where = _NAMED.get(path, path[:1].upper() + path[1:])
        what = f"{where}, {blocks:,} block{'s' if blocks > 1 else ''} a transfer"
        yield folded(what, _group(what, blocks, measures))
    yield folded("Predictions against measurements", _predictions(found))
    yield folded("Goals of kvlink's developers", _goals(found))
    if found.settings:
        rows = ((path, way, *said) for (path, way), said in found.settings.items())
        yield folded(
            "Versions and settings",
            [table("Versions and settings of each way", ("path", "way", "version", "settings"), rows)],
        )
    if found.absent:
        yield folded("Not measured", [table("Ways that were not measured", ("what", "why"), found.absent)])
    yield folded("Machine", _machine(found))


def _group(what: str, blocks: int, measures: Sequence[Measure]) -> Iterator[str]:
    if len({measure.key.block_bytes for measure in measures}) >= _LEAST_SIZES:
        yield charts.speeds(measures)
    for size in dict.fromkeys(measure.key.block_bytes for measure in measures):
        alike = [measure for measure in measures if measure.key.block_bytes == size]
        if any(measure.quantiles_us for measure in alike):
            yield _titled(f"Blocks of {size_text(size)}")
            yield charts.distributions(alike)
    if any(measure.cpu_s_per_gib for measure in measures) and blocks > 1:
        yield charts.cpu_time(measures)
    rows = (
        (
            each.key.way, size_text(each.key.block_bytes), each.p50_us, _interval(each), each.p99_us, each.gib_per_s,
            each.cpu_s_per_gib, each.verified,
        )
        for each in measures
    )  # fmt: skip
    names = ("way", "block", "p50 µs", "95 % interval", "p99 µs", "GiB/s", "CPU-s/GiB", "verified")
    yield table(f"{what}: times, speed, and CPU time of both processes", names, rows)


def _interval(measure: Measure) -> str:
    if measure.low_us is None or measure.high_us is None:
        return ""
    return f"{number_text(measure.low_us)}–{number_text(measure.high_us)}"


def _goals(found: Results) -> Iterator[str]:
    if not found.bars:
        return
    held = sum(bar.get("holds") is True for bar in found.bars)
    beyond = sum(_is_beyond(bar) for bar in found.bars)
    said = f"{held} of {len(found.bars)} are met."
    if beyond:
        said += f" {beyond} are beyond what bare calls on the same memory got in this run (limit)."
    yield f"<p>{said}</p>"
    names = ("bar", "transport", "transfer", "against", "needs", "got", "holds", "possible", "of_limit")
    rows = ([_goal(bar, name) for name in names] for bar in found.bars)
    shown = ("goal", "transport", "transfer", "against", "needs", "got", "met", "bare calls", "of limit")
    yield table("Goals, and what kvlink and bare calls got", shown, rows)


def _is_beyond(bar: Row) -> bool:
    return bar.get("holds") is False and bar.get("reachable") is False


def _goal(bar: Row, name: str) -> object:
    if name == "holds" and _is_beyond(bar):
        return LIMIT
    if name != "transfer":
        return bar.get(name)
    blocks, size = bar.get("blocks"), bar.get("block_bytes")
    return f"{blocks:,} × {size_text(size)}" if isinstance(blocks, int) and isinstance(size, int) else ""


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
        yield (
            f"<p>Predictions are wrong by {median(wrong):.0%} in the median, and by {max(wrong):.0%} at most. Each "
            "point is predicted from start-up, operations and bytes fitted to the other shapes.</p>"
        )
        yield charts.predictions(points)


def _growths(found: Results) -> Iterator[str]:
    for of, costs in found.growths.items():
        yield _titled(of)
        yield charts.growth(of, costs)
    if found.exponents:
        names = ("of", "cost", "exponent", "from", "to", "needs", "holds")
        yield table(
            "Exponents: 1 is linear", names, ([row.get(name) for name in names] for row in found.exponents)
        )


def _simulations(found: Results) -> Iterator[str]:
    for scene, curve in found.fleets.items():
        yield _titled(scene)
        if sum(bool(fleet.p50_us and fleet.p99_us) for fleet in curve) > 1:
            yield charts.fleets(curve)
        names = ("workers", "p50 µs", "p99 µs", "GiB/s", "leases expired", "unreachable", "requests")
        yield table(f"Fleets of {scene}", names, (fleet[1:] for fleet in curve))
    if found.validated:
        yield _titled("The simulation beside real pulls")
        names = (
            "transport",
            "readers",
            "p50 µs",
            "simulated",
            "p99 µs",
            "simulated",
            "share of CPU others took",
        )
        yield table("Times of real and of simulated pulls", names, found.validated)


def _machine(found: Results) -> Iterator[str]:
    if found.noise:
        said = "; ".join(f"{of} {share:.1%}" for of, share in found.noise.items())
        yield f"<p>CPU time that other processes took meanwhile: {escape(said)}</p>"
    rows = [(name, str(value)) for name, value in found.machine.items() if value not in ("", None)]
    if rows:
        yield table("The machine, as the results describe it", ("what", "value"), rows)


def _compared(before: Results, after: Results) -> Iterator[str]:
    rows = [
        (str(each.key), each.before_us, each.after_us, each.ratio, each.verdict)
        for each in compare(before, after)
    ]
    if rows:
        names = ("what", "before, µs", "after, µs", "ratio", "verdict")
        yield table("Medians of both files, and whether they differ by more than chance", names, rows)
    else:
        yield "<p>The two files have no measurement in common.</p>"
