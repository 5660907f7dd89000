# SPDX-License-Identifier: Apache-2.0
"""Calls of the driver from Python break no capture of a graph that the engine makes meanwhile."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver
from kvlink.hardware.gpudirect.driver import Ordering

_GLOBAL, _RELAXED = 0, 2  # as CUstreamCaptureMode numbers them


class Bindings(ModuleType):
    """Stands for cuda.bindings.driver. Calls that may wait fail unless this thread's mode is relaxed."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=_RELAXED)
    CUflushGPUDirectRDMAWritesTarget = SimpleNamespace(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX=0)
    CUflushGPUDirectRDMAWritesScope = int

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.mode = _GLOBAL
        self.refused: list[str] = []
        self.fails = ""

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:  # noqa: N802
        self.mode, before = mode, self.mode
        return 0, before

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*_: Any) -> tuple[int, ...]:
            if name not in ("cuInit", "cuDeviceGet") and self.mode != _RELAXED:
                self.refused.append(name)
            return (999 if name == self.fails else 0,) + (0,) * (
                name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain")
            )

        return call


@pytest.mark.parametrize("fails", ["", "cuFlushGPUDirectRDMAWrites", "cuCtxPushCurrent"])
def test_a_flush_breaks_no_capture_and_the_mode_comes_back(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    bindings = Bindings()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    driver = CudaDriver()
    bindings.fails = fails
    if fails:
        with pytest.raises(TransportUnavailable, match=fails):
            driver.flush(0, Ordering.OWNER)
    else:
        driver.flush(0, Ordering.OWNER)
    assert bindings.refused == []
    assert bindings.mode == _GLOBAL
