# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench`: what a path does, beside what the machine could do. Installed as `kvlink.benchmarks`.

Each module has `rows(…)`, which measures and yields one mapping a row (or `parts(…)`, several of these); every byte
moved is verified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlink.cli.tables import show_parts, show_rows
from kvlink.config import WorkerConfig
from kvlink.transfer.transport_names import select

from .harness.run_record import begin, finish

app = typer.Typer(
    help="Measure kvlink on this machine. Rows go to stdout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]
Transport = Annotated[str, typer.Option(help="One or more names with commas, or all.")]
Iters = Annotated[int | None, typer.Option(min=1, help="Pulls measured; without it what fits the size.")]
BlockOrder = Annotated[
    str,
    typer.Option(
        help="Of the block ids: random; runs:K, of K blocks; allocator:N:M, as a paged allocator hands them out after "
        "a trace, N requests at a time, has had the whole pool M times. [N 16, M 5]"
    ),
]


@app.command("pull")
def measure_pull(
    transport: Transport = "all",
    block_bytes: Annotated[
        list[int] | None, typer.Option(min=1, help="May be repeated. [16384, 65536]")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks a pull. [4096, and single ones of 16384 bytes]")
    ] = None,
    iters: Iters = None,
    order: BlockOrder = "random",
    trace: Annotated[
        str, typer.Option(help="That the allocator saw: a file, or a published one's name. [azure-2023-conv]")
    ] = "",
    path: Annotated[
        str,
        typer.Option(
            help="Instead: of GPU memory by RDMA. gpudirect, bounce, or both with a comma, side by side; modelled "
            "where there is no GPU or no NIC."
        ),
    ] = "",
    gbps: Annotated[float, typer.Option(min=0.1, help="Gb/s of the NIC that is modelled.")] = 400.0,
    as_json: Json = False,
) -> None:
    """Pull blocks between two processes, beside the physical limit of the same path."""
    from .measurements import pull as bench

    shapes = bench.shapes(block_bytes, blocks)
    if trace and not order.startswith("allocator"):
        raise typer.BadParameter("it is for --order allocator", param_hint="--trace")
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
    gpus: Annotated[str, typer.Option(help="CUDA's numbers: the owner's GPU and the reader's.")] = "0,0",
    transport: Annotated[str, typer.Option(help="cuda, or one that stages in host memory (tcp).")] = "cuda",
    iters: Iters = None,
    as_json: Json = False,
) -> None:
    """Pull blocks from GPU to GPU between two processes, beside one device-to-device copy of the same bytes.

    Then the bounce buffer's copies, beside plain ones of pinned memory.
    """
    from .measurements import gpu as bench

    pair = bench.pair_of(gpus)
    parts = [bench.rows(pair, transport, iters), bench.bounce_rows(pair[1])]
    others = begin(as_json)
    finish(parts, as_json, "bench gpu", others)


@app.command("migrate")
def measure_migrate(
    model: Annotated[str, typer.Option(help="Name of a KV geometry.")] = "llama-3.1-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request.")] = 4096,
    transport: Transport = "all",
    tp: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel degree: one rank's share moves. Or a pair, 2:4: all ranks of a prefill of TP 2 hand "
            "over to all of a decode of TP 4. Several with commas."
        ),
    ] = "1",
    model_config: Annotated[
        Path | None, typer.Option(help="A Hugging Face config.json instead of a name.")
    ] = None,
    trace: Annotated[
        str,
        typer.Option(
            help="Prompt lengths of a trace instead of --tokens: a file, or a published one's name."
        ),
    ] = "",
    requests: Annotated[int, typer.Option(min=1, help="Of the trace, in its order; or at --rate.")] = 100,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Poisson arrivals a second, instead of one after the other."),
    ] = None,
    speed: Annotated[
        float | None, typer.Option(min=0.001, help="The trace's own times, as many times as fast.")
    ] = None,
    order: BlockOrder = "random",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    layout: Annotated[
        str,
        typer.Option(
            help="Of a block: NHD, a token's heads adjoin; HND, a head's tokens do, longer pieces at 2:4."
        ),
    ] = "NHD",
    prefill_ms: Annotated[
        float, typer.Option(min=0, help="Of a request; 0: say nothing of shares of the time to first token.")
    ] = 0.0,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at a time. [1, with --rate or --speed 16]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Migrate a request of a named model; every phase on its own, and what is not the read of the bytes (overhead).

    With --rate or --speed requests come when they come, and their time counts from then on: waiting for a slot is
    part of it (late; more than 1 ms of it: started late).
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
        )
        for degrees in tp.split(",")
        for name in names_of(transport)
    ]
    others = begin(as_json)
    finish([part if as_json else map(bench.brief, part) for part in parts], as_json, "bench migrate", others)


