# SPDX-License-Identifier: Apache-2.0
"""Adds commands of other packages (and kvlink.benchmarks), through the entry point group "kvlink.commands".

An entry point names a typer app. It is imported when its command runs, not before, so that a slow or broken one affects
no other command.
"""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint, entry_points

import typer

from kvlink.errors import ConfigError

GROUP = "kvlink.commands"
HELP = {"help_option_names": ["-h", "--help"]}
_COMPLETING = "_KVLINK_COMPLETE"

_SUMMARIES = {
    "kvlink.benchmarks:app": "Measure pulls, migrations, plans and the "
    "coordinator, and compare with other libraries.",
    "kvlink.benchmarks.prediction.command:app": "Predict the time to move a request, and "
    "the time that GPUDirect saves.",
    "kvlink.benchmarks.report.command:app": "Draw benchmark results on one page.",
    "kvlink.benchmarks.simulation.command:app": "Simulate fleets of thousands of workers, or "
    "compare simulated with real pulls.",
    "kvlink.integrations.router.commands.drain:app": "Take a server out of a router's rotation, "
    "or let workers drain, and wait until they may end.",
    "kvlink.integrations.router.commands.replicate:app": "Copy a prefix that many requests begin with to vLLM servers, "
    "before those requests come.",
    "kvlink.integrations.router.commands.router:app": "Route requests between prefill and decode servers. "
    "This is a demo, not for production.",
}


def add_to(app: typer.Typer) -> None:
    """Adds a command for each installed entry point."""
    words = os.environ.get("COMP_WORDS", "").split() if _COMPLETING in os.environ else []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in words[1:2]:  # completion needs the options and commands of this app
            _add_loaded(app, entry)
        else:
            _add(app, entry)


def _add_loaded(app: typer.Typer, entry: EntryPoint) -> None:
    loaded = _load(entry)
    if loaded.registered_callback or len(loaded.registered_commands) > 1:
        app.add_typer(loaded, name=entry.name)
    else:
        app.registered_commands += loaded.registered_commands


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    @app.command(
        entry.name,
        help=_SUMMARIES.get(entry.value, f"Commands of {entry.value.partition(':')[0]}."),
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "allow_interspersed_args": False,
            "ignore_unknown_options": True,
        },
    )
    def run(context: typer.Context) -> None:
        _load(entry)(context.args, prog_name=f"kvlink {entry.name}", **HELP)


def _load(entry: EntryPoint) -> typer.Typer:
    try:
        loaded = entry.load()
    except Exception as error:
        raise ConfigError(
            f"`kvlink {entry.name}` comes from {entry.value}, which does not load: "
            f"{type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if not isinstance(loaded, typer.Typer):
        raise ConfigError(
            f"`kvlink {entry.name}` comes from {entry.value}, which is not a typer app; repair or "
            f"uninstall that package"
        )
    return loaded
