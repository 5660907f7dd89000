# SPDX-License-Identifier: Apache-2.0
"""Leads the report: for each shape one sentence, and kvlink's time beside that of each library and of the limit.

Bars are HTML, so they begin at zero, fit a phone, and are a table for a screen reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from ..peers.contender import BARE, KVLINK
from ..peers.modes import HOST, TCP
from .measures import Measure, size_text
from .tables import time_text

_NAMES = {"nixl": "NIXL", "ucx": "UCX", "uccl": "UCCL", "mooncake": "Mooncake", "infinistore": "InfiniStore"}
_WHERE = {HOST: "on one host", TCP: "over TCP"}
_CMA_LIMIT = "process_vm_readv"  # bare calls that limit cma alone
_TIMES = 2.0  # from which on a ratio reads better than percents


class Contest(NamedTuple):
    """Measures of one path and shape, fastest first: kvlink's transports, one mode of each library, the bare calls."""

    ours: Sequence[Measure]
    others: Sequence[Measure]
    limits: Sequence[Measure]

    def limit_of(self, measure: Measure) -> Measure | None:
        """Returns the bare calls that limit a transport of kvlink."""
        alike = [limit for limit in self.limits if (_mode(limit) == _CMA_LIMIT) == (_mode(measure) == "cma")]
        return alike[0] if alike else None


def contests(measures: Sequence[Measure]) -> list[Contest]:
    """Returns the contest of each path and shape that kvlink and at least one other way took part in."""
    shapes: dict[tuple[str, int, int], list[Measure]] = {}
    for measure in sorted(measures, key=lambda each: each.p50_us):
        if measure.key.path in _WHERE:
            shapes.setdefault((measure.key.path, measure.key.blocks, measure.key.block_bytes), []).append(
                measure
            )
    found = []
    for shape in sorted(shapes, key=_order):
        sides: dict[str, list[Measure]] = {}
        for measure in shapes[shape]:
            sides.setdefault(_library(measure), []).append(measure)
        ours, bare = sides.pop(KVLINK, []), sides.pop(BARE, [])
        others = [modes[0] for modes in sides.values()]
        if ours and (others or bare):
            found.append(Contest(ours, others, _limits(ours, bare)))
    return found


def _order(shape: tuple[str, int, int]) -> tuple[int, bool, int, int]:
    path, blocks, block_bytes = shape
    return list(_WHERE).index(path), blocks == 1, blocks, block_bytes


def _limits(ours: Sequence[Measure], bare: Sequence[Measure]) -> list[Measure]:
    """Returns the fastest bare calls for each kind of memory that kvlink moved."""
    kinds = dict.fromkeys(_mode(each) == "cma" for each in ours)
    fastest = [next((b for b in bare if (_mode(b) == _CMA_LIMIT) == cma), None) for cma in kinds]
    return sorted((each for each in fastest if each is not None), key=lambda each: each.p50_us)


def headline(contest: Contest) -> str:
    """Returns the result in one sentence."""
    ours, longest = contest.ours[0], _longest(contest)
    key = ours.key
    what = f"{key.blocks:,} blocks of" if key.blocks > 1 else "One block of"
    said = f"{what} {size_text(key.block_bytes)} {_WHERE[key.path]}: kvlink takes {time_text(ours.p50_us, longest)}"
    if key.path == HOST:
        said += f" over {_mode(ours)}"
    if contest.others:
        return f"{said}, {_against(ours, contest.others[0])}"
    limit = contest.limit_of(ours)
    return f"{said}, {limit.p50_us / ours.p50_us:.0%} of the limit's speed" if limit else said


def _against(ours: Measure, other: Measure) -> str:
    name, ratio = library_name(other), other.p50_us / ours.p50_us
    if _overlap(ours, other):
        return f"no measurable difference from {name}"
    if ratio >= _TIMES:
        return f"{ratio:.1f} times as fast as {name}"
    if ratio >= 1:
        return f"{1 - 1 / ratio:.0%} less than {name}"
    return (
        f"{1 / ratio - 1:.0%} more than {name}"
        if 1 / ratio < _TIMES
        else f"{1 / ratio:.1f} times that of {name}"
    )


