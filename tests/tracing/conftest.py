# SPDX-License-Identifier: Apache-2.0
"""Spans of the process that tests run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tracing.memory import Collected, collecting_here


@pytest.fixture
def collected() -> Iterator[Collected]:
    """Workers, coordinators and routers that are made from now on are traced."""
    with collecting_here() as spans:
        yield spans
