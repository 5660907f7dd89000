# SPDX-License-Identifier: Apache-2.0
"""Compiles gather.cu for every GPU that kvlink ships an image for, and writes docs/hardware/kernel.md.

`make kernels` runs it with an NVRTC of CUDA 12: drivers of CUDA 12 and later take what it makes. It needs no GPU.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from kvlink.hardware.kernels import nvrtc
from kvlink.hardware.kernels.images import FOLDER, MANIFEST, SOURCE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "hardware" / "kernel.md"
CUBINS = {
    "sm_75": "T4",
    "sm_80": "A100, A30",
    "sm_86": "A10, A40, RTX A6000",
    "sm_89": "L4, L40S, RTX 4090",
    "sm_90": "H100, H200, GH200",
    "sm_100": "B200, GB200",
    "sm_103": "B300, GB300",
    "sm_120": "RTX PRO 6000 Blackwell, RTX 5090",
}
PTX = "compute_75"
"""The oldest, so that every later GPU may run it."""

_INTRODUCTION = """\
# The kernel, compiled

`make kernels` writes this page and the images in `kvlink/hardware/kernels/images` from `gather.cu`. kvlink ships the
images, so that gathering on a GPU needs no compiler. [CUDA on one host](cuda.md#which-image-a-gpu-runs) says which of
them a GPU runs.

Registers and spills are those that ptxas reports for `kvlink_gather`. A spill is a value that did not fit into the
registers, and costs loads and stores of memory. A test refuses images with spills. The compiler is NVRTC {version}.

| image | for example | registers a thread | spilled bytes | bytes of the image |
|---|---|---|---|---|
"""


def main() -> None:
    """Compiles all images."""
    source = SOURCE.read_bytes()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    found: dict[str, dict[str, Any]] = {}
    for target in CUBINS:
        image, log = nvrtc.compiled(source, target, "--ptxas-options=-v")
        found[_write(f"{target}.cubin", image)] = {"sha256": _digest(image), **usage(log)}
    image = nvrtc.compiled(source, PTX).image
    found[_write(f"{PTX}.ptx", image)] = {"sha256": _digest(image)}
    manifest = {"source_sha256": _digest(source), "nvrtc": nvrtc.version(), "images": found}
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")
    PAGE.write_text(page(manifest))


def usage(log: str) -> dict[str, int]:
    """Returns what ptxas reports of the one kernel. Raises AttributeError if it does not."""
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    return {"registers": int(registers[1]), "spilled_bytes": int(spilled[1]) + int(spilled[2])}


def page(manifest: dict[str, Any]) -> str:
    """Returns the page for what `main` has written."""
    rows = []
    for name, its in manifest["images"].items():
        example = CUBINS.get(name.partition(".")[0], "later GPUs, by the driver's compiler")
        figures = its.get("registers", ""), its.get("spilled_bytes", ""), (FOLDER / name).stat().st_size
        rows.append(f"| `{name}` | {example} | " + " | ".join(map(str, figures)) + " |")
    return _INTRODUCTION.format(version=manifest["nvrtc"]) + "\n".join(rows) + "\n"


def _write(name: str, image: bytes) -> str:
    (FOLDER / name).write_bytes(image)
    return name


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
