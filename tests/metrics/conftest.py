# SPDX-License-Identifier: Apache-2.0
"""Two workers in this process, one reading from the other."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from transports.pools import PoolSpec

from kvlink import Worker, WorkerConfig


@pytest.fixture
def free_port() -> int:
    """Returns a free port of loopback; another process may take it, which no test here has seen."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture
def owner() -> Iterator[Worker]:
    with Worker(PoolSpec().make(), "prefill", config=WorkerConfig(transports="loopback")) as worker:
        yield worker


@pytest.fixture
def reader() -> Iterator[Worker]:
    with Worker(PoolSpec().make(), "decode", config=WorkerConfig(transports="loopback")) as worker:
        yield worker
