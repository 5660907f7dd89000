# SPDX-License-Identifier: Apache-2.0
"""Prints where kvlink's backend for NIXL is, and the settings by which each engine uses it."""

from __future__ import annotations

import json

import typer

from kvlink.cli.checks import Json
from kvlink.errors import ConfigError

ENGINES = {
    "vLLM": '--kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"backends": ["KVLINK"]}}\'',
    "Dynamo KVBM": "DYN_KVBM_NIXL_BACKEND_KVLINK=true",
}
"""By engine, what names the backend. docs/servers/nixl.md says what works."""


def nixl_plugin(as_json: Json = False) -> None:
    """Print the folder of the backend for NIXL, and the settings by which engines use it."""
    from kvlink.doctor.nixl import plugin_folder

    folder = plugin_folder()
    if folder is None:
        raise ConfigError(
            "kvlink's backend for NIXL is not installed; in a checkout of kvlink: pip install packaging/nixl"
        )
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "engines": ENGINES}))
        return
    typer.echo(f"export NIXL_PLUGIN_DIR={folder}")
    for engine, setting in ENGINES.items():
        typer.echo(f"# {engine}\n{setting}")
