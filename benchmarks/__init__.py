# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink bench`, which measures paths next to what the machine can do. Installed as `kvlink.benchmarks`.

Each module has `rows(…)`, which measures and yields one mapping per row (or `parts(…)`, several of these). Every byte
that is moved is verified.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from shlex import split
from typing import Annotated

import typer

from kvlink.cli.tables import show_parts
from kvlink.errors import ConfigError

from .harness.options import (
    BlockOrder,
    Cpus,
    Iters,
    Json,
    Memory,
    ModelName,
    Transport,
    names_of,
    numbers_of,
    rates_of,
    use_cpus,
)
from .harness.results import Record, differences, publish
from .harness.statistics import LEAST_EFFECT

app = typer.Typer(
    help="Measure kvlink on this machine, and print rows to stdout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


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
    path: Annotated[
        str,
        typer.Option(help="Measure GPU memory over RDMA instead: gpudirect, bounce, or both with a comma."),
    ] = "",
    memory: Memory = "",
    cpus: Cpus = "",
    as_json: Json = False,
) -> None:
    """Pull blocks between two processes, and compare with bare calls that move the same blocks on as many threads."""
    from .measurements import pull as bench

    shapes = bench.shapes(block_bytes, blocks)
    use_cpus(cpus)
    if path:
        from .measurements import gpudirect_paths

        found = gpudirect_paths.rows(gpudirect_paths.paths_of(path), shapes, iters)
        publish("gpu", [found], as_json, "bench pull")
    names = names_of(transport)
    parts = [bench.rows(name, *shape, iters, order, memory) for name in names for shape in shapes]
    publish("pull", parts, as_json, "bench pull")


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
    publish("gpu", parts, as_json, "bench gpu")


@app.command("migrate")
def measure_migrate(
    model: ModelName = "llama-3.1-8b",
    tokens: Annotated[
        str,
        typer.Option(help="Move a request of this many tokens; several with commas are measured in turn."),
    ] = "4096",
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
        typer.Option(
            help="Move from all stages of a prefill pipeline to all of decode's, for example 2:1; several with commas."
        ),
    ] = "1:1",
    prefills: Annotated[
        int,
        typer.Option(min=1, max=16, help="Move from this many prefill workers in turn to one decode worker."),
    ] = 1,
    trace: Annotated[
        str,
        typer.Option(
            help="Use the prompt lengths of this trace instead of --tokens: a file, or the name of a published one."
        ),
    ] = "",
    requests: Annotated[int, typer.Option(min=1, help="Move this many requests of the trace.")] = 100,
    rate: Annotated[
        str,
        typer.Option(
            help="Let requests arrive at this Poisson rate per second; several with commas are a sweep."
        ),
    ] = "",
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.01, help="Use gamma-distributed pauses of this shape; 1 is Poisson, less is burstier."
        ),
    ] = 1.0,
    burst: Annotated[int, typer.Option(min=1, max=1024, help="Let this many requests arrive at once.")] = 1,
    slo_ms: Annotated[
        float, typer.Option(min=0.001, help="Count requests that take at most this long as goodput.")
    ] = math.inf,
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
        str,
        typer.Option(
            help="Move this many requests at a time; several with commas. [1, with --rate or --speed 16]"
        ),
    ] = "",
    beside: Annotated[
        str,
        typer.Option(
            help="Then move the requests again beside a loop like decoding, on the reader: cpu or gpu."
        ),
    ] = "",
    cpus: Cpus = "",
    as_json: Json = False,
) -> None:
    """Migrate a request of a named model: a row with every phase, and the overhead beyond the read of the bytes.

    With --rate or --speed, requests arrive at given times, and a request's time counts from its arrival. It includes
    the wait for a slot (late; more than 1 ms of it: started late). A queue that grows throughout is unstable. Failed
    requests count as infinitely long. Options with several values are measured in all combinations.
    """
    from .measurements import migrate as bench
    from .measurements.rank_handoffs import saturation
    from .workloads.arrivals import workload

    use_cpus(cpus)
    meant, listed = (
        model,
        rates_of(rate, "--rate") if rate else [None],
    )
    sizes = numbers_of(tokens, "--tokens")
    at_once = numbers_of(slots, "--slots") if slots else [None]
    loads = {
        (size, per_s): workload(size, trace, requests, per_s, speed, burstiness, burst)
        for size, per_s in product(sizes, listed)
    }
    parts = [
        bench.rows(
            meant, loads[size, per_s][0], name, degrees, None, loads[size, per_s][1], order, block_tokens,
            prefill_ms, number, layout, stages, prefills, slo_ms, beside,
        )
        for degrees, stages, name, number, size, per_s in product(
            tp.split(","), pp.split(","), names_of(transport), at_once, sizes, listed
        )
    ]  # fmt: skip
    record = Record("bench migrate", as_json)
    found = record.show("migrate", parts)
    if saturated := list(saturation(dict(row) for row in found)):
        record.show("saturation", [saturated], title="saturation")
    record.end()


