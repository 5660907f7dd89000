# SPDX-License-Identifier: Apache-2.0
"""Decides what the page says: noise first, then bars with a sentence each, a table of every kind, details folded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from typing import Any, NamedTuple

from kvlink.errors import ConfigError

from ..harness.results import KINDS, MOST_SHARE, Row, brief, checked, differences, key_of, number, perhaps
from ..measurements.rank_handoffs import PARTS
from ..peers.contender import BARE, KVLINK, is_cma
from ..peers.modes import HOST, TCP
from .comparison import compare
from .html import Bar, bars, document, folded, size_text, table, time_text

_NAMES = {
    "nixl": "NIXL",
    "ucx": "UCX",
    "uccl": "UCCL",
    "mooncake": "Mooncake",
    "infinistore": "InfiniStore",
    "openmpi": "Open MPI",
}
_OVER_KVLINK = " over kvlink"
_WHERE = {HOST: "on one host", TCP: "over TCP"}
_TIMES = 2.0  # from which on a ratio reads better than percents
_NOISE = 0.02
_CONTESTS = {"peers": "Contests", "burst": "Bursts"}
_TITLES = {
    "migrate": "Handoffs", "cold": "First handoffs after a start", "saturation": "Saturation",
    "beside": "Handoffs beside decoding", "burst": "Bursts of public suites", "gpu": "GPU memory",
    "plan": "Planning", "control": "The coordinator", "scale": "Fleets of a coordinator",
    "simulation": "Simulated fleets", "validation": "The simulation beside real pulls", "prediction": "Predictions",
    "fit": "Fitted cost models",
}  # fmt: skip


@dataclass(slots=True)
class Results:
    """The content of one file: for each row of any of its runs, the run with the median cost."""

    name: str
    runs: Mapping[str, Sequence[Row]]
    machines: list[Row] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Returns how many rows there are."""
        return sum(map(len, self.rows.values()))


