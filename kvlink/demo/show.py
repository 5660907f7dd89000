# SPDX-License-Identifier: Apache-2.0
"""The whole demo: start the processes, compute what is expected, try every transport, print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvlink.demo.cluster import Cluster
from kvlink.demo.router import NUM_NEW_TOKENS, STEPS, Expected, Route
from kvlink.demo.table import Row, failed, print_json, print_table
from kvlink.demo.text import PROMPTS, tokenize
from kvlink.demo.transports import choose


def show(names: Sequence[str] | None, json: bool) -> int:
    """See kvlink.demo.run."""
    chosen = choose(names)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=json) as progress:
        rows = _try_all(chosen, progress, json)
    if not json:
        print_table(rows, Console())
    return 0 if all(row.good for row in rows) else 1


def _try_all(chosen: dict[str, str], progress: Progress, json: bool) -> list[Row]:
    rows = []
    task = progress.add_task("starting coordinator, prefill and decode", total=None)
    with Cluster() as cluster:
        expected = single_process_run()
        coordinator = cluster.wait_ready()
        progress.update(task, total=len(chosen) * STEPS)
        for done, (transport, why_not) in enumerate(chosen.items()):
            progress.update(task, description=transport, completed=done * STEPS)
            route = Route(transport, *cluster.hosts(transport), lambda: progress.advance(task))
            rows.append(failed(transport, why_not) if why_not else route.try_out(coordinator, expected))
            if json:
                print_json(rows[-1])
    return rows


def single_process_run() -> Expected:
    """Tokens of every prompt on a cache that never left this process."""
    from kvlink.demo.model import TinyLlama  # takes seconds, while the children import the same

    model = TinyLlama()
    return {name: model.generate(tokenize(text), NUM_NEW_TOKENS) for name, text in PROMPTS.items()}