@app.command("suite")
def measure_suite(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Read this workload: kv_sweep.json of InferenceX's suite kv-transfer, or YAML files of a model and "
            "of a configuration of NIXL's kvbench."
        ),
    ],
    transport: Transport = "all",
    model: Annotated[
        str, typer.Option(help="Use the KV geometry of this model in place of that of the files.")
    ] = "",
    pool_gib: Annotated[
        float, typer.Option(min=0.001, max=1024, help="Omit bursts for which the pool of an end is larger.")
    ] = 2.0,
    cpus: Cpus = "",
    as_json: Json = False,
) -> None:
    """Run a workload of a public suite from its own file: bursts of requests that are pulled at once.

    The time of a burst is from the start of its first pull until the end of its last.
    """
    from .measurements import bursts
    from .workloads.suites import suite_of

    found = suite_of(files, model)
    use_cpus(cpus)
    parts = [
        bursts.rows(found, point, name, int(pool_gib * 2**30))
        for name in names_of(transport)
        for point in found.points
    ]
    record = Record("bench suite", as_json)
    record.show("burst", parts)
    for left in found.left_out:
        typer.echo(f"not measured: {left}", err=True)
    record.end()


@app.command("plan")
def measure_plan(as_json: Json = False) -> None:
    """Plan transfers, and show the CPU time per descriptor."""
    from .measurements import plan as bench

    publish("plan", [bench.rows()], as_json, "bench plan")


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
        publish("control", [control.rows(workers)], as_json, "bench control")
    if store != "etcd":
        raise typer.BadParameter("memory or etcd", param_hint="--store")
    publish("control", [several.rows(numbers)], as_json, "bench control on etcd")


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
    record = Record("bench scale", as_json)
    record.show("scale", bench.parts(numbers, tickets, store, processes, lease_s, idle_s), by="what")
    record.end()


@app.command("growth")
def measure_growth(as_json: Json = False) -> None:
    """Measure how costs grow with blocks, peers, leases, prefixes and readers; an exponent of 1 is linear.

    The exponent is the largest of any step of the tail. The exit status is 1 if one does not hold.
    """
    from .measurements import growth as bench

    publish("growth", bench.parts(), as_json, "bench growth")


@app.command("compare")
def measure_compare(
    before: Annotated[
        Path, typer.Argument(help="Take this results file, folder of them, checkout or environment.")
    ],
    after: Annotated[Path, typer.Argument(help="Compare it with this one.")],
    runs: Annotated[int, typer.Option(min=1, help="Run each checkout or environment this many times.")] = 5,
    command: Annotated[
        str, typer.Option(help="Run this command of `kvlink bench`, which prints rows with --json.")
    ] = "pull",
    least: Annotated[
        float, typer.Option(min=0, max=10, help="Report changes of this share or more.")
    ] = LEAST_EFFECT,
    as_json: Json = False,
) -> None:
    """Compare runs of two versions, which take turns in new processes: a permutation test with the run as the unit.

    Rows are compared by their share of the limit if that repeats better than the time. The exit status is 1 if a row is
    slower, and 2 if there are too few runs or no row in common.
    """
    from .report.comparison import compare, measured, side_of

    files = [side.is_file() or bool(list(side.glob("*.jsonl"))) for side in (before, after)]
    if any(files) and not all(files):
        raise ConfigError("compare two results files, or two checkouts or environments")
    sides = (
        [side_of(before), side_of(after)] if all(files) else measured((before, after), runs, split(command))
    )
    rows = [change.row() for change in compare(sides[0], sides[1], least)]
    verdicts = {row["verdict"] for row in rows}
    if not rows or verdicts == {"not enough runs"}:
        found = "too few runs for a verdict; a side needs five" if rows else "no row in common"
        raise ConfigError(f"{before} and {after} have {found}")
    show_parts([rows], as_json, f"{after} against {before}")
    machines = (row for side in sides for run in side.values() for row in run if row.get("kind") == "machine")
    for warning in differences(machines):
        typer.echo(warning, err=True)
    raise typer.Exit(1 if "slower" in verdicts else 0)


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
    suite: Annotated[
        list[Path] | None,
        typer.Option(
            help="Move the bursts of this file of a public suite instead, as `kvlink bench suite` does."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Use the KV geometry of this model in place of that of the suite.")
    ] = "",
    pool_gib: Annotated[
        float, typer.Option(min=0.001, max=1024, help="Omit bursts for which the pool of an end is larger.")
    ] = 0.5,
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
    from .workloads.suites import suite_of

    if environments is not None and not environments.is_dir():
        raise typer.BadParameter("not a folder", param_hint="--environments")
    environments = environments or Path("build/peers")
    run.check_paths(path)
    if model and not suite:
        raise typer.BadParameter("replaces the geometry of a --suite, which is missing", param_hint="--model")
    shapes = (
        run.bursts(suite_of(suite, model), int(pool_gib * 2**30))
        if suite
        else run.shapes(block_bytes, blocks)
    )
    with run.open_log(log, environments) as output:
        record = Record("bench peers", as_json)
        kind = "burst" if suite else "peers"
        rows = record.show(kind, run.contests(path, shapes, seconds, environments, output))
    if missing := advice(rows, environments.absolute()):
        typer.echo(missing, err=True)
    record.end()
