# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench`: what a path does, beside what the machine could do. Installed as `kvlink.benchmarks`.

Each module has `rows(…)`, which measures and yields one mapping a row; every byte moved is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from kvlink.cli.tables import show_rows
from kvlink.config import WorkerConfig, select

app = typer.Typer(
    help="Measure kvlink on this machine. Rows go to stdout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]
Transport = Annotated[str, typer.Option(help="One or more names with commas, or all.")]


@app.command("pull")
def measure_pull(
    transport: Transport = "all",
    block_bytes: Annotated[
        list[int] | None, typer.Option(min=1, help="May be repeated. [16384, 65536]")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks a pull. [4096, and single ones of 16384 bytes]")
    ] = None,
    iters: Annotated[
        int | None, typer.Option(min=1, help="Pulls measured; without it what fits the size.")
    ] = None,
    order: Annotated[str, typer.Option(help="random, or runs:K for runs of K blocks.")] = "random",
    as_json: Json = False,
) -> None:
    """Pull blocks between two processes, beside the physical limit of the same path."""
    from . import pull as bench

    rows = (
        row
        for name in names_of(transport)
        for size, count in bench.shapes(block_bytes, blocks)
        for row in bench.rows(name, size, count, iters, order)
    )
    _finish(rows, as_json, "bench pull")


@app.command("migrate")
def measure_migrate(
    model: Annotated[str, typer.Option(help="Name of a KV geometry.")] = "llama-3.1-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request.")] = 4096,
    transport: Transport = "all",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree: one rank's share moves.")] = 1,
    as_json: Json = False,
) -> None:
    """Migrate a request of a named model; every phase on its own."""
    from . import migrate as bench

    rows = (row for name in names_of(transport) for row in bench.rows(model, tokens, name, tp))
    _finish(rows, as_json, "bench migrate")


@app.command("plan")
def measure_plan(as_json: Json = False) -> None:
    """Plan transfers: CPU time a descriptor."""
    from . import plan as bench

    _finish(bench.rows(), as_json, "bench plan")


@app.command("control")
def measure_control(
    workers: Annotated[int, typer.Option(min=1, help="Processes that load it.")] = 2, as_json: Json = False
) -> None:
    """Offer and claim through a coordinator: latency, and hand-offs a second."""
    from . import control as bench

    _finish(bench.rows(workers), as_json, "bench control")


def names_of(transport: str) -> list[str]:
    """The transports meant: "all" is every one that works here and KVLINK_TRANSPORTS allows."""
    from kvlink import _core

    here = [(name, why_not) for name, _, _, why_not, _ in _core.transports()]
    names = [name for name, _ in here]
    if transport != "all":
        return select(transport, names)
    refused = {name for name, why_not in here if why_not}
    allowed = select(WorkerConfig.from_env().transports, names)
    return [name for name in allowed if name.removeprefix("fault+") not in refused]


def _finish(rows: Iterable[Mapping[str, Any]], as_json: bool, title: str) -> None:
    """Exit code 1 when any row says that its bytes were wrong."""
    seen = show_rows(rows, as_json, title)
    raise typer.Exit(0 if all(row.get("verified", True) for row in seen) else 1)
