# SPDX-License-Identifier: Apache-2.0
"""Loads the kernel for a GPU: an image that kvlink ships, or one that NVRTC compiles on first use.

Only NVRTC needs cuda-python. Without a kernel the driver copies, and `kernel_for` logs a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvlink import _core
from kvlink.errors import TransportUnavailable
from kvlink.hardware.kernels import nvrtc
from kvlink.hardware.kernels.images import SOURCE, suitable

_log = logging.getLogger("kvlink.kernels")
_Kernel = TypeVar("_Kernel")

__all__ = ["SOURCE", "first_accepted", "kernel_for"]


def kernel_for(gpu: int) -> _core.CudaKernel | None:
    """Returns gather.cu on the GPU that CUDA numbers `gpu`, or None if no image can be loaded."""
    try:
        target = _core.kernel_target(gpu)
    except TransportUnavailable as error:
        _warn(gpu, str(error))
        return None
    return first_accepted(gpu, target, lambda image: _core.CudaKernel(image, gpu))


def first_accepted(
    gpu: int, target: tuple[int, int, int], load: Callable[[bytes], _Kernel], cache: Path | None = None
) -> _Kernel | None:
    """Returns the first image that `load` does not refuse: a shipped one, then NVRTC's.

    `target` has the compute capability and the driver's newest CUDA. `cache` is the folder for NVRTC's images.
    """
    major, minor, driver = target
    images: list[tuple[str, Callable[[], bytes]]] = [
        (path.name, path.read_bytes) for path in suitable(major, minor)
    ]
    images.append(("NVRTC", lambda: nvrtc.cached(SOURCE.read_bytes(), f"sm_{major}{minor}", driver, cache)))
    refused, fix = [], ""
    for name, read in images:
        kernel, why, fix = _tried(load, read)
        if kernel is not None:
            _log.debug("cuda:%d copies by the image %s", gpu, name)
            return kernel
        refused.append(f"{name}: {why}")
    _warn(gpu, "; ".join(refused) + (f". {fix}" if fix else ""))
    return None


def _tried(load: Callable[[bytes], _Kernel], read: Callable[[], bytes]) -> tuple[_Kernel | None, str, str]:
    """Returns the kernel, or None with the reason and the fix."""
    try:
        return load(read()), "", ""
    except TransportUnavailable as error:  # not kept in a log record, because it keeps its frames alive
        return None, error.reason, error.fix


def _warn(gpu: int, why: str) -> None:
    _log.warning("cuda:%d copies without kvlink's kernel: %s", gpu, why)
