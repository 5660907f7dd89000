# SPDX-License-Identifier: Apache-2.0
"""The names and arguments that the package makes public."""

from __future__ import annotations

import ast
import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvlink
from kvlink import BlockPool, Geometry, Ticket, Worker, WorkerConfig, dense, errors
from kvlink.errors import ConfigError
from kvlink.transfer.block_ids import as_buffer

LAYOUT = dense(Geometry(1, 1, 64, 8))


def make(**given: Any) -> Worker:
    """A worker, if it is not refused."""
    return Worker(given.pop("pool", None) or BlockPool.allocate(LAYOUT, huge_pages=False), "w", **given)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Ticket.from_text(b"KVT1"), "a ticket's text must be text, not bytes"),
        (lambda: Ticket.from_text(None), "a ticket's text must be text, not NoneType"),
        (lambda: Ticket.from_bytes("KVT1"), "a ticket must be bytes, not str"),
        (lambda: make(pool="x"), "pool must be a BlockPool, not str"),
        (lambda: make(pool=LAYOUT), "pool must be a BlockPool, not KVLayout"),
        (lambda: make(config={"port": 1}), "config must be a WorkerConfig, not dict"),
        (lambda: make(transports=["shm", "tcp"]), r"transports \(KVLINK_TRANSPORTS\) must be text, not list"),
        (lambda: make(coordinator=7400), r"coordinator \(KVLINK_COORDINATOR\) must be text, not int"),
        (lambda: WorkerConfig(port="7400"), r"port \(KVLINK_PORT\) must be a whole number, not str"),
        (lambda: WorkerConfig(lease_s="5"), r"lease_s \(KVLINK_LEASE_S\) must be a number, not str"),
        (lambda: Geometry("1", 1, 64, 8), "num_layers must be a whole number, not str"),
        (lambda: Geometry(1, 1, 64.0, 8), "row_bytes must be a whole number, not float"),
        (lambda: dense("x"), "the first argument must be a Geometry, not str"),
        (lambda: WorkerConfig.from_env({"KVLINK_PORT": "tcp://10.96.0.1:7400"}),
         "comes from a Kubernetes Service that is called kvlink; set enableServiceLinks: false"),
    ],
)  # fmt: skip
def test_another_type_is_refused_by_name(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def test_whole_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert dense(Geometry(*numpy.array([1, 1, 64, 8]))) == LAYOUT
    assert WorkerConfig(port=numpy.int64(7400), lease_s=5).port == 7400


def test_messages_of_a_pull_name_its_arguments() -> None:
    with (
        Worker(BlockPool.allocate(LAYOUT, huge_pages=False), "owner", transports="loopback") as owner,
        Worker(BlockPool.allocate(LAYOUT, huge_pages=False), "reader", transports="loopback") as reader,
    ):
        with pytest.raises(ConfigError, match="17 tokens do not fit 1 blocks of 16 tokens"):
            owner.offer("r", [7], num_tokens=17)
        ticket = owner.offer("r", [1, 2])
        for into, says in (
            ([0], "into has 1 blocks of 16 tokens: 32 tokens do not fit"),
            ([0, 0], "into names a block twice: 0, again at index 1"),
            ([0, 99], "into names block 99 but there are 8: see index 1"),
        ):
            with pytest.raises(ConfigError, match=says):
                reader.pull(ticket, into=into).wait()
        with pytest.raises(ConfigError, match="timeout_s must be a number of seconds, not str"):
            reader.pull(ticket, into=[3, 4], timeout_s="3")  # type: ignore[arg-type]
        pull = reader.pull(ticket, into=[3, 4])
        pull.wait()
        (path,) = pull.explain()
        assert path.brief == f"owner over loopback: 4096 bytes in {path.measured_us:.0f} us"


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
