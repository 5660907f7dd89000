# SPDX-License-Identifier: Apache-2.0
"""Implements the command `kvlink predict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from kvlink.transfer.cost_model import PRIORS, Cost

from ..harness.options import Gbps, Json, ModelName, Nics
from ..harness.results import Record, read_rows
from ..workloads.block_budget import Degrees
from ..workloads.models import BLOCK_TOKENS, model_of
from .calibration import Control, Fit, control_of, fits_of
from .paths import Machine, Request, request_of
from .paths import Path as Way

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_HOST_PATHS = ("shm", "cma", "tcp")
_MEASURED_PATHS = ("fabric",)
"""Paths that are predicted only with --calibrate: providers of libfabric have no cost in common."""
Row = dict[str, Any]


@app.command()
def predict(
    model: ModelName = "llama-3.1-70b",
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Move a request of this many tokens; may be repeated. [1024, 8192, 32768]"),
    ] = None,
    tp: Annotated[
        str,
        typer.Option(help="Use this many ranks on each side, or a pair such as 2:4 for prefill and decode."),
    ] = "8",
    pp: Annotated[str, typer.Option(help="Use these pipeline stages of prefill and decode.")] = "1:1",
    block_tokens: Annotated[int, typer.Option(min=1, help="Use blocks of this many tokens.")] = BLOCK_TOKENS,
    run: Annotated[
        int, typer.Option(min=1, help="Assume runs of this many contiguous blocks at the owner.")
    ] = 1,
    nics: Nics = 8,
    gbps: Gbps = 400.0,
    mtu: Annotated[
        int, typer.Option(min=256, max=4096, help="Use this path MTU of the fabric, in bytes.")
    ] = 4096,
    infiniband: Annotated[
        bool, typer.Option("--infiniband", help="Use InfiniBand instead of RoCE v2.")
    ] = False,
    pcie: Annotated[int, typer.Option(min=3, max=6, help="Use this PCIe generation with 16 lanes.")] = 5,
    nvlink: Annotated[int, typer.Option(min=4, max=5, help="Use this NVLink generation.")] = 4,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Fit cost models to these results of `kvlink bench pull --json` or `bench peers --json`, and the "
            "control plane to those of `bench migrate --json`. fabric has a row only with such results."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the handoff of a request: time, bottleneck, and what GPUDirect saves.

    ms_from and ms_to are the ends of its error. The control plane is part of it if --calibrate has measured handoffs.
    """
    record = Record("predict", as_json)
    fits = fits_of(calibrate) if calibrate else {}
    if fits:
        record.show("fit", [_fit_rows(fits)], title=f"fitted to {calibrate}")
    control = control_of(read_rows(calibrate) if calibrate else ())
    degrees = Degrees.parse(tp, pp)
    ranks = max(
        degrees.prefill * degrees.prefill_stages, (degrees.decode or degrees.prefill) * degrees.decode_stages
    )
    ways, meant = (
        Machine(nics, gbps, mtu, infiniband, pcie, nvlink).paths(ranks),
        model_of(model),
    )
    rows = (
        {"model": meant.name, "tokens": count, **row}
        for count in tokens or [1024, 8192, 32_768]
        for row in rows_of(request_of(meant, count, degrees, block_tokens, run), ways, fits, ranks, control)
    )
    without = "" if control else ", without the control plane (see --calibrate)"
    record.show("prediction", [rows], title=f"predicted at TP {tp}, PP {pp}{without}")
    record.end()


def rows_of(
    request: Request,
    ways: list[Way],
    fits: Mapping[str, Fit],
    ranks: int,
    control: Control | None,
) -> Iterator[Row]:
    """Yields one row per path; the first one is GPUDirect. Paths within a host take each rank's share separately."""
    direct_ms = ways[0].predict(request).total_ms + (control.us / 1e3 if control else 0.0)
    for way in ways:
        found = way.predict(request)
        yield _row(request, found.path, found.total_ms, control, found.bottleneck, Fit.assumed(), direct_ms)
    for name in (*_HOST_PATHS, *(name for name in _MEASURED_PATHS if name in fits)):
        fit = fits.get(name) or Fit.assumed(PRIORS[name])
        ms = fit.cost.predict_us(request.pieces // ranks, request.num_bytes // ranks) / 1e3
        yield _row(request, name, ms, control, _largest(fit.cost, request, ranks), fit, direct_ms)


def _row(
    request: Request,
    path: str,
    ms: float,
    control: Control | None,
    bottleneck: str,
    fit: Fit,
    direct_ms: float,
) -> Row:
    gib = request.num_bytes / 2**30
    least, most = fit.factors
    control_ms, low_ms, high_ms = (us / 1e3 for us in control or (0.0, 0.0, 0.0))
    whole = ms + control_ms
    return {
        "path": path,
        "ms": whole,
        "ms_from": ms * least + low_ms,
        "ms_to": ms * most + high_ms,
        "error_of": "other shapes" if fit.errors else "assumed",
        "gib": gib,
        "pieces": request.pieces,
        "control_ms": control_ms if control else None,
        "gib_per_s": gib / (ms / 1e3),
        "bottleneck": "control plane" if control_ms > ms else bottleneck,
        "over_gpudirect": whole / direct_ms,
    }


def _largest(cost: Cost, request: Request, ranks: int) -> str:
    terms = {
        "start-up": cost.start_us,
        "operations": request.pieces / ranks * cost.op_ns / 1e3,
        "bytes": request.num_bytes / ranks / (cost.gib_per_s * 2**30) * 1e6,
    }
    return max(terms, key=lambda name: terms[name])


def _fit_rows(fits: Mapping[str, Fit]) -> Iterator[Row]:
    """Yields the fits. Errors are those of shapes that the model had not seen; absent if there are too few."""
    for name, fit in fits.items():
        yield {
            "transport": name,
            "start_us": fit.cost.start_us,
            "op_ns": fit.cost.op_ns,
            "gib_per_s": fit.cost.gib_per_s,
            "samples": fit.samples,
        } | ({"median_error": median(map(abs, fit.errors)), "worst_error": fit.worst} if fit.errors else {})
