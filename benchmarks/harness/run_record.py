# SPDX-License-Identifier: Apache-2.0
"""How a benchmark begins and ends: what it was measured on, its rows, what others did meanwhile, the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from kvlink.cli.tables import make_console, print_json, show_parts

if TYPE_CHECKING:
    from .machine import OtherLoad

_NOISE = 0.02  # of all CPU time: a table says when others had as much


def begin(as_json: bool) -> OtherLoad:
    """Results begin with what they were measured on. Watches what others do from now on."""
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
    """Exit code 1 when any row says that its bytes were wrong. `others`: what they had of the CPUs ends the results."""
    seen = show_parts(parts, as_json, title, by)
    if others is not None:
        _tell_of(others.share(), as_json, title)  # all of our processes have ended
    raise typer.Exit(0 if all(row.get("verified", True) for row in seen) else 1)


def _tell_of(other_load: float, as_json: bool, title: str) -> None:
    if as_json:
        print_json({"kind": "noise", "of": title, "other_load": other_load})
    elif other_load >= _NOISE:
        make_console().print(
            f"other processes had {other_load:.1%} of all CPU time meanwhile: not a quiet machine"
        )
