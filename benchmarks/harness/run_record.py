# SPDX-License-Identifier: Apache-2.0
"""Begins and ends a benchmark: the machine, the rows, the load of other processes meanwhile, the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from kvlink.cli.tables import make_console, print_json, show_parts

if TYPE_CHECKING:
    from .machine import OtherLoad

_NOISE = 0.02  # of all CPU time; a table reports other load from there on


def begin(as_json: bool) -> OtherLoad:
    """Prints the machine as the first result, and starts to watch the load of other processes."""
    from .machine import OtherLoad, describe

    if as_json:
        print_json({"kind": "machine", **describe()})
    return OtherLoad()


def finish(
    parts: Sequence[Iterable[Mapping[str, Any]]],
    as_json: bool,
    title: str,
    others: OtherLoad | None = None,
    by: str = "",
) -> None:
    """Prints the rows and exits, with code 1 if any row says that its bytes were wrong.

    With `others`, the results end with the share of CPU time of other processes.
    """
    seen = show_parts(parts, as_json, title, by)
    if others is not None:
        _report_load(others.share(), as_json, title)  # all child processes have ended
    raise typer.Exit(0 if all(row.get("verified", True) for row in seen) else 1)


def _report_load(other_load: float, as_json: bool, title: str) -> None:
    if as_json:
        print_json({"kind": "noise", "of": title, "other_load": other_load})
    elif other_load >= _NOISE:
        make_console().print(
            f"other processes had {other_load:.1%} of all CPU time meanwhile, so the results are noisy"
        )
