# SPDX-License-Identifier: Apache-2.0
"""The lane runs in the guest (`make test-rdma`), or natively on the device that KVLINK_TEST_RDMA names."""

from __future__ import annotations

import os
import platform

import pytest
from softroce import links

IN_GUEST = platform.node() == "guest" and {f"rxe{n}" for n in range(5)} <= links.devices()


@pytest.fixture(autouse=True)
def device() -> str:
    """A device that reads itself: the one named, or the guest's rxe0."""
    named = os.environ.get("KVLINK_TEST_RDMA", "").partition(":")[0]
    if named or IN_GUEST:
        return named or "rxe0"
    pytest.skip(
        "no RDMA device: make test-rdma boots a guest that has some (KVLINK_TEST_RDMA=mlx5_0: uses that)"
    )


@pytest.fixture
def guest_links(device: str) -> None:
    """For tests that cut and slow the links of rxe1…rxe4."""
    if not IN_GUEST:
        pytest.skip(f"{device}'s links are not a test's to cut: run make test-rdma without KVLINK_TEST_RDMA")
