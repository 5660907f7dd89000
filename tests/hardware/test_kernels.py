# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled once, and cached where the next process finds them whole."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlink.errors import TransportUnavailable
from kvlink.hardware import kernels
from kvlink.hardware.kernels import SOURCE, cached, compiled


class Compiler:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cached(self, folder: Path, source: bytes, key: str) -> bytes:
        def compile_() -> bytes:
            self.asked.append(key)
            return source + key.encode()

        return cached(folder, source, key, compile_)


def test_it_is_compiled_once_for_each_source_and_key(tmp_path: Path) -> None:
    compiler = Compiler()
    for _ in range(2):
        assert compiler.cached(tmp_path / "new", b"a", "sm_90") == b"asm_90"
        assert compiler.cached(tmp_path / "new", b"b", "sm_90") == b"bsm_90"
        assert compiler.cached(tmp_path / "new", b"a", "sm_100") == b"asm_100"
    assert compiler.asked == ["sm_90", "sm_90", "sm_100"]


def test_a_file_that_is_not_whole_is_made_again(tmp_path: Path) -> None:
    compiler = Compiler()
    compiler.cached(tmp_path, b"a", "sm_90")
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for broken in (b"", whole[:20], whole[:-1], whole + b"x", bytes(len(whole))):
        file.write_bytes(broken)
        assert compiler.cached(tmp_path, b"a", "sm_90") == b"asm_90"
        assert file.read_bytes() == whole
    assert len(compiler.asked) == 6


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert Compiler().cached(tmp_path / "file", b"a", "sm_90") == b"asm_90"


class Driver:
    """Has a GPU of Hopper, and refuses images as the driver of another CUDA does."""

    def __init__(self, version: int, refuses: bool = False) -> None:
        self._version, self._refuses = version, refuses

    def capability(self, ordinal: int) -> tuple[int, int]:
        return 9, 0

    def version(self) -> int:
        return self._version

    def check_image(self, ordinal: int, image: bytes) -> None:
        if self._refuses:
            raise TransportUnavailable("cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """NVRTC 13.5, which notes for what it compiles."""
    targets: list[str] = []

    def compile_(source: bytes, target: str) -> bytes:
        targets.append(target)
        return b"image"

    monkeypatch.setattr(kernels, "compiled", compile_)
    monkeypatch.setattr(kernels, "_nvrtc_version", lambda: "13.5")
    return targets


def test_an_image_that_the_driver_refuses_is_done_without(
    tmp_path: Path, stand_in: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert kernels.compiled_for(0, tmp_path, lambda: Driver(13_000)) == b"image"
    assert kernels.compiled_for(0, tmp_path, lambda: Driver(12_080, refuses=True)) == b""
    assert "cuda:0 copies without kvlink's kernel: cuModuleLoadData: CUDA_ERROR_UNSUPPORTED" in caplog.text


def test_hosts_with_other_drivers_share_a_folder(tmp_path: Path, stand_in: list[str]) -> None:
    for version in (12_080, 13_000, 12_080):
        kernels.compiled_for(0, tmp_path, lambda version=version: Driver(version))  # type: ignore[misc]
    assert stand_in == ["sm_90", "sm_90"]
    names = sorted(path.name.partition("sm_")[2] for path in tmp_path.iterdir())
    assert names == ["90-nvrtc13.5-driver12080.bin", "90-nvrtc13.5-driver13000.bin"]


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(TransportUnavailable, match="cuda-python is not installed") as caught:
        compiled(SOURCE.read_bytes(), "sm_90")
    assert "kvlink[cuda]" in caught.value.fix


def test_bindings_without_the_library_are_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so.13")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=missing))
    assert kernels.compiled_for(0, tmp_path, lambda: Driver(13_000)) == b""
    assert "NVRTC is not installed: Failure finding libnvrtc.so.13" in caplog.text


@pytest.mark.usefixtures("nvrtc")
def test_the_version_of_nvrtc() -> None:
    assert re.fullmatch(r"\d+\.\d+", kernels._nvrtc_version())


@pytest.fixture
def nvrtc() -> None:
    """It needs no GPU."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="pip install cuda-bindings nvidia-cuda-nvrtc")
    try:
        compiled(b"", "sm_90")
    except TransportUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_source_compiles(target: str) -> None:
    image = compiled(SOURCE.read_bytes(), target)
    assert image.startswith(b"\x7fELF")
    assert b"kvlink_gather" in image


@pytest.mark.usefixtures("nvrtc")
def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(TransportUnavailable, match=r"does not compile for sm_90: gather\.cu\(1\): error"):
        compiled(b"nonsense", "sm_90")


def test_the_source_has_the_kernel_that_the_core_asks_for() -> None:
    core = (SOURCE.parents[3] / "csrc" / "device" / "gather.cc").read_text()
    (name,) = re.findall(r'module_get_function\(&function_, module_, "(\w+)"', core)
    assert f"__global__ void {name}(" in SOURCE.read_text()
