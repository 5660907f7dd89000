# SPDX-License-Identifier: Apache-2.0
"""A coordinator for servers that run in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvlink.background import ControlThread
from kvlink.coordinator import Coordinator


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    control = ControlThread.shared()
    coordinator = Coordinator()
    control.run(coordinator.start())
    yield coordinator
    control.run(coordinator.close())
