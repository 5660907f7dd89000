# SPDX-License-Identifier: Apache-2.0
"""`import kvlink` offers names that can be found, imported one by one, and read about on one screen."""

from __future__ import annotations

import ast
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import kvlink
from kvlink import errors
from kvlink.transfer.block_ids import as_buffer

SCREEN_LINES, SCREEN_COLUMNS = 24, 80
PULL_IN_ONE_PROCESS = """
import kvlink
layout = kvlink.dense(kvlink.Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=16))
pool = kvlink.BlockPool.allocate(layout)
with kvlink.Worker(pool, "one") as worker:
    ticket = worker.offer("r", [1, 2])
    with worker.pull(ticket, into=[5, 6]) as pull:
        pull.wait()
    try:
        worker.pull(ticket, into=[7, 8]).wait()
    except kvlink.StaleBlocks as error:
        assert error.why is kvlink.StaleReason.SETTLED, error
import sys
assert "torch" not in sys.modules
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", kvlink.__all__)
def test_every_name_of_the_list_can_be_imported(name: str) -> None:
    assert name in dir(kvlink)
    assert getattr(kvlink, name) is not None


def test_what_users_write_is_there() -> None:
    wanted = {"Worker", "BlockPool", "Ticket", "Pull", "Geometry", "dense", "errors", "__version__"}
    assert wanted <= set(kvlink.__all__)
    assert kvlink.errors is errors


def test_all_that_is_raised_is_there() -> None:
    raised = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert raised <= set(kvlink.__all__)
    assert kvlink.StaleBlocks is errors.StaleBlocks


def test_names_are_loaded_on_first_use() -> None:
    done = run(
        "import sys, kvlink\ndir(kvlink), kvlink.__version__\n"
        "heavy = {'torch', 'numpy', 'grpc', 'kvlink._core', 'kvlink.worker'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from kvlink import StaleBlocks, Geometry, dense\nassert 'kvlink._core' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_a_server_of_ones_own_needs_nothing_but_these_names() -> None:
    done = run(PULL_IN_ONE_PROCESS)
    assert done.returncode == 0, done.stderr


def test_modules_that_happen_to_be_loaded_are_not_listed() -> None:
    assert as_buffer
    public = {name for name in dir(kvlink) if not name.startswith("__")}
    assert public == set(kvlink.__all__) - {"__version__"}


def test_a_name_that_is_none_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'kvlink' has no attribute 'Wroker'"):
        kvlink.Wroker  # noqa: B018


def test_help_begins_with_one_screen_that_names_everything() -> None:
    text = pydoc.plain(pydoc.render_doc(kvlink))
    description = text.partition("DESCRIPTION\n")[2].partition("PACKAGE CONTENTS")[0].strip("\n").splitlines()
    assert len(description) <= SCREEN_LINES
    assert max(map(len, description)) < SCREEN_COLUMNS
    below = {
        name
        for name in kvlink.__all__
        if inspect.isclass(value := getattr(kvlink, name)) and value.__module__ == errors.__name__
    }
    unnamed = set(kvlink.__all__) - below - {"__version__"}
    assert [name for name in sorted(unnamed) if name not in "\n".join(description)] == []


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(kvlink.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {name.name for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported == set(kvlink.__all__) - {"__version__"}
