# SPDX-License-Identifier: Apache-2.0
"""Workers that are closed, forked or dropped at the worst moment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from transports.pairs import Pair

from kvlink import Worker
from kvlink.errors import KVLinkError

NewPair = Callable[..., Pair]

BLOCKS = range(128)  # 2 MiB


def test_closing_while_pulls_connect_or_run(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, num_blocks=130, inline_us=0)
    pauses = random.Random(6)
    ended = {True: 0, False: 0}
    for number in range(60):
        reader = pair.another_reader(f"brief-{number}")
        ticket = pair.offer(BLOCKS)
        pull = pair.start(ticket, BLOCKS, reader)
        time.sleep(pauses.uniform(0, 0.006))
        reader.close()
        blocks = pair.blocks(reader)
        blocks[:] = 0x77
        try:
            ended[pull.wait(20)] += 1
        except KVLinkError:
            ended[False] += 1
            pair.owner.do("abort", request_id=ticket.request_id)
        time.sleep(0.001)
        assert (blocks == 0x77).all(), "a byte landed in the pool of a closed worker"
    assert ended[False] > 5
    pair.works()


def test_closing_while_threads_pull(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pauses = random.Random(7)
    ticket = pair.offer(range(16))
    for number in range(20):
        reader = pair.another_reader(f"busy-{number}")
        reader.pull(ticket, range(16), settle=False).wait(20)
        errors: list[BaseException] = []

        def keep_pulling(reader: Worker = reader, errors: list[BaseException] = errors) -> None:
            try:
                while True:
                    reader.pull(ticket, range(16), settle=False, timeout_s=20).wait(20)
            except BaseException as raised:
                errors.append(raised)

        threads = [threading.Thread(target=keep_pulling) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(pauses.uniform(0, 0.01))
        reader.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert all(isinstance(error, KVLinkError) for error in errors), errors
        assert len(errors) == 2


_FORK = """
import os, sys, numpy as np
sys.path.insert(0, sys.argv[1])
from transports.pools import PoolSpec
from kvlink import Worker
from kvlink.errors import ConfigError
owner = Worker(PoolSpec().make(), "owner", transports=sys.argv[2])
reader = Worker(PoolSpec().make(), "reader", transports=sys.argv[2])
ticket = owner.offer("r", [1, 2, 3])
owner.pool.numpy()[:] = 7
reader.pull(ticket, [4, 5, 6], settle=False).wait()
child = os.fork()
if child == 0:
    refused = 0
    for act in (
        lambda: reader.pull(ticket, [7, 8, 9], settle=False),
        lambda: reader.pull([ticket], [7, 8, 9]),
        lambda: reader.pull("some-id", [7]),
        lambda: reader.connect(ticket),
        lambda: owner.offer("s", [1]),
        lambda: owner.abort("r"),
        lambda: owner.events(),
        lambda: owner.lease_counts(),
    ):
        try:
            act()
        except ConfigError:
            refused += 1
    reader.close()
    print("child", refused, flush=True)
    sys.exit(0)  # with all that an interpreter does when it ends
_, status = os.waitpid(child, 0)
for _ in range(20):
    reader.pool.numpy()[:] = 0
    reader.pull(ticket, [4, 5, 6], settle=False).wait(20)
    assert reader.pool.numpy().any()
reader.pull(ticket, [4, 5, 6]).wait(20)
print("parent", os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_touches_nothing_of_its_parent(transport: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FORK, str(Path(__file__).parent.parent), transport],
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.split("\n") == ["child 8", "parent 0", ""], ended.stderr
    assert ended.returncode == 0
