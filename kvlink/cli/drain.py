# SPDX-License-Identifier: Apache-2.0
"""`kvlink drain` takes a server out of a router's turn and waits until it has answered its requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvlink.cli.examples import examples_of
from kvlink.cli.json_option import Json
from kvlink.cli.tables import print_json
from kvlink.errors import ConfigError, KVLinkError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_LOOK_EVERY_S = 0.2

Ask = Callable[[str, str], list[dict[str, Any]]]
"""Sends a command ("drain", "resume" or "servers") about a server, and returns the router's rows."""


@app.command(epilog=examples_of("drain"))
def drain(
    server: Annotated[
        str, typer.Argument(help="Drain the server at this base URL, as it was given to the router.")
    ],
    port: Annotated[
        int,
        typer.Option(
            "--router", min=1, max=65535, help="Ask the router that listens on this port of this host."
        ),
    ] = 8000,
    grace_s: Annotated[
        float, typer.Option(min=0, help="Wait at most this many seconds for its running requests.")
    ] = 300.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Let the server get requests again instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take a server out of a router's turn, and wait until it has answered its running requests.

    Then end the server: it may exit without a request being lost. The exit status is 1 if requests still run after
    --grace-s; they go on, and the server still gets no new ones. When a server answers again at the same URL, it gets
    requests as before. Run this as the user of the router, or as root, on the router's host.
    """
    from kvlink.router.control_client import asking

    with asking(port) as ask:
        rows = _of(ask("resume" if resume else "drain", server), server)
        if not resume:
            _say_if_last(rows, ask("servers", ""), server)
            rows = wait(ask, server, grace_s)
    for row in rows:
        if as_json:
            print_json(row)
        else:
            typer.echo(f"{row['role']} {server}: {row['state']}, {row['running']} requests run")
    if not resume and (left := sum(row["running"] for row in rows)):
        raise KVLinkError(
            f"{left} requests still run at {server} after {grace_s:g} s; wait longer with --grace-s"
        )


def wait(
    ask: Ask,
    server: str,
    grace_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, Any]]:
    """Returns the router's rows of the server as soon as it answers no request, or at the end of `grace_s`."""
    ends = clock() + grace_s
    while True:
        rows = _of(ask("servers", ""), server)
        if not any(row["running"] for row in rows) or clock() >= ends:
            return rows
        sleep(_LOOK_EVERY_S)


def _of(rows: list[dict[str, Any]], server: str) -> list[dict[str, Any]]:
    found = [row for row in rows if row["server"] == server]
    if not found:
        raise ConfigError(f"the router does not know {server}")
    return found


def _say_if_last(own: list[dict[str, Any]], rows: list[dict[str, Any]], server: str) -> None:
    for role in (row["role"] for row in own):
        if not any(row["role"] == role and row["state"] == "up" for row in rows):
            typer.echo(f"kvlink: no other {role} server is up than {server}", err=True)
