# SPDX-License-Identifier: Apache-2.0
"""The operator's shell. Exit codes: 0 good, 1 the work failed, 2 bad usage.

Commands import what they need when they run, so that `kvlink --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from kvlink import __version__
from kvlink.cli import output, plugins
from kvlink.errors import ConfigError, KVLinkError

app = typer.Typer(
    name="kvlink",
    help="Moves the KV cache of running requests between inference workers by one-sided reads.",
    no_args_is_help=True,
    context_settings=plugins.HELP,
    pretty_exceptions_enable=False,
)

_ANYWHERE = ("--debug", "--wide")
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvlink {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="Show all columns of tables.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """--debug and --wide may also stand behind the command."""
    if wide:
        from kvlink.cli.tables import Shown

        Shown.wide = True


@app.command()
def demo(
    transport: Annotated[str, typer.Option(help="One or more names with commas, or all.")] = "all",
    as_json: Json = False,
    patience: Annotated[
        float, typer.Option(min=1, help="Multiplies every deadline, for slow machines.")
    ] = 1.0,
    device: Annotated[str, typer.Option(help="Where the models are: cpu, cuda, cuda:1.")] = "cpu",
) -> None:
    """Prefill in one process, decode in another, and compare the tokens with a single-process run."""
    from kvlink.demo import run

    raise typer.Exit(run(None if transport == "all" else transport.split(","), as_json, patience, device))


@app.command()
def coordinator(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 7400,
    store: Annotated[
        str,
        typer.Option(
            metavar="STORE",
            help="memory, or etcd://host:2379,host2:2379 for several coordinators; then /NAME for each of several "
            "fleets in one etcd.",
        ),
    ] = "memory",
    lease_s: Annotated[
        float, typer.Option(min=1, max=3600, help="A worker that has not beaten for this long is gone.")
    ] = 10.0,
    reflection: Annotated[bool, typer.Option(help="Let grpcurl and others list the services.")] = False,
    log_json: Annotated[bool, typer.Option(help="Log one JSON object a line.")] = False,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve /metrics and the status page here; 0: any.")
    ] = None,
    http_host: Annotated[str, typer.Option(help="Address of both: who reaches it sees them.")] = "127.0.0.1",
    tenants: Annotated[
        str, typer.Option(metavar="FILE", help="Rules: which certificate or token is which tenant's.")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak plaintext to other hosts, too; as KVLINK_INSECURE=1.")
    ] = False,
) -> None:
    """Serve workers until SIGTERM or SIGINT, then send callers to the next coordinator."""
    import asyncio
    from dataclasses import replace

    from kvlink import log, tracing
    from kvlink.cli import status_page
    from kvlink.config import WorkerConfig, sources
    from kvlink.control import Security
    from kvlink.coordinator.coordinator import serve
    from kvlink.coordinator.gc_tuning import tune_gc

    config = WorkerConfig.from_env()
    level = "info" if sources(os.environ)["log"] == "default" else config.log
    log.setup(level, log_json or config.log_json)
    tracing.start()

    def ready(address: str) -> None:
        typer.echo(f"kvlink coordinator on {address}")

    security = Security.of(replace(config, insecure=insecure or config.insecure))
    gate = security.coordinator_gate(tenants)
    tune_gc()
    asyncio.run(
        serve(
            host,
            port,
            store=store,
            lease_s=lease_s,
            reflect=reflection,
            security=security,
            gate=gate,
            on_ready=ready,
            background_service=status_page.status_page_service(http_host, http_port),
        )
    )


@app.command()
def certs(
    folder: Annotated[str, typer.Option("--dir", help="Where the files go, and where the CA is.")] = "certs",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that peers dial; may be repeated. Loopback always is."),
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="Whose workers; may be repeated.")] = None,
    days: Annotated[float, typer.Option(min=0.01, max=825, help="How long the certificates are good.")] = 90,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace certificates; running processes notice.")
    ] = False,
    token: Annotated[
        str, typer.Option(metavar="FILE", help="Make an observer's token instead, and print its rule.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Make a CA and certificates for development: one for the coordinator, one for each tenant's workers."""
    from pathlib import Path

    try:
        from kvlink.cli.certs import make, make_token
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("cryptography"):
            raise
        raise ConfigError("making certificates needs cryptography: pip install 'kvlink[certs]'") from error

    if token:
        make_token(Path(token), (tenant or ["*"])[0])
    else:
        hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", *(host or [])])
        make(Path(folder), list(hosts), tenant or ["default"], days, renew, as_json)


@app.command()
def status(
    coordinator: Annotated[
        str, typer.Option(help="host:port; without it KVLINK_COORDINATOR, then the default port here.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Workers in the table; 0: all.")] = 100,
    as_json: Json = False,
) -> None:
    """Show the workers of a coordinator, and its counts."""
    from kvlink.cli.status import show

    show(coordinator, as_json, limit)


@app.command()
def top(
    coordinator: Annotated[
        str, typer.Option(help="host:port; without it KVLINK_COORDINATOR, then the default port here.")
    ] = "",
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=0, help="Looks, then end; 0: until interrupted.")] = 0,
    as_json: Json = False,
) -> None:
    """Watch the workers of a coordinator: links, rates, leases, errors."""
    from kvlink.cli.top import watch

    watch(coordinator, every, rounds, as_json)


@app.command()
def doctor(
    gpudirect: Annotated[
        bool, typer.Option("--gpudirect", help="Read GPU memory back through each NIC and compare.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what works on this machine, the evidence, and the command that fixes what does not."""
    from pathlib import Path

    from kvlink.cli import tables
    from kvlink.doctor import Verdict, examine, worst

    if gpudirect:
        from kvlink.doctor.trial import trial

        checks = list(trial())
    else:
        checks = list(examine(Path("/"), os.environ))
    tables.show_checks(checks, as_json)
    raise typer.Exit(1 if worst(checks) is Verdict.FAIL else 0)


@app.command()
def topology(as_json: Json = False) -> None:
    """Show NUMA nodes, GPUs and NICs, the paths between them, and which NIC serves which memory."""
    from kvlink.cli.topology import show
    from kvlink.config import WorkerConfig

    show(WorkerConfig.from_env().nics, as_json)


@app.command()
def config(as_json: Json = False) -> None:
    """List every option: default, value, and where the value came from."""
    from kvlink.cli import tables
    from kvlink.config import WorkerConfig, sources
    from kvlink.doctor.software import check_transports

    chosen = WorkerConfig.from_env()
    check_transports(chosen)
    tables.show_config(chosen, sources(os.environ), as_json)


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    typer.echo(json.dumps({"kvlink": __version__}) if as_json else f"kvlink {__version__}")


plugins.add_to(app)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command line and exits. Errors of kvlink become one sentence on stderr."""
    given = _in_front(sys.argv[1:] if arguments is None else list(arguments))
    output.prepare()
    try:
        try:
            app(given, prog_name="kvlink")
        finally:
            sys.stdout.flush()
    except KVLinkError as error:
        if isinstance(error, output.OutputLost):
            output.give_up()
        if "--debug" in given:
            raise
        print(f"kvlink: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    sys.exit(0)


def _in_front(given: list[str]) -> list[str]:
    """Options of every command stand before it, `help` behind it."""
    rest = [each for each in given if each not in _ANYWHERE]
    if rest[:1] == ["help"]:
        rest = [*rest[1:], "--help"]
    return [*(each for each in _ANYWHERE if each in given), *rest]
