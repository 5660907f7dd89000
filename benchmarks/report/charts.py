# SPDX-License-Identifier: Apache-2.0
"""Draws charts as SVG text. This is the only file that needs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from itertools import cycle
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from ..measurements.rank_handoffs import PHASES
from ..peers.contest import QUANTILES
from .measures import Measure, Simulated, size_text
from .style import LIMIT, OTHERS, OURS, variables

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "kvlink", "font.family": "sans-serif", "font.size": 9, "grid.alpha": 0.25,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "legend.frameon": False,
    "text.parse_math": False, "axes.axisbelow": True,
}  # fmt: skip
_WIDE = 500  # as a ratio of the ends, from which on only powers of ten fit
_MOST_SHARE = 99  # of transfers in a distribution: a few outliers would hide all others
_MOST_MEDIANS = 5  # of the middle way, in the width of a distribution: one slow way would hide all others
_COLOUR = re.compile("|".join(map(re.escape, variables())))


def _dashes(measures: Sequence[Measure]) -> dict[str, str]:
    """Returns a dash style for each limit."""
    ways = dict.fromkeys(measure.key.way for measure in measures)
    limits = [way for way in ways if way.startswith("bare ")]
    return dict.fromkeys(ways, "-") | dict(zip(limits, cycle(("--", ":", "-.")), strict=False))


def _colours(measures: Sequence[Measure]) -> dict[str, str]:
    """Returns colours: cold ones for kvlink, warm ones for other libraries, grey for limits."""
    ways = list(dict.fromkeys(measure.key.way for measure in measures))
    ours = [way for way in ways if way.startswith("kvlink ")]
    others = [way for way in ways if not way.startswith(("kvlink ", "bare "))]
    found = {way: OURS[index % len(OURS)] for index, way in enumerate(ours)}
    found |= {way: OTHERS[index % len(OTHERS)] for index, way in enumerate(others)}
    return {way: found.get(way, LIMIT) for way in ways}


@mpl.rc_context(_STYLE)
def speeds(measures: Sequence[Measure]) -> str:
    """Draws GiB/s against block size, with dashed limits, for one path and number of blocks."""
    figure, axes = _figure()
    dashes = _dashes(measures)
    for way, colour in _colours(measures).items():
        points = sorted((m.key.block_bytes, m.gib_per_s) for m in measures if m.key.way == way)
        axes.plot(
            *zip(*points, strict=True), dashes[way], marker="o", markersize=3.5, color=colour, label=way
        )
    sizes = sorted({measure.key.block_bytes for measure in measures})
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sizes, list(map(size_text, sizes)), minor=False)
    axes.set_xlabel("block")
    axes.set_ylabel("GiB/s, median")
    return _svg(figure, axes, "Speed against block size")


@mpl.rc_context(_STYLE)
def distributions(measures: Sequence[Measure]) -> str:
    """Draws the share of transfers that took at most so long, for one path and shape."""
    figure, axes = _figure()
    colours, dashes = _colours(measures), _dashes(measures)
    for measure in measures:
        if len(measure.quantiles_us) == len(QUANTILES):
            way = measure.key.way
            shown = [
                each for each in zip(measure.quantiles_us, QUANTILES, strict=True) if each[1] <= _MOST_SHARE
            ]
            axes.plot(*zip(*shown, strict=True), dashes[way], color=colours[way], label=way)
    axes.set_xlim(0, _MOST_MEDIANS * median(measure.p50_us for measure in measures))
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.set_xlabel("µs")
    axes.set_ylabel("% of transfers")
    return _svg(figure, axes, "Share of transfers that took at most so long; slower ones are beyond the edge")


@mpl.rc_context(_STYLE)
def cpu_time(measures: Sequence[Measure]) -> str:
    """Draws CPU seconds per GiB of both processes, for one path and number of blocks."""
    known = [measure for measure in measures if measure.cpu_s_per_gib]
    figure, axes = _figure(height=0.6 + 0.2 * len(known))
    colours = _colours(known)
    labels = [f"{measure.key.way}, {size_text(measure.key.block_bytes)}" for measure in known]
    values = [measure.cpu_s_per_gib or 0.0 for measure in known]
    axes.barh(range(len(known)), values, color=[colours[measure.key.way] for measure in known])
    axes.set_yticks(range(len(known)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("CPU-s / GiB, both processes")
    return _svg(figure, axes, "CPU time of each way", legend=False)


@mpl.rc_context(_STYLE)
def waterfall(phases: Mapping[str, Mapping[str, float]]) -> str:
    """Draws the phases of a migration."""
    figure, axes = _figure(height=0.9 + 0.35 * len(phases))
    names = [name for name in PHASES if name != "whole"]
    starts = [0.0] * len(phases)
    for name, colour in zip(names, (*OURS, *OTHERS), strict=False):
        widths = [found.get(name, 0.0) for found in phases.values()]
        axes.barh(range(len(phases)), widths, left=starts, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(phases)), list(phases))
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("µs, medians of each phase")
    return _svg(figure, axes, "Time of each phase of a handoff")


@mpl.rc_context(_STYLE)
def predictions(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draws (measured, predicted) in µs by transport. Each point's model was not fitted to it."""
    figure, axes = _figure()
    for (name, pairs), colour in zip(points.items(), (*OURS, *OTHERS), strict=False):
        axes.plot(*zip(*pairs, strict=True), "o", color=colour, label=name)
    ends = [value for pairs in points.values() for pair in pairs for value in pair]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], "--", color=LIMIT, label="as measured")
    _log(axes, "x")
    _log(axes, "y")
    axes.set_xlabel("measured, µs")
    axes.set_ylabel("predicted, µs")
    return _svg(figure, axes, "Predicted times against measured ones")


