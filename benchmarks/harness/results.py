# SPDX-License-Identifier: Apache-2.0
"""Writes and reads results: JSON lines of one schema for every benchmark, or tables.

A run begins with a line of kind "machine" (machine.describe, schema, run) and ends with one of kind "noise" (of,
other_load). Every line has a `kind`, which KINDS describes, and the `run` that it belongs to. Times end in _us, _ms or
_s; "inf" is the time of a request that failed, and null a number that the sample does not have. `verified` is true if
all transfers were compared byte by byte and right, null if not all were compared (compared, of them), else false.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import typer

from kvlink.cli.tables import Shown, make_console, print_json, show_parts
from kvlink.errors import ConfigError

if TYPE_CHECKING:
    from .machine import OtherLoad

SCHEMA = 1
"""Raised whenever a field of a row changes its meaning."""

Row = Mapping[str, Any]

MOST_SHARE = 1.05
"""A larger share of the limit says that the limit is none: it had less of the machine than what it limits."""
_NOISE = 0.02  # of all CPU time; a table reports other load from there on
_MOST_ROWS = 100_000
_MOST = 1e18
_SEVERAL = ("histogram_us", "quantiles_us", "limits_us", "claim_parts_us")
_FIGURES = ("_us", "_ms", "_s", "_per_gib", "of_limit", "error", "drift", "value", "exponent", "other_load")


class Kind(NamedTuple):
    """Names what identifies a row, the cost by which runs are compared, and the columns of a table by importance."""

    key: str
    cost: str = ""
    columns: str = ""


KINDS = {
    "pull": Kind(
        "transport memory cpus block_bytes blocks order",
        "p50_us",
        "transport block_bytes blocks p50_us p99_us of_limit verified gib_per_s limit p50_us_95 cpu_of_limit "
        "cpu_s_per_gib memory cpus order",
    ),
    "migrate": Kind(
        "transport model tp pp block_tokens layout order tokens slots arrivals prefills",
        "p50_us",
        "transport tokens p50_us p99_us verified failed unstable claim_us wire_us of_bare_claim offer_us of_limit "
        "tp pp slots arrivals achieved_per_s goodput_per_s plan_us post_us validate_us settle_us late_us overhead_us "
        "p50_us_95 of_ttft prefill_ranks_read left_out cpu_s_per_gib started_late",
    ),
    "cold": Kind("transport model tp pp tokens", "first_us", "transport tokens first_us second_us"),
    "beside": Kind(
        "compute transport model tp pp block_tokens layout order tokens prefills",
        "p50_us",
        "compute transport tokens p50_us ratio step_us step_ratio verified failed alone_us step_alone_us p99_us "
        "p50_us_95 tp pp iters steps",
    ),
    "burst": Kind(
        "suite workload path peer mode tokens page_tokens requests",
        "p50_us",
        "peer mode tokens page_tokens requests p50_us of_limit verified gib_per_s p99_us workload path "
        "pieces limit p50_us_95 cpu_s_per_gib iters why_not",
    ),
    "saturation": Kind("transport model tp pp tokens slots"),
    "peers": Kind(
        "path peer mode block_bytes blocks",
        "p50_us",
        "peer mode path block_bytes blocks p50_us p99_us of_limit gib_per_s cpu_s_per_gib verified p50_us_95 why_not",
    ),
    "gpu": Kind(
        "path transport piece_bytes pieces bounce decode",
        "p50_us",
        "path transport bounce decode piece_bytes pieces p50_us p99_us of_limit verified gib_per_s limit "
        "copy_a_piece_us cpu_us tokens pulls p50_ratio host_copies gpu driver",
    ),
    "plan": Kind("layout", "ns_per_descriptor"),
    "control": Kind(
        "what replicas workers",
        "coordinator_cpu_us",
        "what replicas workers p50_us p99_us handoffs_per_s coordinator_cpu_us verified coordinator_busy etcd_cpu_us "
        "etcd_busy handoffs_per_coordinator_cpu_s rounds handoffs",
    ),
    "scale": Kind("what workers phase of", "cpu_s"),
    "growth": Kind("of cost number", "value"),
    "exponent": Kind("of cost", "", "of cost exponent holds to needs"),
    "simulation": Kind(
        "path model load popular lease_s workers",
        "",
        "workers requests p50_us p99_us gib_per_s expired requests_per_s busiest load popular lease_s model path",
    ),
    "validation": Kind(
        "transport readers",
        "",
        "transport readers holds mean_error p50_error p99_error drift p50_us simulated_p50_us verified other_load",
    ),
    "prediction": Kind("path model tokens"),
    "fit": Kind("transport"),
}
_ONLY_IF_SET = ("failed", "unstable", "left_out", "started_late")


class Record:
    """The results of one command: prints the machine first, and the noise at the end."""

    def __init__(self, title: str, as_json: bool) -> None:
        from .machine import OtherLoad, describe

        self._title, self._as_json, self._run = title, as_json, uuid.uuid4().hex[:12]
        self._failing = False
        if as_json:
            print_json({"kind": "machine", "schema": SCHEMA, "run": self._run, **describe()})
        self._others: OtherLoad = OtherLoad()

    def show(self, kind: str, parts: Sequence[Iterable[Row]], by: str = "", title: str = "") -> Sequence[Row]:
        """Prints rows as they come (JSON), or a table, and returns them. A part is computed when it is iterated."""
        seen: list[Row] = []

        def taken(part: Iterable[Row]) -> Iterator[Row]:
            for each in part:
                row = {"kind": kind, **each}
                seen.append(row)
                self._failing |= fails(row)
                if self._as_json:
                    yield _plain({"run": self._run, **row})
                elif row["kind"] == kind:
                    yield brief(row)

        show_parts(
            [taken(part) for part in parts],
            self._as_json,
            title or self._title,
            by,
            KINDS[kind].columns.split(),
        )
        for other in dict.fromkeys(row["kind"] for row in seen if row["kind"] != kind and not self._as_json):
            rows = [brief(row) for row in seen if row["kind"] == other]
            show_parts([rows], False, other, "", KINDS[other].columns.split())
        return seen

    def end(self) -> NoReturn:
        """Prints the share of CPU time of other processes, and exits: with code 1 if any row fails."""
        busy = self._others.share()  # all child processes have ended
        if self._as_json:
            print_json({"kind": "noise", "run": self._run, "of": self._title, "other_load": busy})
        elif busy >= _NOISE:
            make_console().print(
                f"other processes had {busy:.1%} of all CPU time meanwhile, so the results are noisy"
            )
        raise typer.Exit(1 if self._failing else 0)


def publish(kind: str, parts: Sequence[Iterable[Row]], as_json: bool, title: str) -> NoReturn:
    """Prints one kind of rows with the machine and the noise, and exits."""
    record = Record(title, as_json)
    record.show(kind, parts)
    record.end()


def fails(row: Row) -> bool:
    """Returns whether a row says that bytes were wrong, a request failed, or a bound of the gate does not hold."""
    judged = row.get("kind") in ("growth", "exponent", "validation") and row.get("holds") is False
    return judged or row.get("verified", True) is False or bool(row.get("failed"))


def verified(wrong: int, compared: int, of: int) -> dict[str, Any]:
    """Returns the fields that say how many transfers were compared, and whether their bytes were right."""
    return {
        "verified": False if wrong else True if compared == of else None,
        "compared": compared,
        "transfers": of,
    }


def brief(row: Row) -> dict[str, Any]:
    """Returns the columns of a table: those of its kind, by importance. A quantile without support says so."""
    found = dict(row)
    if "p50_low_us" in row:
        ends = [row["p50_low_us"], row.get("p50_high_us")]
        between = "–".join(
            "" if end is None else f"{end:,.3g}" if end < 100 else f"{end:,.0f}" for end in ends
        )
        found["p50_us_95"] = between
    if row.get("p99_us", 0) is None and row.get("max_us") is not None:
        found["p99_us"] = f"max {row['max_us']:,.0f}"
    if row.get("verified", True) is None:
        found["verified"] = f"{row.get('compared')} of {row.get('transfers')}"
    if (row.get("of_limit") or 0) > MOST_SHARE:
        found["of_limit"] = f"{row['of_limit']:.2f} (no limit)"
    hidden: Collection[str] = () if Shown.wide else ("kind", "quantiles_us", "histogram_us", "schema")
    columns = KINDS[row["kind"]].columns.split() if not Shown.wide else []
    kept = [name for name in columns or found if found.get(name) is not None]
    kept = [name for name in kept if found[name] or name not in _ONLY_IF_SET]
    return {
        name: found[name]
        for name in kept
        if name not in hidden
        and not name.endswith(("_low_us", "_high_us"))
        and not isinstance(found[name], dict)
    }


def _plain(value: Any) -> Any:
    """Returns a value that JSON has: "inf" is text, and NaN is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a results file, one per line; other lines are ignored. Raises ConfigError."""
    try:
        with path.open() as file:
            for number, line in enumerate(file):
                if number >= _MOST_ROWS:
                    raise ConfigError(f"{path} has more than {_MOST_ROWS} lines, so it is not a results file")
                if line.startswith("{"):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        if row.get("schema", SCHEMA) != SCHEMA:
                            raise ConfigError(
                                f"{path} has schema {row['schema']!r}, not {SCHEMA}; measure again"
                            )
                        yield row
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a results file of JSON lines: {error}") from error


def runs_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each run, by its id. Rows without one belong to the last line that describes a machine."""
    found: dict[str, list[Row]] = {}
    numbers, current = count(), ""
    for row in rows:
        if row.get("kind") == "machine" and "run" not in row:
            current = f"#{next(numbers)}"
        found.setdefault(str(row.get("run", current)), []).append(row)
    return found


