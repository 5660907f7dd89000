# SPDX-License-Identifier: Apache-2.0
"""The calls, numbers and structures of csrc/device/cuda_api.h are those of NVIDIA's headers, CUDA 12.4 to 13.5.

The headers come from PyPI: packages of 1 to 4 MB that are downloaded once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "csrc" / "device" / "cuda_api.h"
KEPT = ROOT / "build" / "cuda-headers"
RELEASES = (
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-runtime-cu12==12.6.77",
    "nvidia-cuda-runtime-cu12==12.8.90",
    "nvidia-cuda-runtime-cu12==12.9.79",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-runtime==13.5.37",
)
COMPILER = shutil.which("c++")

Pairs = list[tuple[str, str]]


def functions(header: str) -> Pairs:
    return re.findall(r'\bF\((\w+), "(\w+)"', header)


def constants(header: str) -> Pairs:
    """Each has NVIDIA's name behind it."""
    return re.findall(r"^inline constexpr \w+ (k\w+) = \w+; +// ?(CU\w+)$", header, re.MULTILINE)


def compiled(folder: Path, include: Path, calls: Pairs, numbers: Pairs) -> subprocess.CompletedProcess[str]:
    lines = [f"KVLINK_FUNCTION({ours}, {theirs})" for ours, theirs in calls]
    lines += [
        f"#if CUDA_VERSION >= {13000 if 'MEMCPY' in theirs else 0}\nKVLINK_CONSTANT({ours}, {theirs})\n#endif"
        for ours, theirs in numbers
    ]
    source = folder / "check.cc"
    source.write_text((Path(__file__).with_name("cuda_headers.cc")).read_text() + "\n".join(lines) + "\n")
    assert COMPILER is not None
    command = [COMPILER, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{include}", str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def headers(release: str) -> Path:
    """Returns the folder of that release's cuda.h; skips if it cannot be had."""
    folder = KEPT / release
    if not folder.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(KEPT), release]
        done = subprocess.run(command, capture_output=True, text=True)
        name, _, version = release.partition("==")
        wheel = next(KEPT.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)
        if done.returncode != 0 or wheel is None:
            pytest.skip(f"no cuda.h of {release}: pip download {release}")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        wheel.unlink()
    return next(folder.rglob("cuda.h")).parent


def test_everything_in_the_header_is_compared() -> None:
    text = OURS.read_text()
    assert len(functions(text)) == len(re.findall(r"^ +F\(", text, re.MULTILINE)) > 40
    assert len(constants(text)) == text.count("inline constexpr") > 15


@pytest.mark.verify
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: apt-get install g++")
@pytest.mark.parametrize("release", RELEASES)
def test_it_agrees_with_nvidias(release: str, tmp_path: Path) -> None:
    text, include = OURS.read_text(), headers(release)
    done = compiled(tmp_path, include, functions(text), constants(text))
    assert done.returncode == 0, done.stderr
    wrong = [
        ([("init", "cuCtxPopCurrent_v2")], []),
        ([("memory_free", "cuModuleUnload"), ("memory_alloc", "cuDeviceGet")], []),
        ([], [("kNotReady", "CUDA_ERROR_NOT_SUPPORTED")]),
    ]
    for calls, numbers in wrong:
        assert compiled(tmp_path, include, calls, numbers).returncode != 0, "the comparison sees nothing"
