# SPDX-License-Identifier: Apache-2.0
"""A server that offers its cache softly, for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from worker.soft_server import Server


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(opened: ExitStack) -> Server:
    return Server(opened, "loopback", lease_slots=4)
