# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink bench`, which measures paths next to what the machine can do. Installed as `kvlink.benchmarks`.

Each module has `rows(…)`, which measures and yields one mapping per row (or `parts(…)`, several of these). Every byte
that is moved is verified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlink.cli.tables import show_parts, show_rows

from .harness.arguments import names_of, numbers_of
from .harness.options import BlockOrder, Iters, Json, ModelName, Transport
from .harness.run_record import begin, finish
from .simulation.prefix_command import measure_prefixes

app = typer.Typer(
    help="Measure kvlink on this machine, and print rows to stdout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

app.command("prefixes")(measure_prefixes)


@app.command("pull")
def measure_pull(
    transport: Transport = "all",
    block_bytes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Use blocks of this many bytes; may be repeated. [16384, 65536]"),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Pull this many blocks at a time. [4096, and 1 of 16384 bytes]")
    ] = None,
    iters: Iters = None,
    order: BlockOrder = "random",
    trace: Annotated[
        str,
        typer.Option(
            help="Replay this trace for --order allocator: a file, or the name of a published one. [azure-2023-conv]"
        ),
    ] = "",
    path: Annotated[
        str,
        typer.Option(
            help="Measure GPU memory over RDMA instead: gpudirect, bounce, or both with a comma. Rows are "
            "modelled where there is no GPU or no NIC."
        ),
    ] = "",
    gbps: Annotated[float, typer.Option(min=0.1, help="Model a NIC of this many Gb/s.")] = 400.0,
    as_json: Json = False,
) -> None:
    """Pull blocks between two processes, and compare with the physical limit of the same path."""
    from .measurements import pull as bench

    shapes = bench.shapes(block_bytes, blocks)
    if trace and not order.startswith("allocator"):
        raise typer.BadParameter("--trace needs --order allocator", param_hint="--trace")
    if path:
        from .measurements import gpudirect_paths

        parts = [gpudirect_paths.rows(gpudirect_paths.paths_of(path), shapes, gbps, iters)]
    else:
        rows = [
            bench.rows(name, *shape, iters, order, trace) for name in names_of(transport) for shape in shapes
        ]
        parts = [part if as_json else map(bench.brief, part) for part in rows]
    finish(parts, as_json, "bench pull", begin(as_json))


@app.command("gpu")
def measure_gpu(
    gpus: Annotated[str, typer.Option(help="Use these GPUs of owner and reader.")] = "0,0",
    transport: Annotated[
        str, typer.Option(help="Measure cuda, or a transport that stages in host memory (tcp).")
    ] = "cuda",
    iters: Iters = None,
    as_json: Json = False,
) -> None:
    """Pull blocks from GPU to GPU between two processes, and compare with one device-to-device copy of the same bytes.

    Then measure the bounce buffer's copies, and compare with plain copies of pinned memory. At the end run a loop like
    decoding, without pulls and beside them, and show the time between its tokens.
    """
    from .measurements import gpu as bench
    from .measurements.gpu_decode import decode_rows

    pair = bench.pair_of(gpus)
    parts = [
        bench.rows(pair, transport, iters),
        bench.bounce_rows(pair[1], iters),
        decode_rows(pair, transport, iters),
    ]
    others = begin(as_json)
    finish(parts, as_json, "bench gpu", others)


