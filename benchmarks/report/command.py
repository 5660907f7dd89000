# SPDX-License-Identifier: Apache-2.0
"""Implements the command `kvlink report`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import typer

from kvlink.errors import ConfigError

from ..harness.results import read_rows
from .comparison import side_of
from .page import results_of, write
from .summary import write_charts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Read the output of `kvlink bench … --json`, of one run or several; two files are compared."
        ),
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
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV instead.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line with the path, and nothing else.")
    ] = False,
) -> None:
    """Draw benchmark results on one page that opens anywhere, without a network."""
    if chart is not None:
        written = [str(write_charts(summary, chart)) for summary in results]
        typer.echo(json.dumps({"charts": written}) if as_json else "\n".join(written))
        return
    if as_csv:
        typer.echo(_csv(results), nl=False)
        return
    found = [results_of(path.stem, side_of(path)) for path in results]
    for path, each in zip(results, found, strict=True):
        if not each.num_rows:
            raise ConfigError(f"{path} has no row of kvlink bench, predict or simulate")
    try:
        output.write_text(write(found, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}") from error
    number = sum(each.num_rows for each in found)
    ready = {"report": str(output.resolve()), "measurements": number}
    typer.echo(json.dumps(ready) if as_json else f"{output}: {number} measurements")


def _csv(results: list[Path]) -> str:
    rows = [row for path in results for row in read_rows(path)]
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
