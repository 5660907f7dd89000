# SPDX-License-Identifier: Apache-2.0
"""Shows a coordinator's workers, links, leases and errors, and updates them periodically."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    async def look() -> None:
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
            await look()
            return
        with q_pressed() as pressed, live:
            looking = start_awaited(look())
            await asyncio.wait([looking, pressed], return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
            looking.cancel()


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
    tables = [_links(shown["links"]), _workers(shown["workers"]), _errors(shown["errors"])]
    return Group(head, *(part for table in tables if table.row_count for part in ("", Fitted(table, _FIRST))))


def _links(links: Iterable[Row]) -> Table:
    busiest = sorted(links, key=lambda link: -link["bytes_per_s"])
    table = _table(
        "owner",
        "reader",
        "transport",
        ">rate",
        ">transfers/s",
        ">p50",
        ">p99",
        ">queued",
        ">failed",
        ">stale",
    )
    for link in busiest[:_MOST_LINKS]:
        table.add_row(
            escape(link["from"]),
            escape(link["to"]),
            escape(link["transport"]) + ("" if link["connected"] else " [red]down[/]"),
            f"{bytes_text(link['bytes_per_s'])}/s",
            f"{link['transfers_per_s']:,.0f}",
            seconds_text(link["p50_s"]),
            seconds_text(link["p99_s"]),
            *(f"{link[name]:,}" for name in ("queued", "failed", "stale")),
        )
    if len(busiest) > _MOST_LINKS:
        table.caption = f"the busiest {_MOST_LINKS} of {len(busiest)} links"
    return table


def _workers(workers: Iterable[Row]) -> Table:
    table = _table(
        "worker",
        "state",
        ">receives",
        ">leases",
        ">oldest",
        ">pinned blocks",
        ">settled",
        ">expired",
        ">fenced",
    )
    for worker in workers:
        leases = worker["leases"]
        if leases is None:
            table.add_row(escape(worker["worker"]), "[dim]no report here[/]" + _draining(worker))
            continue
        state = f"[yellow]silent {worker['age_s']:.0f} s[/]" if worker["stale"] else "[green]reporting[/]"
        table.add_row(
            escape(worker["worker"]),
            state + _draining(worker),
            f"{bytes_text(worker['bytes_per_s'])}/s",
            f"{leases['active_leases']:,}",
            seconds_text(leases["oldest_lease_s"]),
            f"{leases['pinned_blocks']:,} of {leases['pool_blocks']:,}",
            *(f"{leases[name]:,}" for name in ("settled", "expired", "fenced_readers")),
        )
    return table


def _draining(worker: Row) -> str:
    return ", [yellow]draining[/]" if worker["draining"] else ""


def _errors(errors: Sequence[Row]) -> Table:
    table = _table("worker", "error", ">count", ">now")
    for error in sorted(errors, key=lambda error: (-error["per_s"], -error["number"])):
        now = f"[red]{error['per_s']:.1f}/s[/]" if error["per_s"] else "-"
        table.add_row(escape(error["worker"]), escape(error["reason"]), f"{error['number']:,}", now)
    return table


def _table(*columns: str) -> Table:
    """Returns a table whose columns with a leading `>` are right-aligned, for numbers."""
    table = plain_table()
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(name, justify="right" if name != column else "left", overflow="fold")
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