def results_of(name: str, runs: Mapping[str, Sequence[Row]]) -> Results:
    """Takes the rows of all kinds that are known, and ignores others. Raises ConfigError for malformed ones."""
    found, alike = Results(name, runs), dict[tuple[Any, ...], list[Row]]()
    for row in chain.from_iterable(runs.values()):
        kind = row.get("kind")
        if kind == "machine":
            found.machines.append(row)
        elif kind == "noise":
            busy = number(row, "other_load")
            found.noise[str(row.get("of"))] = max(busy, found.noise.get(str(row.get("of")), 0.0))
        elif isinstance(kind, str) and kind in KINDS:
            alike.setdefault(_hashable(row), []).append(checked(row))
    for key, rows in alike.items():
        cost = KINDS[key[0]].cost
        known = [row for row in rows if cost and perhaps(row, cost) is not None]
        ranked = sorted(known, key=lambda row: number(row, cost)) or rows
        found.rows.setdefault(key[0], []).append({**ranked[(len(ranked) - 1) // 2], "runs": len(ranked)})
    return found


def _hashable(row: Row) -> tuple[Any, ...]:
    try:
        hash(key := key_of(row))
    except TypeError as error:
        raise ConfigError(f"a row of the results has a list where it needs a value: {error}") from error
    return key


def write(results: Sequence[Results], title: str = "") -> str:
    """Returns the whole page: each file separately, then the second compared with the first."""
    title = title or _title(results)
    sections = [
        (f"{found.name}: {name}" if len(results) > 1 else name, part)
        for found in results
        for name, part in _sections(found)
        if part
    ]
    if len(results) == 2:
        sections.insert(0, (f"{results[1].name} against {results[0].name}", _compared(*results)))
    links = "".join(f'<li><a href="#s{at}">{escape(name)}</a></li>' for at, (name, _) in enumerate(sections))
    body = ["<header>", f"<h1>{escape(title)}</h1>", *map(_run, results), _warnings(results)]
    body += [
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(sections) > 1 else "",
        "</header><main>",
    ]
    for at, (name, part) in enumerate(sections):
        body.append(f'<section aria-labelledby="s{at}"><h2 id="s{at}">{escape(name)}</h2>{part}</section>')
    return document(title, [*body, "</main>"])


def _title(results: Sequence[Results]) -> str:
    hosts = dict.fromkeys(
        str(each["host"]) for found in results for each in found.machines if each.get("host")
    )
    return f"kvlink measured on {' and '.join(hosts)}" if hosts else "kvlink measured"


def _run(found: Results) -> str:
    """Returns where and when the results of one file were measured, and how busy the machine was with other things."""
    machine: Row = found.machines[0] if found.machines else {}
    at = str(machine.get("at", "")).replace("T", " ").replace("+00:00", " UTC")
    named = ((name, machine.get(name)) for name in ("cores", "kvlink", "commit"))
    said = [found.name, str(machine.get("host", "")), str(machine.get("cpu", "")), at]
    said += [f"{value} cores" if name == "cores" else f"{name} {value}" for name, value in named if value]
    runs = max((row["runs"] for rows in found.rows.values() for row in rows), default=1)
    said += [f"{runs} runs"] if runs > 1 else []
    return f'<p class="soft">{escape(" · ".join(filter(None, said)))}</p>'


def _warnings(results: Sequence[Results]) -> str:
    said = [
        f"{found.name}: other processes took {busy:.1%} of all CPU time during {of}, so its results are noisy."
        for found in results
        for of, busy in found.noise.items()
        if busy >= _NOISE
    ]
    said += differences(each for found in results for each in found.machines)
    return "".join(f'<p class="warn">{escape(each)}</p>' for each in said)


def _compared(before: Results, after: Results) -> str:
    rows = [each.row() for each in compare(before.runs, after.runs)]
    few = "not enough runs" in {row["verdict"] for row in rows}
    return (
        table("Both files, with the run as the unit (permutation test)", rows)
        or "<p>The two files have no measurement in common.</p>"
    ) + (
        "<p>A verdict needs five runs a side: <code>kvlink bench compare</code> makes them.</p>"
        if few
        else ""
    )


def _sections(found: Results) -> Iterator[tuple[str, str]]:
    peers = [row for kind in _CONTESTS for row in found.rows.get(kind, ()) if "why_not" not in row]
    lead = "".join(_titled(headline(each)) + chart(each) for each in contests(peers))
    yield "kvlink beside other libraries", lead
    yield (
        "Pulls over each transport",
        "".join(_titled(said) + drawn for said, drawn in pulls(found.rows.get("pull", ()))),
    )
    yield "Where the time of a handoff goes", _handoffs(found.rows.get("migrate", ()))
    yield (
        "How costs grow",
        "".join(_growths([*found.rows.get("growth", ()), *found.rows.get("exponent", ())])),
    )
    for kind, title in _TITLES.items():
        if kind != "migrate":
            yield title, table(f"{title}: all rows", map(_shown, found.rows.get(kind, ())))
    yield "Details", "".join(_details(found))


def _shown(row: Row) -> dict[str, object]:
    return {name: value for name, value in brief(row).items() if name not in ("kind", "run")} | (
        {"runs": row["runs"]} if row["runs"] > 1 else {}
    )


def _titled(said: str) -> str:
    return f"<h3>{escape(said)}</h3>"


def _details(found: Results) -> Iterator[str]:
    for kind, title in {**_CONTESTS, "pull": "Pulls", "migrate": "Handoffs"}.items():
        rows = [row for row in found.rows.get(kind, ()) if "why_not" not in row]
        yield folded(
            title, table(f"{title}: times, speed, and CPU time of both processes", map(_shown, rows))
        )
    contending = [row for kind in _CONTESTS for row in found.rows.get(kind, ())]
    settings = {
        (row.get("path"), row.get("peer"), row.get("mode")): {
            name: row.get(name) for name in ("path", "peer", "mode", "version", "settings")
        }
        for row in contending
        if "why_not" not in row
    }
    yield folded("Versions and settings", table("Versions and settings of each way", settings.values()))
    absent = [
        {name: row.get(name) for name in ("peer", "mode", "path", "why_not")}
        for row in contending
        if "why_not" in row
    ]
    yield folded("Not measured", table("Ways that were not measured", absent))
    machine: list[dict[str, object]] = [
        {"what": name, "value": str(value)}
        for each in found.machines[:1]
        for name, value in each.items()
        if value not in ("", None)
    ]
    yield folded("Machine", table("The machine, as the results describe it", machine))


class Contest(NamedTuple):
    """Rows of one path and shape, fastest first: kvlink's transports, one mode of each library, the bare calls."""

    ours: list[Row]
    others: list[Row]
    limits: list[Row]

    def limit_of(self, row: Row) -> Row | None:
        """Returns the bare calls that limit a transport of kvlink."""
        return next((each for each in self.limits if is_cma(each) == is_cma(row)), None)


def contests(rows: Sequence[Row]) -> list[Contest]:
    """Returns the contest of each path and shape that kvlink and at least one other way took part in."""
    shapes: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda each: number(each, "p50_us")):
        if row.get("path") in _WHERE:
            shapes.setdefault((list(_WHERE).index(row["path"]), *_shape(row)), []).append(row)
    found = []
    for shape in sorted(shapes):
        sides: dict[str, list[Row]] = {}
        for row in shapes[shape]:
            sides.setdefault(_library(row), []).append(row)
        ours, bare = sides.pop(KVLINK, []), sides.pop(BARE, [])
        kinds = dict.fromkeys(map(is_cma, ours))
        limits = [next((row for row in bare if is_cma(row) == cma), None) for cma in kinds]
        if ours and (sides or bare):
            found.append(
                Contest(ours, [modes[0] for modes in sides.values()], [row for row in limits if row])
            )
    return found


def _shape(row: Row) -> tuple[Any, ...]:
    """Returns what alike transfers share, in the order of the page."""
    if row.get("kind") == "burst":
        return (
            1,
            str(row.get("workload")),
            *(_count(row, name) for name in ("tokens", "page_tokens", "requests")),
        )
    return 0, row["blocks"] == 1, _count(row, "blocks"), _count(row, "block_bytes")


def _what(row: Row) -> str:
    """Returns the name of what is moved."""
    if row.get("kind") == "burst":
        requests, tokens = _count(row, "requests"), _count(row, "tokens")
        many = f"{requests:,} requests" if requests != 1 else "One request"
        return (
            f"{many} of {tokens:,} tokens of {row.get('workload')}, pages of {_count(row, 'page_tokens'):,},"
        )
    many = f"{_count(row, 'blocks'):,} blocks of" if row["blocks"] != 1 else "One block of"
    return f"{many} {size_text(_count(row, 'block_bytes'))}"


def _count(row: Row, name: str) -> int:
    return round(number(row, name, 1e15))


def headline(contest: Contest) -> str:
    """Returns the result in one sentence, with the tail."""
    ours, longest = contest.ours[0], _longest(contest)
    us = number(ours, "p50_us")
    said = f"{_what(ours)} {_WHERE[ours['path']]}"
    said += f": kvlink takes {time_text(us, longest)}"
    said += f" over {ours['mode']}" if ours["path"] == HOST else ""
    tail = perhaps(ours, "p99_us")
    said += f" (p99 {time_text(tail, longest)})" if tail is not None else ""
    other = next((row for row in contest.others if not _library(row).endswith(_OVER_KVLINK)), None)
    if other:
        return f"{said}, {_against(ours, other)}"
    limit = contest.limit_of(ours)
    return f"{said}, {_share_text(number(limit, 'p50_us') / us)}" if limit else said


def _share_text(share: float) -> str:
    """Returns a share of the limit. One that is passed is said to be none."""
    return (
        "faster than bare calls, which are no limit here"
        if share > MOST_SHARE
        else f"{share:.0%} of the limit's speed"
    )


def _against(ours: Row, other: Row) -> str:
    name, ratio = _library(other), number(other, "p50_us") / number(ours, "p50_us")
    ends = [perhaps(row, f"p50_{end}_us") for row in (ours, other) for end in ("low", "high")]
    if None not in ends and ends[0] <= ends[3] and ends[2] <= ends[1]:  # type: ignore[operator]
        return f"no measurable difference from {name} in this run"
    if ratio >= _TIMES:
        return f"{ratio:.1f} times as fast as {name}"
    if ratio >= 1:
        return f"{1 - 1 / ratio:.0%} less than {name}"
    return (
        f"{1 / ratio - 1:.0%} more than {name}"
        if 1 / ratio < _TIMES
        else f"{1 / ratio:.1f} times that of {name}"
    )


def _library(row: Row) -> str:
    name = _NAMES.get(str(row.get("peer")), str(row.get("peer")))
    return f"{name}{_OVER_KVLINK}" if row.get("peer") != KVLINK and KVLINK in str(row.get("mode")) else name


def _longest(contest: Contest) -> float:
    return max(number(row, "p50_us") for side in contest for row in side)


def chart(contest: Contest) -> str:
    """Returns the bars of one contest."""
    longest = _longest(contest)

    def bar(row: Row, kind: str = "") -> Bar:
        us, limit = number(row, "p50_us"), contest.limit_of(row) if kind == "ours" else None
        share = number(limit, "p50_us") / us if limit else 0.0
        note = f"{share:.0%} of limit" if limit and share <= MOST_SHARE else "no limit" if limit else ""
        name = "Bare calls" if kind == "limit" else _library(row)
        return Bar(name, [us], time_text(us, longest), kind, str(row.get("mode")), note)

    drawn = [bar(row, "ours") for row in contest.ours] + [bar(row) for row in contest.others]
    drawn += [bar(row, "limit") for row in contest.limits]
    return bars(f"{headline(contest)}. Median time of one transfer; less is better.", drawn)


def pulls(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yields a sentence and bars for each transport of `bench pull`: speed at each shape, the limit as a line."""
    for transport in dict.fromkeys(str(row.get("transport")) for row in rows if "gib_per_s" in row):
        alike = [row for row in rows if str(row.get("transport")) == transport]
        shares = [share for row in alike if (share := perhaps(row, "of_limit")) is not None]
        said = f"{transport}: up to {max(number(row, 'gib_per_s') for row in alike):.3g} GiB/s"
        true = [share for share in shares if share <= MOST_SHARE]
        if true:
            said += f", {' to '.join(dict.fromkeys((f'{min(true):.0%}', f'{max(true):.0%}')))} of the limit's speed"
        tails = [us / number(row, "p50_us") for row in alike if (us := perhaps(row, "p99_us")) is not None]
        said += f", p99 up to {max(tails):.1f} times the median" if tails else ""
        caption = f"{said}. Speed of one transfer at a time; more is better. The line is the limit."
        yield said, bars(caption, list(map(_speed, alike)))


def _speed(row: Row) -> Bar:
    speed, limit, share = number(row, "gib_per_s"), perhaps(row, "limit_gib_per_s"), perhaps(row, "of_limit")
    true = share is not None and share <= MOST_SHARE
    note = (
        f"{share:.0%} of limit" if true else "no limit known" if share is None else "faster than bare calls"
    )
    more = [str(row[name]) for name in ("order", "memory") if row.get(name) not in (None, "random", "own")]
    name = f"{_count(row, 'blocks'):,} × {size_text(_count(row, 'block_bytes'))}"
    return Bar(
        name,
        [speed],
        f"{speed:.3g} GiB/s",
        "ours",
        ", ".join(more),
        note,
        max(limit or 0.0, speed) if true else None,
    )


def _handoffs(rows: Sequence[Row]) -> str:
    def bar(row: Row) -> Bar:
        parts = [perhaps(row, f"{part}_us") or 0.0 for part in PARTS]
        p50, tail = number(row, "p50_us"), perhaps(row, "p99_us")
        ranks = "" if str(row.get("tp")) == "1" else f", TP {row.get('tp')}"
        mode = f"{row.get('model')}, {_count(row, 'tokens'):,} tokens{ranks}"
        mode += f", {row['arrivals']}" if row.get("arrivals") else ""
        note = (
            f"p99 {time_text(tail)}"
            if tail is not None
            else f"max {time_text(perhaps(row, 'max_us') or p50)}"
        )
        note += ", unstable" if row.get("unstable") else ""
        return Bar(str(row.get("transport")), parts, time_text(p50), "", mode, note)

    drawn = [bar(row) for row in rows if math.isfinite(perhaps(row, "p50_us") or math.inf)]
    return bars("Medians of each part of a handoff; less is better.", drawn, PARTS) if drawn else ""


def _growths(rows: Sequence[Row]) -> Iterator[str]:
    for of in dict.fromkeys(str(row.get("of")) for row in rows):
        costs: dict[str, dict[str, object]] = {}
        for row in rows:
            if str(row.get("of")) == of:
                line = costs.setdefault(str(row.get("cost")), {"cost": str(row.get("cost"))})
                if "number" in row:
                    line[f"{_count(row, 'number'):,}"] = number(row, "value")
                else:
                    line |= {name: row.get(name) for name in ("exponent", "needs", "holds")}
        yield _titled(of) + table(
            f"Costs by {of}, and the largest exponent of the tail: 1 is linear", costs.values()
        )