@mpl.rc_context(_STYLE)
def fleets(curve: Sequence[Simulated]) -> str:
    """Draws times of moves against the size of the fleet, for one scene."""
    figure, axes = _figure()
    moved = sorted(fleet for fleet in curve if fleet.p50_us and fleet.p99_us)
    sizes = [fleet.workers for fleet in moved]
    axes.plot(sizes, [fleet.p50_us for fleet in moved], "-o", markersize=3.5, color=OURS[0], label="p50")
    axes.plot(sizes, [fleet.p99_us for fleet in moved], "--o", markersize=3.5, color=OTHERS[0], label="p99")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.set_xlabel("workers, half of them prefill")
    axes.set_ylabel("µs, simulated")
    return _svg(figure, axes, "Time of moves against the size of the fleet")


@mpl.rc_context(_STYLE)
def growth(of: str, costs: Mapping[str, Mapping[int, float]]) -> str:
    """Draws costs against the number that they may grow with. A linear one doubles where the number doubles."""
    figure, axes = _figure()
    for (name, values), colour in zip(costs.items(), cycle((*OURS, *OTHERS)), strict=False):
        points = sorted((number, value) for number, value in values.items() if value > 0)
        if points:
            axes.plot(*zip(*points, strict=True), "-o", markersize=3.5, color=colour, label=name)
    _log(axes, "x")
    _log(axes, "y")
    axes.set_xlabel(of)
    return _svg(figure, axes, f"Costs against {of}")


def _figure(height: float = 3.2) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, figure.subplots()


def _log(axes: Any, name: str) -> None:
    """Formats a logarithmic axis after the data is drawn.

    Labels are plain numbers, so that names from files are never read as formulas.
    """
    getattr(axes, f"set_{name}scale")("log")
    low, high = getattr(axes, f"get_{name}lim")()
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < _WIDE * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure, axes: Any, name: str, *, legend: bool = True) -> str:
    """Returns a figure whose colours are CSS variables, so that the page decides on light and dark."""
    if legend:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawing = text.getvalue()[text.getvalue().index("<svg") :]
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)  # ids that another chart of the page has, too
    drawing = _COLOUR.sub(lambda found: f"var({variables()[found[0]]})", drawing)
    drawing = drawing.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)
    return f'<figure tabindex="0">{drawing}<figcaption>{escape(name)}</figcaption></figure>'
