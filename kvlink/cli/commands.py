# SPDX-License-Identifier: Apache-2.0
"""The commands. They import what they need when they run, so that `kvlink --help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from kvlink.cli import coordinator_command, doctor_command, nixl_command, output, plugins
from kvlink.cli.checks import Json, transport_names
from kvlink.cli.examples import examples_of
from kvlink.errors import ConfigError, KVLinkError

app = typer.Typer(
    name="kvlink",
    help="Move the KV cache of running requests between inference workers by one-sided reads.",
    epilog=examples_of("kvlink"),
    invoke_without_command=True,
    context_settings=plugins.HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

_ANYWHERE = ("--debug", "--wide")
Coordinator = Annotated[
    str,
    typer.Option(
        help="Ask the coordinator at this host:port. The default is KVLINK_COORDINATOR, or else port 7400 of this "
        "host."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvlink {_VERSION}")
        raise typer.Exit


_VERSION = metadata.version("kvlink")
_NEXT = f"""\
kvlink {_VERSION} moves the KV cache of running requests between inference workers.

  kvlink doctor        what works on this machine, and how to fix the rest
  kvlink demo          a request that moves between processes, over every transport of this machine
  kvlink bench pull    how fast each transport is here
  kvlink coordinator   a coordinator, in which workers find each other
  kvlink config        the options, which are KVLINK_* variables

kvlink --help lists all commands. vLLM, SGLang and transformers load kvlink themselves: see docs/servers/."""


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, instead of one sentence.")
    ] = False,
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", help="Show all columns of tables, even if lines get longer than the terminal."
        ),
    ] = False,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Accepts --debug and --wide before the command; `run_line` moves them there from behind it."""
    if wide:
        from kvlink.cli.tables import Shown

        Shown.wide = True
    if context.invoked_subcommand is None:
        typer.echo(_NEXT)
        raise typer.Exit(2)


@app.command(epilog=examples_of("demo"))
def demo(
    transport: Annotated[
        str,
        typer.Option(
            help="Use these transports, separated by commas, one after the other. all uses those that work here.",
            autocompletion=transport_names,
        ),
    ] = "all",
    as_json: Json = False,
    patience: Annotated[
        float, typer.Option(min=1, help="Multiply every deadline by this factor. Raise it on a slow machine.")
    ] = 1.0,
    device: Annotated[
        str, typer.Option(help="Run the models on this torch device, for example cpu, cuda or cuda:1.")
    ] = "cpu",
    pp: Annotated[
        str, typer.Option(help="Split the layers of prefill and of decode into stages, for example 2:1.")
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            help="Compute by numpy, or by transformers, which needs kvlink[demo]. The default is transformers for a "
            "--device that is not cpu, and numpy otherwise.",
            autocompletion=lambda: ["numpy", "transformers"],
        ),
    ] = "",
) -> None:
    """Prefill in one process, decode in another, and compare the tokens with a single-process run.

    The exit status is 1 if a token differs.
    """
    from kvlink.demo import run

    raise typer.Exit(
        run(None if transport == "all" else transport.split(","), as_json, patience, device, pp, engine)
    )


app.command(epilog=examples_of("coordinator"))(coordinator_command.coordinator)


@app.command(epilog=examples_of("certs"))
def certs(
    folder: Annotated[
        str,
        typer.Option(
            "--dir",
            help="Write the files into this folder. It also holds the CA, which later calls use again.",
        ),
    ] = "certs",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name a host or address that peers dial, in every certificate that this call makes. "
            "Loopback and the hosts of the existing coordinator's certificate are always named. May be repeated."
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            help="Make a certificate and ticket keys for this tenant's "
            "workers. May be repeated, also in a later call with the same folder. The default is the tenant default."
        ),
    ] = None,
    days: Annotated[
        float, typer.Option(min=0.01, max=825, help="Make certificates that are valid for this many days.")
    ] = 90,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Replace existing certificates, of all tenants in the folder if none is named. The new ones name the "
            "same hosts, and those of --host. Running processes read the new files within a second.",
        ),
    ] = False,
    token: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Write an observer's token to this file instead, and print "
            "the rule for --tenants of the coordinator.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Make a CA and certificates for development: one for the coordinator, and one for each tenant's workers.

    The command prints the variables to export for each.
    """
    from pathlib import Path

    try:
        from kvlink.cli.certs import make, make_token
        from kvlink.cli.checks import listed, named_hosts
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("cryptography"):
            raise
        raise ConfigError("making certificates needs cryptography: pip install 'kvlink[certs]'") from error

    if token:
        make_token(Path(token), (tenant or ["*"])[0])
    else:
        make(Path(folder), named_hosts(host or [], "--host"), listed(tenant or []), days, renew, as_json)


@app.command(epilog=examples_of("status"))
def status(
    coordinator: Coordinator = "",
    limit: Annotated[
        int,
        typer.Option(
            min=0, help="Show at most this many workers in the table. 0 shows all, and so does --json."
        ),
    ] = 100,
    as_json: Json = False,
) -> None:
    """Show the workers that a coordinator knows, and its counts of offers and claims."""
    from kvlink.cli.status import show

    show(coordinator, as_json, limit)


@app.command()
def top(
    coordinator: Coordinator = "",
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Wait this many seconds between updates.")
    ] = 2.0,
    rounds: Annotated[
        int, typer.Option(min=0, help="End after this many updates; 0 runs until interrupted.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Watch a coordinator's workers: links, rates, leases, errors."""
    from kvlink.cli.top import watch

    watch(coordinator, every, rounds, as_json)


