# SPDX-License-Identifier: Apache-2.0
"""Implements the command `kvlink simulate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvlink.errors import ConfigError
from kvlink.transfer.cost_model import PRIORS, Cost

from ..harness.options import Gbps, Json, ModelName, Nics, names_of
from ..harness.results import Record, read_rows
from ..prediction.calibration import control_of, fits_of
from ..prediction.paths import Machine
from ..prediction.paths import Path as Way
from ..workloads.models import Model, model_of
from ..workloads.traces import requests_of
from .fleets import SIZES, Move, Scene, path_of, rows

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_MOST_WORKERS = 1 << 16


@app.command()
def simulate(
    workers: Annotated[
        list[int] | None,
        typer.Option(
            min=2, max=_MOST_WORKERS, help="Simulate this many workers; may be repeated. [2, 4, … 1024]"
        ),
    ] = None,
    trace: Annotated[
        str,
        typer.Option(
            help="Use the prompt lengths and times of this trace: a file, or the name of a published one."
        ),
    ] = "mooncake-conversation",
    requests: Annotated[
        int, typer.Option(min=2, help="Take this many requests of the trace for each fleet.")
    ] = 10_000,
    load: Annotated[
        float, typer.Option(min=0.001, help="Load prefill's NICs to this share of their rate.")
    ] = 0.5,
    popular: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Send this share of the requests to one prefill worker, besides its own."
        ),
    ] = 0.0,
    pulls: Annotated[
        int, typer.Option(min=1, help="Let a decode worker have this many pulls in flight; others wait.")
    ] = 8,
    lease_s: Annotated[float, typer.Option(min=1e-6, help="Use leases of this many seconds.")] = 30.0,
    model: ModelName = "llama-3.1-70b",
    tp: Annotated[int, typer.Option(min=1, help="Use this many ranks per worker.")] = 8,
    path: Annotated[str, typer.Option(help="Move over this path: gpudirect, bounce or tcp.")] = "gpudirect",
    nics: Nics = 8,
    gbps: Gbps = 400.0,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Fit --path tcp to these results of `kvlink bench pull --json`, and the control plane of any path to "
            "those of `bench migrate --json`."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed the random choice of the workers of each request.")
    ] = 0,
    validate: Annotated[
        str,
        typer.Option(
            metavar="TRANSPORT",
            help="Run real pulls of 1 to 4 readers here, and compare with their simulation instead.",
        ),
    ] = "",
    tolerance: Annotated[
        float, typer.Option(min=0.01, help="With --validate, let a simulated time be wrong by this share.")
    ] = 0.35,
    as_json: Json = False,
) -> None:
    """Simulate fleets: how long moves take, the data that is carried, and leases that end too soon.

    Half of the workers prefill. Times are those of requests that were moved, from the offer to the last byte, with the
    control plane if --calibrate has measured handoffs. Switches between the NICs are assumed to be unlimited. With
    --validate, the exit status is 1 if the mean or the median is wrong by more than --tolerance, or the machine's rate
    drifted by more than a tenth.
    """
    record = Record("simulate", as_json)
    if validate:
        from .validation import rows as validation_rows

        names_of(validate)
        found = validation_rows(validate, tolerance=tolerance)
        record.show("validation", [found], title=f"{validate}: measured and simulated")
        record.end()
    meant = model_of(model)
    control = control_of(read_rows(calibrate) if calibrate else ())
    way = way_of(path, None if path != "tcp" and control else calibrate, meant, tp, nics, gbps)
    way = replace(way, start_us=way.start_us + (control.us if control else 0.0))
    scene = Scene(load, popular, pulls, lease_s, seed)
    move, given = Move(meant, tp, way), requests_of(trace, requests)
    curve = [rows(move, given, [size], scene) for size in workers or SIZES]
    title = f"{meant.name} at TP {tp} over {way.name}, {way.rails} rails a worker, load {load:g}"
    record.show("simulation", curve, title=title)
    record.end()


def way_of(path: str, calibrate: Path | None, model: Model, tp: int, nics: int, gbps: float) -> Way:
    """Returns the path of that name between two workers. Raises ConfigError."""
    if path == "tcp":
        return path_of(path, _cost(calibrate), model, tp)
    if calibrate:
        raise ConfigError(
            f"--calibrate needs --path tcp or measured handoffs; {path} is derived from --nics and --gbps"
        )
    return _nics(path, Machine(nics, gbps), tp)


def _cost(calibrate: Path | None) -> Cost:
    fits = fits_of(calibrate) if calibrate else {}
    if calibrate and "tcp" not in fits:
        raise ConfigError(
            f"{calibrate} has tcp transfers of too few shapes to fit a cost model; measure more shapes"
        )
    return fits["tcp"].cost if fits else PRIORS["tcp"]


def _nics(name: str, machine: Machine, tp: int) -> Way:
    ways = {way.name: way for way in machine.paths(tp) if way.name != "nvlink"}
    if name not in ways:
        raise ConfigError(
            f"no path between hosts is called {name!r}; choose from {', '.join([*ways, 'tcp'])}"
        )
    return ways[name]
