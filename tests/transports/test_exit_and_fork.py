# SPDX-License-Identifier: Apache-2.0
"""Workers keep Python's promises when an interpreter ends with workers in it, or forks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from transports.pools import PoolSpec
from transports.processes import RemoteWorker

NewOwner = Callable[..., RemoteWorker]

SCRIPT = """
import os, sys
import numpy as np
import kvlink
from kvlink.layout import Geometry, dense
layout = dense(Geometry(num_layers=1, total_heads=1, row_bytes=4096, num_blocks=64, block_tokens=1, planes_per_layer=1))
def worker(name, **config):
    return kvlink.Worker(
        kvlink.BlockPool.allocate(layout), name, config=kvlink.WorkerConfig(**config)
    )
def pair(transport, fault=""):
    reader = worker("reader", transports="fault+" + transport, fault=fault)
    return worker("owner", transports=transport), reader
"""


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT + body],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},  # it remarks on forks
    )


@pytest.mark.parametrize(
    "body",
    [
        "owner, reader = pair('shm')\nreader.pull(owner.offer('r', [1]), [2]).wait()",
        "owner, reader = pair('tcp', 'hang@2')\npull = reader.pull(owner.offer('r', range(60)), range(60))",
        "owner, reader = pair('shm', 'delay=5s@2')\npull = reader.pull(owner.offer('r', range(60)), range(60))",
        "owner, reader = pair('tcp')\nsys.exit(0)",
        "owner, reader = pair('cma')\ndel owner\nimport gc; gc.collect()",
        "import threading\nowner, reader = pair('tcp', 'hang@2')\n"
        "pull = reader.pull(owner.offer('r', [1]), [2])\n"
        "def wait():\n"
        "    try: pull.wait(30)\n"
        "    except kvlink.errors.KVLinkError: pass\n"
        "threading.Thread(target=wait, daemon=True).start()",
        "import concurrent.futures.thread as executors\nowner, reader = pair('tcp')\n"
        "executors._python_exit()  # what an exiting interpreter does first\n"
        "try: reader.pull(owner.offer('r', [1]), [2]).wait(1)\n"
        "except kvlink.errors.KVLinkError: pass",
    ],
)
def test_the_interpreter_exits_quietly_without_close(body: str) -> None:
    for _ in range(3):
        ended = run_script(body)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_reader_that_connects_while_its_interpreter_exits_is_told(new_owner: NewOwner) -> None:
    layout = PoolSpec(64, block_tokens=1, num_layers=1, total_heads=1, row_bytes=4096, planes_per_layer=1)
    ticket = new_owner(layout, transports="tcp").offer([1], "r")
    ended = run_script(
        f"""
import concurrent.futures.thread as executors
reader = worker("reader", transports="tcp")
executors._python_exit()
try: reader.pull(kvlink.Ticket.from_text("{ticket.to_text()}"), [2]).wait(30)
except kvlink.errors.Cancelled as error: print(error)
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        0,
        "request r: this process is exiting\n",
        "",
    )


def test_a_forked_child_is_told_and_the_parent_does_not_notice() -> None:
    ended = run_script(
        """
owner, reader = pair("tcp")
ticket = owner.offer("before", [1])
reader.pull(ticket, [2]).wait()
child = os.fork()
if child == 0:
    told = 0
    for act in (lambda: owner.offer("child", [3]), lambda: reader.pull("x", [2]), lambda: owner.events()):
        try:
            act()
        except kvlink.errors.ConfigError:
            told += 1
    owner.close()
    os._exit(told)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert reader.pull(owner.offer("after", [1]), [2]).wait(10)
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")


_INHERITED = """
import dataclasses, gc, socket
from kvlink.control import AgentClients, CoordinatorClient
owner, reader = pair("tcp", "hang@4")
reader.pull(owner.offer("warm", [1]), [2]).wait()
running = reader.pull(owner.offer("r", range(60)), range(60), timeout_s=20)
silent = socket.create_server(("127.0.0.1", 0))
elsewhere = owner.offers.sign(
    dataclasses.replace(owner.offer("s", [1]), epoch=1, agent=f"127.0.0.1:{silent.getsockname()[1]}")
)
starting = reader.pull(elsewhere, [2], timeout_s=20)
connection = reader.peers()[0].connection
pool = reader.pool
child = os.fork()
if child == 0:
    acts = {
        "done": running.done, "wait": running.wait, "cancel": running.cancel, "settle": starting.settle,
        "done while starting": starting.done, "wait while starting": starting.wait,
        "cancel while starting": starting.cancel, "connection": lambda: connection.settle(1, 1000),
        "connection's state": lambda: connection.broken, "offer": lambda: owner.offer("c", [1]),
        "new worker": lambda: kvlink.Worker(pool, "second"), "agents": AgentClients,
        "coordinator": lambda: CoordinatorClient("127.0.0.1:1"),
    }
    for name, act in acts.items():
        try:
            act()
        except kvlink.errors.ConfigError as error:
            if "spawn or forkserver" not in str(error): print(name, error)
        else:
            print(name, "was let through")
    connection.close()
    owner.close()
    if "parent" not in repr(running): print(repr(running))
    del connection, owner, reader, running, starting
    gc.collect()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not running.done()
running.cancel()
starting.cancel()
another, other = pair("tcp")  # the first reader's connection hangs, as asked for
assert other.pull(owner.offer("after", [1]), [2]).wait(10)
"""


def test_what_a_forked_child_inherits_is_refused_at_once_and_its_end_disturbs_nobody() -> None:
    ended = run_script(_INHERITED)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_child_forked_before_the_first_worker_works() -> None:
    ended = run_script(
        """
child = os.fork()
if child == 0:
    owner, reader = pair("tcp")
    os._exit(0 if reader.pull(owner.offer("r", [1]), [2]).wait() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
owner, reader = pair("tcp")
assert reader.pull(owner.offer("r", [1]), [2]).wait()
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_child_of_a_process_that_closed_its_workers_is_told_to_spawn() -> None:
    ended = run_script(
        """
first, second = pair("tcp")
first.close(), second.close()
child = os.fork()
if child == 0:
    try:
        worker("child")
    except kvlink.errors.ConfigError as error:
        os._exit(0 if "spawn or forkserver, or fork before the first Worker" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")
