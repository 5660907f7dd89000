# SPDX-License-Identifier: Apache-2.0
"""Calls of the driver from Python break no capture of a graph that the engine makes meanwhile."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
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
        self.called: list[str] = []
        self.copies: list[Callable[[], object]] = []

    def cuMemcpyHtoDAsync(self, to: int, source: int, num_bytes: int, _: int) -> tuple[int]:  # noqa: N802
        return self._copy(to, source, num_bytes, "cuMemcpyHtoDAsync")

    def cuMemcpyDtoHAsync(self, to: int, source: int, num_bytes: int, _: int) -> tuple[int]:  # noqa: N802
        return self._copy(to, source, num_bytes, "cuMemcpyDtoHAsync")

    def _copy(self, to: int, source: int, num_bytes: int, name: str) -> tuple[int]:
        if self.mode != _RELAXED:
            self.refused.append(name)
        self.copies.append(partial(ctypes.memmove, to, source, num_bytes))
        return (999 if name == self.fails else 0,)

    def cuStreamSynchronize(self, _: int) -> tuple[int]:  # noqa: N802
        for copy in self.copies:
            copy()
        self.copies.clear()
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:  # noqa: N802
        self.mode, before = mode, self.mode
        return 0, before

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*_: Any) -> tuple[int, ...]:
            if name not in ("cuInit", "cuDeviceGet") and self.mode != _RELAXED:
                self.refused.append(name)
            self.called.append(name)
            return (999 if name == self.fails else 0,) + (0,) * (
                name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuStreamCreate")
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


def test_copies_have_arrived_on_return_and_break_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = Bindings()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    driver = CudaDriver()
    memory = (ctypes.c_char * 4)()
    driver.store(0, ctypes.addressof(memory), b"abcd")
    assert bytes(memory) == b"abcd"
    assert driver.load(0, ctypes.addressof(memory) + 1, 2) == b"bc"
    assert (bindings.refused, bindings.mode) == ([], _GLOBAL)
    moves: dict[str, Callable[[], object]] = {
        "cuMemcpyHtoDAsync": lambda: driver.store(0, ctypes.addressof(memory), b"abcd"),
        "cuMemcpyDtoHAsync": lambda: driver.load(0, ctypes.addressof(memory), 4),
    }
    for copy, move in moves.items():
        bindings.fails = copy
        bindings.called.clear()
        with pytest.raises(TransportUnavailable, match=copy):
            move()
        assert bindings.called.count("cuStreamDestroy") == bindings.called.count("cuStreamCreate") == 1
        assert bindings.mode == _GLOBAL
