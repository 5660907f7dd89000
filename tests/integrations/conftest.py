# SPDX-License-Identifier: Apache-2.0
"""A coordinator for servers that run in this process, and two servers that hold a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvlink.coordinator import Coordinator
from kvlink.runtime.background import ControlThread


@pytest.fixture(scope="module")
def unsigned() -> Iterator[None]:
    """Nothing is signed, so that what would be refused as forged is parsed and compared."""
    from kvlink.integrations.vllm.wire import handoff

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLINK_TICKET_KEYS", "none")
        handoff._keys.cache_clear()
        yield
    handoff._keys.cache_clear()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    control = ControlThread.shared()
    coordinator = Coordinator()
    control.run(coordinator.start())
    yield coordinator
    control.run(coordinator.close())


@pytest.fixture
def servers() -> Iterator[tuple[Any, Any]]:
    """Prefill and decode of vLLM. Needs torch."""
    from answered_turns import bidirectional

    with bidirectional() as both:
        yield both
