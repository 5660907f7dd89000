# SPDX-License-Identifier: Apache-2.0
"""Knows the compiled images of gather.cu that kvlink ships, and which of them a GPU may run.

`make kernels` writes them. A cubin sm_XY runs on GPUs of capability X.Z with Z at least Y, except between those of
Jetson and others. PTX compute_XY is compiled by drivers of its CUDA or newer for each later GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).with_name("gather.cu")
FOLDER = Path(__file__).with_name("images")
MANIFEST = FOLDER / "manifest.json"
"""Has the digests of the source and of each image, the compiler's version, and the registers that images need."""


def suitable(major: int, minor: int, folder: Path = FOLDER) -> list[Path]:
    """Returns the images for a compute capability, best first. The driver may still refuse them."""
    return [folder / name for name in names_for(major, minor, (path.name for path in folder.glob("*_*.*")))]


def names_for(major: int, minor: int, names: Iterable[str]) -> list[str]:
    """Returns those of `names` ("sm_90.cubin", "compute_75.ptx") that suit a compute capability, best first."""
    cubins, ptx = [], []
    for name in names:
        kind, _, number = name.partition(".")[0].partition("_")
        its = int(number[:-1]), int(number[-1])
        if kind == "sm" and its[0] == major and its[1] <= minor:
            cubins.append((its, name))
        if kind == "compute" and its <= (major, minor):
            ptx.append((its, name))
    return [name for _, name in sorted(cubins, reverse=True) + sorted(ptx, reverse=True)]
