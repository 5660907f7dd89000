# SPDX-License-Identifier: Apache-2.0
"""Two directives: `kvlink-config` has the table of settings, `kvlink-cli` what each command's --help says."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import typer.main
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from kvlink.cli.commands import app as cli
from kvlink.cli.plugins import GROUP
from kvlink.cli.tables import size_text
from kvlink.config import CATALOGUE
from kvlink.config.setting import Setting


def _default(setting: Setting) -> str:
    if setting.default == "":
        return "empty"
    value = int(setting.default) if isinstance(setting.default, bool) else setting.default
    if setting.unit == "bytes":
        return f"`{value}` ({size_text(int(value))})"
    return f"`{value}`" + (f" {setting.unit}" if setting.unit else "")


def settings() -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| variable | default | meaning |"
    yield "|---|---|---|"
    for setting in CATALOGUE:
        limits = ""
        if setting.choices:
            limits = " Allowed: " + ", ".join(f"`{choice}`" for choice in setting.choices if choice) + "."
        elif setting.most is not None:
            limits = f" Allowed: {setting.least:,.16g} to {setting.most:,.16g}."
        text = " ".join(filter(None, (setting.meaning, setting.advice))).replace("|", "¦")
        yield f"| `{setting.env}` | {_default(setting)} | {text}{limits} |"


def _options(command: Any) -> Iterator[str]:
    rows = []
    for one in command.params:
        if one.param_type_name == "option" and not one.hidden and one.name != "help":
            names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
            shows = isinstance(one.default, (str, int, float)) and not isinstance(one.default, bool)
            default = f"`{one.default}`" if shows and one.default != "" else ""
            rows.append(f"| {names} | {default} | {(one.help or '').replace('|', '¦')} |")
        elif one.param_type_name == "argument":
            rows.append(f"| `{(one.name or '').upper()}` | | {getattr(one, 'help', '') or ''} |")
    if rows:
        yield from ("| option | default | meaning |", "|---|---|---|", *rows, "")


def commands(command: Any, name: str = "kvlink", depth: int = 2) -> Iterator[str]:
    """The lines of a section for a command and for each below it."""
    yield from ("#" * min(depth, 4) + f" `{name}`", "", (command.help or "").replace("\b\n", ""), "")
    yield from _options(command)
    if command.epilog:
        _, *examples = command.epilog.split("\n\n")
        yield from ("```sh", *examples, "```", "")
    if hasattr(command, "list_commands"):
        # Those of other packages show their options only once they are loaded.
        plugins = {one.name: typer.main.get_command(one.load()) for one in entry_points(group=GROUP)}
        context = command.context_class(command)
        for below in command.list_commands(context):
            found = plugins.get(below) if depth == 2 else None
            found = found or command.get_command(context, below)
            if found is not None and not found.hidden:
                yield from commands(found, f"{name} {below}", depth + 1)


class _Generated(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the page depends on Python files that Sphinx does not see
        holder = nodes.Element()
        lines = settings() if self.name == "kvlink-config" else commands(typer.main.get_command(cli))
        self.state.nested_parse("\n".join(lines).splitlines(), self.content_offset, holder, match_titles=True)
        return list(holder.children)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("kvlink-config", _Generated)
    app.add_directive("kvlink-cli", _Generated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
