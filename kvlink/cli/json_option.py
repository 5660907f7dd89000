# SPDX-License-Identifier: Apache-2.0
"""Defines the option --json of commands, and prints the line that says that a server is ready."""

from __future__ import annotations

import json
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]
ReadyJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON line with the addresses when ready, and nothing else.")
]


def print_ready(as_json: bool, text: str, **addresses: str | None) -> None:
    """Prints `text`, or `addresses` as one JSON object. It is flushed at once, because programs wait for this line."""
    print(json.dumps(addresses) if as_json else text, flush=True)