def _overlap(one: Measure, two: Measure) -> bool:
    ends = (one.low_us, one.high_us, two.low_us, two.high_us)
    if any(end is None for end in ends):
        return False
    low_one, high_one, low_two, high_two = (end or 0.0 for end in ends)
    return low_one <= high_two and low_two <= high_one


def chart(contest: Contest) -> str:
    """Returns the bars of one contest."""
    longest = _longest(contest)
    rows = [*(("ours", each) for each in contest.ours), *(("", each) for each in contest.others)]
    rows += [("limit", each) for each in contest.limits]
    return _bars(
        f"{headline(contest)}. Median time of one transfer; less is better.",
        ("library", "", "time"),
        (
            _bar(kind, each, contest.limit_of(each) if kind == "ours" else None, longest)
            for kind, each in rows
        ),
    )


def _longest(contest: Contest) -> float:
    return max(each.p50_us for each in (*contest.ours, *contest.others, *contest.limits))


def _bar(kind: str, measure: Measure, limit: Measure | None, longest: float) -> str:
    name = "Limit" if kind == "limit" else library_name(measure)
    note = f"<small>{limit.p50_us / measure.p50_us:.0%} of limit</small>" if limit else ""
    return _row(
        kind, name, _mode(measure), measure.p50_us / longest, time_text(measure.p50_us, longest), note
    )


def pulls(measures: Sequence[Measure]) -> Iterator[tuple[str, str]]:
    """Yields a sentence and bars for each transport of `bench pull`: speed at each shape beside the bare calls."""
    by_way: dict[str, list[tuple[Measure, Measure | None]]] = {}
    limits = {each.key._replace(way=""): each for each in measures if _library(each) == BARE}
    for measure in measures:
        if _library(measure) == KVLINK and measure.key.path not in _WHERE:
            limit = limits.get(measure.key._replace(way=""))
            by_way.setdefault(measure.key.way, []).append((measure, limit))
    for way, found in by_way.items():
        most = max(each.gib_per_s for pair in found for each in pair if each is not None)
        shares = [measure.gib_per_s / limit.gib_per_s for measure, limit in found if limit]
        said = f"{way.partition(' ')[2]}: up to {max(measure.gib_per_s for measure, _ in found):.3g} GiB/s"
        if shares:
            said += f", {' to '.join(dict.fromkeys((f'{min(shares):.0%}', f'{max(shares):.0%}')))} of the limit's speed"
        caption = f"{said}. Speed of one transfer at a time; more is better. The line is the limit."
        yield said, _bars(caption, ("transfer", "", "speed"), (_speed(*pair, most) for pair in found))


def _speed(measure: Measure, limit: Measure | None, most: float) -> str:
    shape = f"{measure.key.blocks:,} × {size_text(measure.key.block_bytes)}"
    note = f"<small>{measure.gib_per_s / limit.gib_per_s:.0%} of limit</small>" if limit else ""
    mark = limit.gib_per_s / most if limit else None
    return _row("ours", shape, "", measure.gib_per_s / most, f"{measure.gib_per_s:.3g} GiB/s", note, mark)


def _row(
    kind: str, name: str, mode: str, share: float, value: str, note: str, mark: float | None = None
) -> str:
    second = f"<br><small>{escape(mode)}</small>" if mode else ""
    line = "" if mark is None else f'<span class="mark" style="left:{mark:.1%}"></span>'
    return (
        f'<tr class="{kind}"><th scope="row">{escape(name)}{second}</th><td class="track">'
        f'<span class="bar" style="width:{share:.1%}"></span>{line}</td>'
        f"<td>{escape(value)}{'<br>' if note else ''}{note}</td></tr>"
    )


def _bars(caption: str, names: Sequence[str], rows: Iterator[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' if name else "<td></td>" for name in names)
    return (
        f'<table class="bars"><caption class="unseen">{escape(caption)}</caption>'
        f'<thead class="unseen"><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def library_name(measure: Measure) -> str:
    """Returns the name of the library that moved the blocks, as it writes itself."""
    library = _library(measure)
    return _NAMES.get(library, library)


def _library(measure: Measure) -> str:
    return measure.key.way.partition(" ")[0]


def _mode(measure: Measure) -> str:
    return measure.key.way.partition(" ")[2]
