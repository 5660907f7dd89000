# SPDX-License-Identifier: Apache-2.0
"""libkvlink.so.1 has the functions of its header and nothing else, and keeps the interface of version 1.

After a change of kvlink.h that old programs do not notice, `python tests/capi/test_abi.py` writes libkvlink.abi again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from capi.built import HEADERS, built

KEPT = Path(__file__).with_name("libkvlink.abi")
MOST_FUNCTIONS = 36
MOST_BYTES = 2_500_000
_FUNCTION = re.compile(r"^KVL_API (int32_t (kvl_\w+)\(([^;]*)\));", re.MULTILINE)


def header() -> str:
    """The text of kvlink.h."""
    return (HEADERS / "kvlink.h").read_text()


def declared() -> list[str]:
    """The functions of kvlink.h."""
    return sorted(name for _, name, _ in _FUNCTION.findall(header()))


def run(*command: object) -> str:
    """Runs a command and returns its output."""
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def abi(library: Path, headers: Path, into: Path) -> Path:
    """Writes the types and functions of a library, as far as they are those of the headers."""
    if shutil.which("abidw") is None:
        pytest.skip("abidw is missing: apt-get install abigail-tools")
    run(
        "abidw", "--headers-dir", headers, "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs",
        "--drop-private-types", "--type-id-style", "hash", "--exported-interfaces-only", "--out-file", into, library,
    )  # fmt: skip
    into.write_text(re.sub(r" path='[^']*/csrc/", " path='csrc/", into.read_text()))
    return into


def differences(before: Path, after: Path) -> str:
    """Returns what differs, as abidiff says it. Empty if nothing does."""
    return subprocess.run(["abidiff", before, after], capture_output=True, text=True).stdout


def test_exactly_the_declared_functions_are_exported() -> None:
    exported = run(
        "nm", "-D", "--defined-only", "--with-symbol-versions", built("libkvlink.so.1")
    ).splitlines()
    kinds = {line.split()[2]: line.split()[1] for line in exported}
    assert kinds.pop("KVLINK_1") == "A"
    assert sorted(kinds) == [f"{name}@@KVLINK_1" for name in declared()]
    assert set(kinds.values()) == {"T"}  # "u" would be unique among all libraries of a process
    assert len(kinds) <= MOST_FUNCTIONS


def test_the_library_brings_its_own_runtime_and_stays() -> None:
    dynamic = run("readelf", "--dynamic", "--wide", built("libkvlink.so.1"))
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert "[libkvlink.so.1]" in dynamic
    assert "NODELETE" in dynamic


def test_its_size(tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    run("strip", "-o", stripped, built("libkvlink.so.1"))
    assert stripped.stat().st_size <= MOST_BYTES


def test_the_python_extension_has_none_of_it() -> None:
    from kvlink import _core

    (extension,) = Path(_core.__file__).parent.glob("_core*.so")
    assert "kvl_" not in run("nm", "-D", extension)
    assert b"kvl_worker_options" not in extension.read_bytes()


@pytest.mark.parametrize("compiler", [["gcc", "-std=c11"], ["g++", "-std=c++11", "-x", "c++"]])
def test_the_header_compiles_alone(compiler: list[str]) -> None:
    run(*compiler, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", HEADERS / "kvlink.h")


def test_the_interface_is_that_of_version_1(tmp_path: Path) -> None:
    found = abi(built("libkvlink.so.1"), HEADERS, tmp_path / "now.abi")
    assert differences(KEPT, found) == ""


BREAKS = {
    "a field of another width": ("  uint64_t inline_us;", "  uint32_t inline_us;"),
    "a field within a structure": (
        "  uint32_t num_lease_slots;",
        "  uint32_t more;\n  uint32_t num_lease_slots;",
    ),
    "an argument of another width": ("kvl_region_alloc(uint64_t bytes", "kvl_region_alloc(uint32_t bytes"),
    "an argument more": (
        "kvl_offer_abort(kvl_handle offer,",
        "kvl_offer_abort(kvl_handle offer, int32_t why,",
    ),
    "a function that is gone": ("KVL_API int32_t kvl_release(", "int32_t kvl_released("),
}


def stub(text: str, folder: Path) -> Path:
    """Makes a library with the interface of a header, whose functions do nothing."""
    folder.mkdir()
    (folder / "kvlink.h").write_text(text)
    bodies = "\n".join(f"{signature} {{ return 0; }}" for signature, _, _ in _FUNCTION.findall(text))
    (folder / "stub.cc").write_text(f'#include "kvlink.h"\n{bodies}\n')
    library = folder / "libkvlink.so.1"
    run(
        "g++", "-shared", "-fPIC", "-g", "-o", library, "-Wl,-soname,libkvlink.so.1",
        f"-Wl,--version-script={HEADERS / 'kvlink.map'}", folder / "stub.cc",
    )  # fmt: skip
    return abi(library, folder, folder / "stub.abi")


@pytest.mark.parametrize("planted", BREAKS)
def test_breaks_are_found(planted: str, tmp_path: Path) -> None:
    before, after = BREAKS[planted]
    assert header().count(before) == 1
    whole = stub(header(), tmp_path / "whole")
    assert "Functions changes summary" not in differences(KEPT, whole)  # the same without a break
    assert "Function" in differences(whole, stub(header().replace(before, after), tmp_path / "broken"))


@pytest.mark.parametrize("first", ["torch", "kvlink"])
def test_beside_torch_in_one_process(first: str) -> None:
    """Each of them has its own C++ library, and both throw and catch."""
    pytest.importorskip("torch", reason="torch is not installed: pip install torch==2.13.0")
    load = f"kvl = ctypes.CDLL({str(built('libkvlink.so.1'))!r})"
    both = ["import torch", load]
    program = f"""
import ctypes
{chr(10).join(both if first == "torch" else both[::-1])}
import kvlink._core
try:
    torch.zeros(2) @ torch.zeros(3)
except RuntimeError:
    pass
region, base = ctypes.c_uint64(), ctypes.c_void_p()
assert kvl.kvl_region_alloc(ctypes.c_uint64(2**63), 0, ctypes.byref(region), ctypes.byref(base), None) == 1
assert kvl.kvl_region_alloc(ctypes.c_uint64(4096), 0, ctypes.byref(region), ctypes.byref(base), None) == 0
assert kvl.kvl_close(region, None) == 0
assert torch.ones(8).sum() == 8
print("good")
"""
    assert run(sys.executable, "-c", program) == "good\n"


if __name__ == "__main__":
    abi(built("libkvlink.so.1"), HEADERS, KEPT)
