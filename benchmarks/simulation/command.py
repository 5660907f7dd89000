# SPDX-License-Identifier: Apache-2.0
"""Implements the command `kvlink simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlink.cli.tables import print_json, show_parts, show_rows
from kvlink.errors import ConfigError
from kvlink.transfer.cost_model import PRIORS, Cost

from ..harness.options import ModelName
from ..prediction.calibration import fits_of
from ..prediction.machines import Machine
from ..prediction.path import Path as Way
from ..workloads.models import Model, model_of
from ..workloads.traces import requests_of
from .curve import SIZES, Scene, rows
from .workload import Move, path_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_MOST_WORKERS = 1 << 16
_LONG = {
    "kind", "path", "model", "tp", "rails", "load", "popular", "fails_after", "pulls", "lease_s", "seed", "p90_us",
    "p999_us", "mean_us", "simulated_mean_us", "p90_error", "simulated_p90_us",
}  # fmt: skip


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
    fail_rail: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Remove a NIC of that worker after this share of the run (0 to 1). By default none is removed.",
        ),
    ] = None,
    pulls: Annotated[
        int, typer.Option(min=1, help="Let a decode worker have this many pulls in flight; others wait.")
    ] = 8,
    lease_s: Annotated[float, typer.Option(min=1e-6, help="Use leases of this many seconds.")] = 30.0,
    model: ModelName = "llama-3.1-70b",
    model_config: Annotated[
        Path | None, typer.Option(help="Use the geometry of this Hugging Face config.json instead.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Use this many ranks per worker.")] = 8,
    path: Annotated[
        str, typer.Option(help="Move over this path: gpudirect, bounce, bounce-whole or tcp.")
    ] = "gpudirect",
    nics: Annotated[
        int, typer.Option(min=1, max=1024, help="Use this many NICs per worker, for all ranks.")
    ] = 8,
    gbps: Annotated[float, typer.Option(min=0.1, help="Use NICs of this many Gb/s.")] = 400.0,
    calibrate: Annotated[
        Path | None, typer.Option(help="Fit --path tcp to these results of `kvlink bench pull --json`.")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")] = False,
) -> None:
    """Simulate fleets: how long moves take, the data that is carried, and leases that end too soon.

    Half of the workers prefill. Times are those of requests that were moved, from the offer to the last byte. Switches
    between the NICs are assumed to be unlimited.
    """
    if validate:
        from ..harness.arguments import names_of
        from ..harness.machine import describe
        from .validation import rows as validation_rows

        names_of(validate)
        if as_json:
            print_json({"kind": "machine", **describe()})
        found = validation_rows(validate)
        seen = show_rows(
            found if as_json else map(brief, found), as_json, f"{validate}: measured and simulated"
        )
        raise typer.Exit(0 if all(row["verified"] for row in seen) else 1)
    meant = model_of(str(model_config or model))
    way = way_of(path, calibrate, meant, tp, nics, gbps)
    scene = Scene(load, popular, fail_rail, pulls, lease_s, seed)
    move, given = Move(meant, tp, way), requests_of(trace, requests)
    curve = [rows(move, given, [size], scene) for size in workers or SIZES]
    title = f"{meant.name} at TP {tp} over {way.name}, {way.rails} rails a worker, load {load:g}"
    show_parts([fleet if as_json else map(brief, fleet) for fleet in curve], as_json, title)


def way_of(path: str, calibrate: Path | None, model: Model, tp: int, nics: int, gbps: float) -> Way:
    """Returns the path of that name between two workers. Raises ConfigError."""
    if path == "tcp":
        return path_of(path, _cost(calibrate), model, tp)
    if calibrate:
        raise ConfigError(f"--calibrate needs --path tcp; {path} is derived from --nics and --gbps")
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


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row that fits a screen."""
    return {name: value for name, value in row.items() if name not in _LONG}
