# SPDX-License-Identifier: Apache-2.0
"""Implements the command `kvlink report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvlink.errors import ConfigError

from ..prediction.calibration import read_rows
from .measures import results_of
from .summary import write_charts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Read the output of `kvlink bench … --json`; two files are compared.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the page here.")] = Path(
        "report.html"
    ),
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Draw summary files, such as docs/benchmarks/figures/peers.json, as SVG into this folder instead.",
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Use this title instead of the host and date of the run.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line with the path, and nothing else.")
    ] = False,
) -> None:
    """Draw benchmark results on one page that opens anywhere, without a network."""
    if chart is not None:
        written = [str(write_charts(summary, chart)) for summary in results]
        typer.echo(json.dumps({"charts": written}) if as_json else "\n".join(written))
        return
    number = _write_page(results, output, title)
    ready = {"report": str(output.resolve()), "measurements": number}
    typer.echo(json.dumps(ready) if as_json else f"{output}: {number} measurements")


def _write_page(results: list[Path], output: Path, title: str) -> int:
    """Returns the number of measurements on the page."""
    try:
        from .page import write
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        raise ConfigError("the report needs matplotlib; run pip install 'kvlink[report]'") from error

    found = [results_of(path.stem, read_rows(path)) for path in results]
    for path, each in zip(results, found, strict=True):
        if not (each.measures or each.phases or each.absent or each.fleets or each.validated or each.growths):
            raise ConfigError(
                f"{path} has no row of kvlink bench pull, peers, migrate or growth, or of kvlink simulate"
            )
    try:
        output.write_text(write(found, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}") from error
    return sum(len(each.measures) for each in found)
