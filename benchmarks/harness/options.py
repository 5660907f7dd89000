# SPDX-License-Identifier: Apache-2.0
"""Defines options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from kvlink.cli.checks import transport_names

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]
Transport = Annotated[
    str,
    typer.Option(
        help="Measure these transports: names separated by commas, or all.", autocompletion=transport_names
    ),
]


def _model_names() -> list[str]:
    from ..workloads.models import MODELS

    return list(MODELS)


ModelName = Annotated[
    str, typer.Option(help="Use the KV geometry of this model.", autocompletion=_model_names)
]
Iters = Annotated[int | None, typer.Option(min=1, help="Measure this many pulls; by default by size.")]
BlockOrder = Annotated[
    str,
    typer.Option(
        help="Choose block ids in this order: random; runs:K, runs of K blocks; allocator:N:M, like a paged "
        "allocator whose whole pool a trace has used M times, N requests at a time. [N 16, M 5]"
    ),
]
