# SPDX-License-Identifier: Apache-2.0
"""The lane runs where CUDA does; what needs a NIC beside the GPU takes the one that KVLINK_TEST_RDMA names."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver


@pytest.fixture(autouse=True)
def driver() -> CudaDriver:
    """CUDA as kvlink sees it."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU that torch can use; run on a machine with one: pytest -m gpu")
    try:
        return CudaDriver()
    except TransportUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def nic() -> str:
    """The port that moves the bytes."""
    named = os.environ.get("KVLINK_TEST_RDMA", "")
    if not named:
        pytest.skip("no NIC is named: KVLINK_TEST_RDMA=mlx5_0 pytest -m gpu")
    return named if ":" in named else f"{named}:1"


@pytest.fixture(params=["cudaMalloc", "expandable segments"])
def allocator(request: pytest.FixtureRequest) -> Iterator[str]:
    """How torch gets its memory."""
    import torch

    expandable = request.param == "expandable segments"
    # torch 2.9 and later warn about the older name.
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    settings = settings or torch.cuda.memory._set_allocator_settings
    torch.cuda.empty_cache()
    settings(f"expandable_segments:{expandable}")
    yield request.param
    settings("expandable_segments:False")
    torch.cuda.empty_cache()