def differences(machines: Iterable[Row]) -> list[str]:
    """Returns, in sentences, in what the machines of several runs differ."""
    listed = list(machines)
    values = {
        name: dict.fromkeys(str(each.get(name)) for each in listed) for name in ("host", "cpu", "cores")
    }
    return [
        f"The runs are of different machines ({name}: {', '.join(found)})."
        for name, found in values.items()
        if len(found) > 1
    ]


def number(row: Row, name: str, most: float = _MOST) -> float:
    """Returns a number of a row that is not negative; "inf" is one. Raises ConfigError for anything else."""
    value = row.get(name)
    if value == "inf":
        return math.inf
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < most:
        raise ConfigError(f"a row of the results has {name} {value!r}")
    return float(value)


def checked(row: Row) -> Row:
    """Returns a row whose figures are numbers or None. Raises ConfigError for others."""
    found = dict(row)
    for name, value in row.items():
        if name.endswith(_FIGURES) and value is not None and name not in _SEVERAL:
            number_or_less = (
                isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST
            )
            found[name] = value if number_or_less else number(row, name)
    return found


def perhaps(row: Row, name: str) -> float | None:
    """Returns the same, or None if the row has null or nothing."""
    return None if row.get(name) is None else number(row, name)


def key_of(row: Row) -> tuple[Any, ...]:
    """Returns what identifies a row among those of a run: its kind, and the values of its key."""
    return row["kind"], *(row.get(name) for name in KINDS[row["kind"]].key.split())


def key_text(key: tuple[Any, ...]) -> str:
    """Formats a key: "pull shm 4,096 256"."""
    return " ".join(
        f"{value:,}" if type(value) is int else str(value) for value in key if value not in (None, "")
    )
