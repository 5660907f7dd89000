# SPDX-License-Identifier: Apache-2.0
"""Shows a coordinator's workers, links, leases and errors, and updates them periodically."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvlink.cli.status import address_of, num_workers
from kvlink.cli.tables import (
    Fitted,
    age_text,
    bytes_text,
    make_console,
    plain_table,
    print_json,
    seconds_text,
)
from kvlink.control.client import CoordinatorClient
from kvlink.errors import CoordinatorUnavailable
from kvlink.monitoring.fleet_view import plain
from kvlink.runtime.supervised import guarded, start_awaited

_MOST_LINKS = 20
_QUIT = "[dim]q: quit[/]"
_FIRST = (
    "worker", "owner", "reader", "error", "transport", "rate", "state", "count", "now", "p99", "failed", "receives",
    "leases", "expired", "stale", "p50",
)  # fmt: skip
"""The columns by importance."""

Row = Mapping[str, Any]


def watch(address: str, every_s: float, rounds: int, as_json: bool) -> None:
    """Updates until interrupted, or `rounds` times if that is not 0. Raises CoordinatorUnavailable."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(address_of(address), every_s, rounds, as_json))


async def _watch(address: str, every_s: float, rounds: int, as_json: bool) -> None:
    console = make_console()
    live = None if as_json or not console.is_terminal else Live(console=console, screen=True)

    async def refresh() -> None:
        for number in itertools.count(1):
            try:
                shown = plain(await client.status(), await client.overview())
                _show(shown, address, console, live, as_json)
            except CoordinatorUnavailable as error:
                if live is None:
                    raise
                live.update(Group(f"[red]{escape(str(error))}[/]", _QUIT), refresh=True)
            if number == rounds:
                return
            await asyncio.sleep(every_s)

    async with CoordinatorClient(address) as client:
        if live is None:
            await refresh()
            return
        with q_pressed() as pressed, live:
            refreshing = start_awaited(refresh())
            await asyncio.wait([refreshing, pressed], return_when=asyncio.FIRST_COMPLETED)
            if refreshing.done():
                refreshing.result()
            refreshing.cancel()


def _show(shown: Row, address: str, console: Console, live: Live | None, as_json: bool) -> None:
    if as_json:
        print_json({"address": address, **shown})
    elif live:
        live.update(Group(screen(shown, address), "", _QUIT), refresh=True)
    else:
        console.print(screen(shown, address))


def screen(shown: Row, address: str) -> RenderableType:
    """Returns one screen. Names come from other hosts, so their markup is escaped."""
    counts = shown["coordinator"]
    received = sum(worker["bytes_per_s"] or 0 for worker in shown["workers"])
    head = (
        f"[bold]kvlink[/] {escape(address)}  up {age_text(counts['uptime_s'])}   {num_workers(counts)}, "
        f"{counts['tickets']} tickets, {counts['waiting_claims']} claims waiting   "
        f"receiving [bold]{bytes_text(received)}/s[/]"
    )
    errors = sorted(shown["errors"], key=lambda error: (-error["per_s"], -error["number"]))
    tables = [_links(shown["links"]), _table(map(_worker, shown["workers"])), _table(map(_error, errors))]
    return Group(head, *(part for table in tables if table.row_count for part in ("", Fitted(table, _FIRST))))


def _links(links: Iterable[Row]) -> Table:
    busiest = sorted(links, key=lambda link: -link["bytes_per_s"])
    table = _table(
        {
            "owner": escape(link["from"]),
            "reader": escape(link["to"]),
            "transport": escape(link["transport"]) + ("" if link["connected"] else " [red]down[/]"),
            ">rate": f"{bytes_text(link['bytes_per_s'])}/s",
            ">transfers/s": f"{link['transfers_per_s']:,.0f}",
            ">p50": seconds_text(link["p50_s"]),
            ">p99": seconds_text(link["p99_s"]),
            **{f">{name}": f"{link[name]:,}" for name in ("queued", "failed", "stale")},
        }
        for link in busiest[:_MOST_LINKS]
    )
    if len(busiest) > _MOST_LINKS:
        table.caption = f"the busiest {_MOST_LINKS} of {len(busiest)} links"
    return table


def _worker(worker: Row) -> Row:
    draining = ", [yellow]draining[/]" if worker["draining"] else ""
    leases = worker["leases"]
    if leases is None:
        return {"worker": escape(worker["worker"]), "state": "[dim]no report here[/]" + draining}
    state = f"[yellow]silent {worker['age_s']:.0f} s[/]" if worker["stale"] else "[green]reporting[/]"
    return {
        "worker": escape(worker["worker"]),
        "state": state + draining,
        ">receives": f"{bytes_text(worker['bytes_per_s'])}/s",
        ">leases": f"{leases['active_leases']:,}",
        ">oldest": seconds_text(leases["oldest_lease_s"]),
        ">pinned blocks": f"{leases['pinned_blocks']:,} of {leases['pool_blocks']:,}",
        ">settled": f"{leases['settled']:,}",
        ">expired": f"{leases['expired']:,}",
        ">fenced": f"{leases['fenced_readers']:,}",
    }


def _error(error: Row) -> Row:
    return {
        "worker": escape(error["worker"]),
        "error": escape(error["reason"]),
        ">count": f"{error['number']:,}",
        ">now": f"[red]{error['per_s']:.1f}/s[/]" if error["per_s"] else "-",
    }


def _table(rows: Iterable[Row]) -> Table:
    """Returns a table of marked-up texts. Columns with a leading `>` are right-aligned, for numbers."""
    rows = list(rows)
    table = plain_table()
    names = max((list(row) for row in rows), key=len, default=[])
    for name in names:
        table.add_column(name.lstrip(">"), justify="right" if name[0] == ">" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    return table


@contextmanager
def q_pressed() -> Iterator[asyncio.Future[None]]:
    """Yields a future that completes once q is pressed; it never completes where stdin is not a terminal.

    Restores the terminal's settings on exit.
    """
    loop = asyncio.get_running_loop()
    pressed: asyncio.Future[None] = loop.create_future()
    if sys.stdin is None or not sys.stdin.isatty():
        yield pressed
        return
    keyboard = sys.stdin.fileno()

    def read() -> None:
        try:
            keys = os.read(keyboard, 64)
        except OSError:  # the terminal is gone
            keys = b""
        if not keys:
            loop.remove_reader(keyboard)
        elif set(keys) & set(b"qQ") and not pressed.done():
            pressed.set_result(None)

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, guarded("keyboard", read))
    try:
        yield pressed
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