app.command(epilog=examples_of("doctor"))(doctor_command.doctor)


@app.command()
def topology(as_json: Json = False) -> None:
    """Show NUMA nodes, GPUs and NICs, the paths between them, and the NICs that kvlink uses for each memory."""
    from kvlink.cli.topology import show
    from kvlink.config import WorkerConfig

    options = WorkerConfig.from_env()
    show(options.nics, as_json, gid=options.rdma_gid)


@app.command()
def config(as_json: Json = False) -> None:
    """List every option with its value, its default, and the source of the value: a variable or the default."""
    from kvlink.cli import tables
    from kvlink.config import WorkerConfig, sources
    from kvlink.doctor.software import check_transports

    chosen = WorkerConfig.from_env()
    check_transports(chosen)
    tables.show_config(chosen, sources(os.environ), as_json)


app.command("nixl-plugin")(nixl_command.nixl_plugin)


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version of kvlink."""
    typer.echo(json.dumps({"kvlink": _VERSION}) if as_json else f"kvlink {_VERSION}")


plugins.add_to(app)


def run_line(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command line and exits. An error of kvlink becomes one sentence on stderr."""
    given = _normalized(sys.argv[1:] if arguments is None else list(arguments))
    output.prepare()
    try:
        try:
            _refuse_repeated(given)
            app(given, prog_name="kvlink")
        finally:
            sys.stdout.flush()
    except (KVLinkError, OSError, OverflowError) as error:
        if isinstance(error, output.OutputLost):
            output.discard()
        if "--debug" in given:
            raise
        sentence, status = _told(error)
        print(f"kvlink: {sentence}", file=sys.stderr)
        sys.exit(status)
    sys.exit(0)


def _told(error: Exception) -> tuple[str, int]:
    """Returns an error as a sentence, and the exit status. Only an OSError about a path comes from an argument."""
    if isinstance(error, OSError):
        if error.filename is None:
            return f"{error.strerror or error}; --debug shows where", 1
        return f"cannot use {error.filename}: {error.strerror}; name another path", 2
    if isinstance(error, OverflowError):
        return f"an argument is too large a number: {error}", 2
    return str(error), 2 if isinstance(error, ConfigError) else 1


REPEATABLE = frozenset(
    {
        "--block-bytes",
        "--blocks",
        "--decode",
        "--host",
        "--prefill",
        "--suite",
        "--tenant",
        "--tokens",
        "--workers",
    }
)
"""Options that some command takes several times. A test compares them with the commands."""


def _refuse_repeated(given: Sequence[str]) -> None:
    """Raises ConfigError for an option with two values, of which the parser would use the last one silently."""
    names = [
        word.partition("=")[0]
        for word, value in zip(given, [*given[1:], "--"], strict=False)
        if word.startswith("--") and ("=" in word or not value.startswith("--"))
    ]
    for name in dict.fromkeys(names):
        if names.count(name) > 1 and name not in REPEATABLE:
            raise ConfigError(
                f"{name} is given twice; give it once, with commas between values if it takes a list"
            )


def _normalized(given: list[str]) -> list[str]:
    """Moves options of every command in front of it, and turns a leading `help` into a trailing --help."""
    rest = [each for each in given if each not in _ANYWHERE]
    if rest[:1] == ["help"]:
        rest = [*rest[1:], "--help"]
    return [*(each for each in _ANYWHERE if each in given), *rest]