@app.command("plan")
def measure_plan(as_json: Json = False) -> None:
    """Plan transfers: CPU time a descriptor."""
    from .measurements import plan as bench

    rows = show_rows(bench.rows(), as_json, "bench plan")
    show_rows(bench.verdicts(rows), as_json, "what kvlink promises")


@app.command("control")
def measure_control(
    workers: Annotated[int, typer.Option(min=1, help="Processes that load it.")] = 2,
    store: Annotated[
        str, typer.Option(help="memory: one coordinator; etcd: several over three members, and their losses.")
    ] = "memory",
    replicas: Annotated[str, typer.Option(help="With etcd: how many coordinators.")] = "1,2,3",
    as_json: Json = False,
) -> None:
    """Offer and claim through coordinators: latency, handoffs a second, and what losses cost."""
    from .measurements import control
    from .measurements import coordinator_replicas as several

    if store == "memory":
        finish([control.rows(workers)], as_json, "bench control")
    if store != "etcd":
        raise typer.BadParameter("memory or etcd", param_hint="--store")
    finish([several.rows(_numbers(replicas, "--replicas"))], as_json, "bench control on etcd")


@app.command("scale")
def measure_scale(
    workers: Annotated[
        str, typer.Option(help="How many, with commas for a curve.")
    ] = "125,250,500,1000,2000",
    tickets: Annotated[int, typer.Option(min=1, help="Live tickets of a worker.")] = 10,
    store: Annotated[str, typer.Option(help="memory or etcd.")] = "memory",
    processes: Annotated[int, typer.Option(min=1, help="That simulate workers.")] = 1,
    lease_s: Annotated[
        float, typer.Option(min=1, help="Of the coordinator; beats come three times as often.")
    ] = 10.0,
    idle_s: Annotated[float, typer.Option(min=0.1, help="How long idle workers are measured.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Simulate large fleets: what workers, tickets, a restart and watchers cost, and how each cost grows.

    Rows of a growth give the exponent of a cost: 1 is linear in the number of workers.
    """
    from . import scale as bench

    if store not in ("memory", "etcd"):
        raise typer.BadParameter("memory or etcd", param_hint="--store")
    begin(as_json)
    parts = bench.parts(_numbers(workers, "--workers"), tickets, store, processes, lease_s, idle_s)
    finish(parts, as_json, "bench scale", by="what")


@app.command("peers")
def measure_peers(
    path: Annotated[str, typer.Option(help="host, tcp, or both with a comma.")] = "host,tcp",
    block_bytes: Annotated[
        list[int] | None, typer.Option(min=8, help="May be repeated. [4096, 16384, 65536]")
    ] = None,
    blocks: Annotated[
        list[int] | None, typer.Option(min=1, help="May be repeated. [256, 4096, and single ones of 16384]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Of each one's turns at each shape.")] = 3.0,
    environments: Annotated[Path, typer.Option(help="Where `make peers` put them.")] = Path("build/peers"),
    log: Annotated[Path, typer.Option(help="Takes what the peers print.")] = Path("build/peers/log"),
    as_json: Json = False,
) -> None:
    """Let other transfer libraries move the same blocks, in alternation with kvlink and with bare copies.

    Columns "times X": how many times as long as kvlink over X. Settings, versions and intervals: --json.
    """
    from .peers import run

    begin(as_json)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as said:
        contests = run.contests(path, run.shapes(block_bytes, blocks), seconds, environments, said)
        rows = show_parts(
            [part if as_json else map(run.brief, part) for part in contests], as_json, "bench peers"
        )
    show_rows(run.verdicts(rows), as_json, "what kvlink promises")
    raise typer.Exit(0 if all(row.get("verified", True) for row in rows) else 1)


def names_of(transport: str) -> list[str]:
    """The transports meant: "all" is every one that works here and KVLINK_TRANSPORTS allows."""
    from kvlink.transfer.engine import host_transports

    here = host_transports()
    if transport != "all":
        return select(transport, list(here))
    allowed = select(WorkerConfig.from_env().transports, list(here))
    return [name for name in allowed if not here[name.removeprefix("fault+")]]


def _numbers(listed: str, option: str) -> list[int]:
    """Raises BadParameter when there is anything else among them."""
    counts = [int(count) if count.isdecimal() else 0 for count in listed.split(",")]
    if min(counts) < 1:
        raise typer.BadParameter("numbers with commas, as in 1,2,3", param_hint=option)
    return counts
