# SPDX-License-Identifier: Apache-2.0
"""Implements the command `kvlink predict`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from kvlink.cli.tables import show_rows
from kvlink.transfer.cost_model import PRIORS, Cost

from ..harness.options import ModelName
from ..workloads.models import BLOCK_TOKENS, model_of
from .calibration import Fit, fits_of
from .machines import Machine, request_of
from .path import Path as Way
from .path import Request

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_HOST_PATHS = ("shm", "cma", "tcp")
Row = dict[str, Any]


@app.command()
def predict(
    model: ModelName = "llama-3.1-70b",
    model_config: Annotated[
        Path | None, typer.Option(help="Use the geometry of this Hugging Face config.json instead.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Move a request of this many tokens; may be repeated. [1024, 8192, 32768]"),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Use this many ranks on each side.")] = 8,
    block_tokens: Annotated[int, typer.Option(min=1, help="Use blocks of this many tokens.")] = BLOCK_TOKENS,
    run: Annotated[
        int, typer.Option(min=1, help="Assume runs of this many contiguous blocks at the owner.")
    ] = 1,
    nics: Annotated[
        int, typer.Option(min=1, max=1024, help="Use this many NICs on each side, for all ranks.")
    ] = 8,
    gbps: Annotated[float, typer.Option(min=0.1, help="Use NICs of this many Gb/s.")] = 400.0,
    mtu: Annotated[
        int, typer.Option(min=256, max=4096, help="Use this path MTU of the fabric, in bytes.")
    ] = 4096,
    infiniband: Annotated[
        bool, typer.Option("--infiniband", help="Use InfiniBand instead of RoCE v2.")
    ] = False,
    pcie: Annotated[int, typer.Option(min=3, max=6, help="Use this PCIe generation with 16 lanes.")] = 5,
    nvlink: Annotated[int, typer.Option(min=4, max=5, help="Use this NVLink generation.")] = 4,
    prefill_ms: Annotated[
        float, typer.Option(min=0, help="Assume a prefill time of this many ms. 0 omits the overlap.")
    ] = 0.0,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Fit cost models to these results of `kvlink bench pull --json` or `bench peers --json`."
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Show Mooncake's published table and its prediction instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")] = False,
) -> None:
    """Predict the move of a request: time, bottleneck, what GPUDirect saves, and the NICs that hide
    it behind prefill.
    """
    if published:
        from .published import rows as published_rows

        show_rows(published_rows(), as_json, "Mooncake's table, predicted from its first and last row")
        return
    fits = fits_of(calibrate) if calibrate else {}
    if fits:
        show_rows(_fit_rows(fits), as_json, f"fitted to {calibrate}")
    costs = {name: fits[name].cost if name in fits else PRIORS[name] for name in _HOST_PATHS}
    ways = Machine(nics, gbps, mtu, infiniband, pcie, nvlink).paths(tp)
    meant = model_of(str(model_config or model))
    rows = (
        {"model": meant.name, "tokens": count, **row}
        for count in tokens or [1024, 8192, 32_768]
        for row in rows_of(request_of(meant, count, tp, block_tokens, run), ways, costs, tp, prefill_ms)
    )
    show_rows(rows, as_json, f"predicted at TP {tp}")


def rows_of(
    request: Request, ways: list[Way], costs: dict[str, Cost], ranks: int, prefill_ms: float
) -> Iterator[Row]:
    """Yields one row per path; the first one is GPUDirect. Paths within a host take each rank's share separately."""
    gib = request.num_bytes / 2**30
    direct_ms = ways[0].predict(request).total_ms
    for way in ways:
        found = way.predict(request)
        row = {
            "gib": gib,
            "pieces": request.pieces,
            "path": found.path,
            "ms": found.total_ms,
            "gib_per_s": found.gib_per_s(request.num_bytes),
            "bottleneck": found.bottleneck,
            "over_gpudirect": found.total_ms / direct_ms,
        }
        yield row | (_overlap(way, request, prefill_ms, found.total_ms) if prefill_ms else {})
    for name, cost in costs.items():
        ms = cost.predict_us(request.pieces // ranks, request.num_bytes // ranks) / 1e3
        yield {
            "gib": gib,
            "pieces": request.pieces,
            "path": name,
            "ms": ms,
            "gib_per_s": gib / (ms / 1e3),
            "bottleneck": _largest(cost, request, ranks),
            "over_gpudirect": ms / direct_ms,
        }


def _overlap(way: Way, request: Request, prefill_ms: float, whole_ms: float) -> Row:
    exposed_ms = way.exposed_ms(request, prefill_ms)
    return {
        "of_ttft": whole_ms / (whole_ms + prefill_ms),
        "layer_wise_ms": exposed_ms,
        "layer_wise_pays": exposed_ms < whole_ms,
        "rails_to_hide": way.rails_to_hide(request, prefill_ms) or "never",
    }


def _largest(cost: Cost, request: Request, ranks: int) -> str:
    terms = {
        "start-up": cost.start_us,
        "operations": request.pieces / ranks * cost.op_ns / 1e3,
        "bytes": request.num_bytes / ranks / (cost.gib_per_s * 2**30) * 1e6,
    }
    return max(terms, key=lambda name: terms[name])


def _fit_rows(fits: dict[str, Fit]) -> Iterator[Row]:
    """Yields the fits. Errors are those of shapes that the model had not seen; absent if there are too few."""
    for name, fit in fits.items():
        yield {
            "transport": name,
            "start_us": fit.cost.start_us,
            "op_ns": fit.cost.op_ns,
            "gib_per_s": fit.cost.gib_per_s,
            "samples": fit.samples,
        } | ({"median_error": median(map(abs, fit.errors)), "worst_error": fit.worst} if fit.errors else {})