@app.command("migrate")
def measure_migrate(
    model: ModelName = "llama-3.1-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Move a request of this many tokens.")] = 4096,
    transport: Transport = "all",
    tp: Annotated[
        str,
        typer.Option(
            help="Move one rank's share at this tensor-parallel degree; or, with a pair such as 2:4, from all "
            "ranks of a prefill of TP 2 to all of a decode of TP 4. Separate several by commas."
        ),
    ] = "1",
    pp: Annotated[
        str,
        typer.Option(help="Move from all stages of a prefill pipeline to all of decode's, for example 2:1."),
    ] = "1:1",
    model_config: Annotated[
        Path | None, typer.Option(help="Use the geometry of this Hugging Face config.json instead.")
    ] = None,
    trace: Annotated[
        str,
        typer.Option(
            help="Use the prompt lengths of this trace instead of --tokens: a file, or the name of a published one."
        ),
    ] = "",
    requests: Annotated[int, typer.Option(min=1, help="Move this many requests of the trace.")] = 100,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Let requests arrive at this Poisson rate per second.")
    ] = None,
    speed: Annotated[
        float | None, typer.Option(min=0.001, help="Use the trace's own times, sped up by this factor.")
    ] = None,
    order: BlockOrder = "random",
    block_tokens: Annotated[int, typer.Option(min=1, help="Use blocks of this many tokens.")] = 16,
    layout: Annotated[
        str,
        typer.Option(
            help="Use this layout of a block: NHD (a token's heads are contiguous), or HND (a head's tokens "
            "are, so pieces at 2:4 are longer)."
        ),
    ] = "NHD",
    prefill_ms: Annotated[
        float,
        typer.Option(
            min=0, help="Assume this prefill time in ms; 0 omits shares of the time to first token."
        ),
    ] = 0.0,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Move this many requests at a time. [1, with --rate or --speed 16]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Migrate a request of a named model; show every phase, and the overhead beyond the read of the bytes.

    With --rate or --speed, requests arrive at given times, and a request's time counts from its arrival. It includes
    the wait for a slot (late; more than 1 ms of it: started late).
    """
    from .measurements import migrate as bench
    from .workloads.arrivals import workload

    lengths, arrivals = workload(tokens, trace, requests, rate, speed)
    meant = str(model_config or model)
    parts = [
        bench.rows(
            meant,
            lengths,
            name,
            degrees,
            None,
            arrivals,
            order,
            trace,
            block_tokens,
            prefill_ms,
            slots,
            layout,
            pp,
        )
        for degrees in tp.split(",")
        for name in names_of(transport)
    ]
    others = begin(as_json)
    finish([part if as_json else map(bench.brief, part) for part in parts], as_json, "bench migrate", others)


@app.command("plan")
def measure_plan(as_json: Json = False) -> None:
    """Plan transfers, and show the CPU time per descriptor."""
    from .measurements import plan as bench

    rows = show_rows(bench.rows(), as_json, "bench plan")
    if as_json:  # goals of kvlink's developers
        show_rows(bench.verdicts(rows), as_json, "goals")


@app.command("control")
def measure_control(
    workers: Annotated[int, typer.Option(min=1, help="Load the coordinators with this many processes.")] = 2,
    store: Annotated[
        str,
        typer.Option(
            help="Use memory with one coordinator, or etcd with several, three members, and losses."
        ),
    ] = "memory",
    replicas: Annotated[str, typer.Option(help="Run this many coordinators with etcd.")] = "1,2,3",
    as_json: Json = False,
) -> None:
    """Offer and claim through coordinators: latency, handoffs per second, and the cost of losses."""
    from .measurements import control
    from .measurements import coordinator_replicas as several

    numbers = numbers_of(replicas, "--replicas")
    if store == "memory":
        finish([control.rows(workers)], as_json, "bench control")
    if store != "etcd":
        raise typer.BadParameter("memory or etcd", param_hint="--store")
    finish([several.rows(numbers)], as_json, "bench control on etcd")


@app.command("scale")
def measure_scale(
    workers: Annotated[
        str, typer.Option(help="Simulate this many workers; several numbers with commas give a curve.")
    ] = "125,250,500,1000,2000",
    tickets: Annotated[int, typer.Option(min=1, help="Keep this many live tickets per worker.")] = 10,
    store: Annotated[str, typer.Option(help="Use this store: memory or etcd.")] = "memory",
    processes: Annotated[int, typer.Option(min=1, help="Simulate the workers in this many processes.")] = 1,
    lease_s: Annotated[float, typer.Option(min=1, help="Use this lease, with four heartbeats each.")] = 10.0,
    idle_s: Annotated[float, typer.Option(min=0.1, help="Measure idle workers for this many s.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Simulate large fleets: the cost of workers, tickets, a restart and watchers, and how each cost grows.

    Rows of a growth give the exponent of a cost: 1 is linear in the number of workers.
    """
    from . import scale as bench

    if store not in ("memory", "etcd"):
        raise typer.BadParameter("memory or etcd", param_hint="--store")
    numbers = numbers_of(workers, "--workers")
    begin(as_json)
    parts = bench.parts(numbers, tickets, store, processes, lease_s, idle_s)
    finish(parts, as_json, "bench scale", by="what")


@app.command("growth")
def measure_growth(as_json: Json = False) -> None:
    """Measure how costs grow with blocks, peers, leases out and readers; an exponent of 1 is linear."""
    from .measurements import growth as bench

    finish(bench.parts(), as_json, "bench growth", begin(as_json))


@app.command("peers")
def measure_peers(
    path: Annotated[str, typer.Option(help="Compare on host, tcp, or both with a comma.")] = "host,tcp",
    block_bytes: Annotated[
        list[int] | None,
        typer.Option(min=8, help="Use blocks of this many bytes; may be repeated. [4096, 16384, 65536]"),
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Move this many blocks at a time; may be repeated. [256, 4096, 1 of 16384]"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Measure each shape for this many seconds.")] = 3.0,
    environments: Annotated[
        Path | None, typer.Option(help="Find the other libraries in this folder. [build/peers]")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write output of the peers to this file. [log, in that folder]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let other transfer libraries move the same blocks, in turns with kvlink and with bare copies.

    Columns "times X" say how many times as long as kvlink over X it took. --json has settings, versions and intervals;
    `kvlink report` draws it. Libraries that are not installed are named at the end, with commands that install them.
    """
    from .peers import run
    from .peers.setup import advice

    if environments is not None and not environments.is_dir():
        raise typer.BadParameter("not a folder", param_hint="--environments")
    environments = environments or Path("build/peers")
    shapes = run.checked(path, block_bytes, blocks)
    with run.open_log(log, environments) as output:
        begin(as_json)
        contests = run.contests(path, shapes, seconds, environments, output)
        rows = show_parts(
            [part if as_json else map(run.brief, part) for part in contests], as_json, "bench peers"
        )
    if as_json:
        show_rows(run.verdicts(rows), as_json, "goals")
    if missing := advice(rows, environments.absolute()):
        typer.echo(missing, err=True)
    raise typer.Exit(0 if all(row.get("verified", True) for row in rows) else 1)
