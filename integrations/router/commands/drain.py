# SPDX-License-Identifier: Apache-2.0
"""`kvlink drain` takes a server out of a router's rotation, or lets workers drain, and waits until they may end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlink.cli.checks import Json
from kvlink.cli.examples import examples_of
from kvlink.cli.tables import print_json
from kvlink.control import AgentClients, CoordinatorClient
from kvlink.control.values import WorkerEpoch
from kvlink.errors import ConfigError, CoordinatorUnavailable, KVLinkError, UnknownRequest
from kvlink.hardware.host_identity import this_host
from kvlink.runtime.background import ControlThread
from kvlink.types import HostIdentity, WorkerCard

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_LOOK_EVERY_S = 0.2

Row = dict[str, Any]
Ask = Callable[[str, str], list[Row]]
"""Sends a command ("drain", "force", "resume" or "servers") about a server, and returns the router's rows."""


@app.command(epilog=examples_of("drain"))
def drain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[SERVER | WORKER]",
            help="Drain the server at this base URL, as it was given to the router, or the worker of this name.",
        ),
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            "--router", min=1, max=65535, help="Ask the router that listens on this port of this host."
        ),
    ] = 8000,
    process: Annotated[
        int,
        typer.Option(
            min=0, help="Drain the workers of this process and of those that it started, on this host."
        ),
    ] = 0,
    coordinator: Annotated[
        str, typer.Option(help="Find workers at this coordinator. The default is KVLINK_COORDINATOR.")
    ] = "",
    notice_s: Annotated[
        float, typer.Option(min=0, help="Wait at least this many seconds, so that routers notice.")
    ] = 0.0,
    grace_s: Annotated[
        float, typer.Option(min=0, help="Wait at most this many seconds for running requests and offers.")
    ] = 300.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Let the server get requests again instead.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Drain the server although no other one of its role is up.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take a server out of a router's rotation, or let workers drain, and wait until they may end.

    Then end the server: it may exit without a request being lost. The exit status is 1 if requests still run, or offers
    still wait for their readers, after --grace-s. They go on.

    With the URL of a server, the router sends it no new requests, and this command waits until it has answered those
    that run. When a server answers again at the same URL, it gets requests as before. Run this as the user of the
    router, or as root, on the router's host.

    With the name of a worker, or with --process, the workers show at the coordinator that they drain until they end,
    and this command waits until their offers have been read or have expired.
    """
    if bool(what) == bool(process):
        raise ConfigError("name a server, a worker, or a process by --process, and only one of them")
    if "://" in what:
        command = "resume" if resume else "force" if force else "drain"
        rows = _drain_server(what, port, command, notice_s, grace_s)
    elif resume:
        raise ConfigError("--resume is for servers of a router; a worker drains until it ends")
    else:
        rows = _drain_workers(what, process, coordinator, notice_s, grace_s)
    for row in rows:
        if as_json:
            print_json(row)
        else:
            busy = "offers wait for readers" if row["role"] == "worker" else "requests run"
            typer.echo(f"{row['role']} {row['server']}: {row['state']}, {row['running']} {busy}")
    if not resume and (left := sum(row["running"] for row in rows)):
        still = "offers still wait for readers" if rows[0]["role"] == "worker" else "requests still run"
        raise KVLinkError(
            f"{left} {still} at {what or f'process {process}'} after {grace_s:g} s; wait longer with --grace-s"
        )


def _drain_server(server: str, port: int, command: str, notice_s: float, grace_s: float) -> list[Row]:
    from ..control_socket import asking

    with asking(port) as ask:
        rows = _of(ask(command, server), server)
        if command == "resume":
            return rows
        return wait(lambda: _of(ask("servers", ""), server), notice_s, grace_s)


def _drain_workers(worker: str, process: int, coordinator: str, notice_s: float, grace_s: float) -> list[Row]:
    from kvlink.cli.status import address_of
    from kvlink.runtime.background import ControlThread

    address = address_of(coordinator)
    find = worker_named(address, worker) if worker else workers_of(address, process)
    cards = ControlThread.shared().run(find)
    if not cards:
        typer.echo(f"kvlink: no worker of process {process} is joined at {address}", err=True)
        return []
    with draining(cards) as read_rows:
        return wait(read_rows, notice_s, grace_s)


def wait(
    read_rows: Callable[[], list[Row]],
    notice_s: float,
    grace_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Returns the last rows: after `notice_s`, as soon as nothing runs, or at the end of `grace_s`."""
    began = clock()
    while True:
        rows, waited_s = read_rows(), clock() - began
        if waited_s >= (grace_s if any(row["running"] for row in rows) else notice_s):
            return rows
        sleep(_LOOK_EVERY_S)


def _of(rows: list[Row], server: str) -> list[Row]:
    found = [row for row in rows if row["server"] == server]
    if not found:
        raise ConfigError(f"the router does not know {server}")
    return found


async def worker_named(coordinator: str, worker_id: str) -> list[WorkerCard]:
    """Returns the card of a worker. Raises UnknownRequest, CoordinatorUnavailable."""
    async with CoordinatorClient(coordinator) as client:
        return [await client.worker(worker_id)]


async def workers_of(coordinator: str, process: int) -> list[WorkerCard]:
    """Returns the cards of the workers in a process of this host, or container, and in those that it started."""
    async with CoordinatorClient(coordinator) as client:
        cards = await client.workers()
    return [card for card in cards if is_here(card.host, this_host()) and is_within(card.host.pid, process)]


def is_here(host: HostIdentity, here: HostIdentity) -> bool:
    """Returns whether a worker's process number means the same process here."""
    return bool(here.boot_id and here.pid_namespace) and (host.boot_id, host.pid_namespace) == (
        here.boot_id,
        here.pid_namespace,
    )


def parent_of(pid: int) -> int:
    """Returns the number of a process's parent, or 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def is_within(pid: int, process: int, parent: Callable[[int], int] = parent_of) -> bool:
    """Returns whether `pid` is `process` or was started by it."""
    while pid > 0 and pid != process:
        pid = parent(pid)
    return pid == process


@contextmanager
def draining(cards: list[WorkerCard]) -> Iterator[Callable[[], list[Row]]]:
    """Yields a function that lets the workers drain, and returns a row of each with the offers that are left."""
    control = ControlThread.shared()
    agents = control.run(_made())
    seen: set[str] = set()

    async def read_rows(card: WorkerCard) -> Row:
        row = {"role": "worker", "server": card.worker_id, "state": "draining", "running": 0}
        try:
            row["running"] = await agents[card.agent].drain(WorkerEpoch(card.worker_id, card.epoch))
        except (CoordinatorUnavailable, UnknownRequest):
            if card.worker_id not in seen:
                raise
            row["state"] = "ended"
        seen.add(card.worker_id)
        return row

    async def look_at_all() -> list[Row]:
        return list(await asyncio.gather(*map(read_rows, cards)))

    try:
        yield lambda: control.run(look_at_all())
    finally:
        control.run(agents.close())


async def _made() -> AgentClients:
    return AgentClients()
