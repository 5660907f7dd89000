# SPDX-License-Identifier: Apache-2.0
"""The gather kernel: its images, captures of CUDA graphs, and the declarations taken from cuda.h."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvlink.errors import TransportUnavailable
from kvlink.hardware import kernels
from kvlink.hardware.gpudirect import CudaDriver
from kvlink.hardware.gpudirect.driver import Ordering
from kvlink.hardware.kernels import SOURCE, first_accepted, nvrtc
from kvlink.hardware.kernels.images import FOLDER, MANIFEST, names_for, suitable
from kvlink.hardware.kernels.nvrtc import Compiled, compiled, kept


class Compiler:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cached(self, folder: Path, source: bytes, key: str) -> bytes:
        def compile_() -> bytes:
            self.asked.append(key)
            return source + key.encode()

        return kept(folder, source, key, compile_)


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


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ((7, 0), []),
        ((7, 5), ["sm_75.cubin", "compute_75.ptx"]),
        ((8, 0), ["sm_80.cubin", "compute_75.ptx"]),
        ((8, 6), ["sm_86.cubin", "sm_80.cubin", "compute_75.ptx"]),
        ((8, 7), ["sm_86.cubin", "sm_80.cubin", "compute_75.ptx"]),
        ((8, 9), ["sm_89.cubin", "sm_86.cubin", "sm_80.cubin", "compute_75.ptx"]),
        ((9, 0), ["sm_90.cubin", "compute_75.ptx"]),
        ((10, 0), ["sm_100.cubin", "compute_75.ptx"]),
        ((10, 3), ["sm_103.cubin", "sm_100.cubin", "compute_75.ptx"]),
        ((11, 0), ["compute_75.ptx"]),
        ((12, 1), ["sm_120.cubin", "compute_75.ptx"]),
        ((13, 0), ["compute_75.ptx"]),
    ],
)
def test_which_images_a_gpu_may_run(capability: tuple[int, int], names: list[str]) -> None:
    assert [path.name for path in suitable(*capability)] == names
    assert all(path.is_file() for path in suitable(*capability))


def test_a_newer_intermediate_comes_first() -> None:
    assert names_for(9, 0, ["compute_75.ptx", "compute_90.ptx", "compute_100.ptx", "sm_100.cubin"]) == [
        "compute_90.ptx",
        "compute_75.ptx",
    ]


def test_the_images_are_those_of_the_source() -> None:
    manifest = json.loads(MANIFEST.read_text())
    assert manifest["source_sha256"] == sha256(SOURCE.read_bytes()).hexdigest(), (
        "gather.cu changed: make kernels"
    )
    assert {path.name for path in FOLDER.iterdir()} == {MANIFEST.name, *manifest["images"]}
    for name, its in manifest["images"].items():
        image = (FOLDER / name).read_bytes()
        assert its["sha256"] == sha256(image).hexdigest()
        assert b"kvlink_gather" in image
        assert its.get("spilled_bytes", 0) == 0
        if name.endswith(".cubin"):
            assert image[:4] == b"\x7fELF"
            assert image[18:20] == (190).to_bytes(2, "little")
            assert 0 < its["registers"] <= 128  # four blocks of 128 threads fit on a multiprocessor


def test_the_page_has_what_was_compiled() -> None:
    spec = spec_from_file_location("make_kernels", SOURCE.parents[3] / ".ci" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    maker = module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE.read_text() == maker.page(json.loads(MANIFEST.read_text()))


class Loader:
    """Notes what it is asked to load, and refuses images that begin so, as drivers of another CUDA do."""

    def __init__(self, *refused: bytes) -> None:
        self.asked: list[bytes] = []
        self._refused = refused

    def __call__(self, image: bytes) -> bytes:
        self.asked.append(image)
        if image.startswith(self._refused):
            raise TransportUnavailable("cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)")
        return image


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """NVRTC 13.5, which notes for what it compiles."""
    targets: list[str] = []

    def compile_(source: bytes, target: str) -> Compiled:
        targets.append(target)
        return Compiled(b"by NVRTC", "")

    monkeypatch.setattr(nvrtc, "compiled", compile_)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.5")
    return targets


def test_a_shipped_image_needs_neither_nvrtc_nor_cuda_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    load = Loader()
    assert first_accepted(0, (9, 0, 12_040), load) == (FOLDER / "sm_90.cubin").read_bytes()
    assert len(load.asked) == 1
    assert not caplog.records


def test_the_driver_compiles_for_a_gpu_without_an_image(stand_in: list[str], tmp_path: Path) -> None:
    image = first_accepted(0, (13, 0, 14_000), Loader(), tmp_path)
    assert image == (FOLDER / "compute_75.ptx").read_bytes()
    assert image.rstrip().endswith(b"}")
    assert stand_in == []


def test_nvrtc_compiles_where_the_driver_takes_no_image(
    stand_in: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load = Loader(b"\x7fELF", b"//")
    assert first_accepted(0, (8, 7, 11_040), load, tmp_path) == b"by NVRTC"
    assert [image[:4] for image in load.asked] == [b"\x7fELF", b"\x7fELF", b"//\n/", b"by N"]
    assert stand_in == ["sm_87"]
    assert not caplog.records


def test_without_any_image_it_says_what_was_tried(
    stand_in: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert first_accepted(0, (9, 0, 11_040), Loader(b""), tmp_path) is None
    (record,) = caplog.records
    refusal = "cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)"
    tried = "; ".join(f"{name}: {refusal}" for name in ("sm_90.cubin", "compute_75.ptx", "NVRTC"))
    assert record.getMessage() == f"cuda:0 copies without kvlink's kernel: {tried}"


def test_hosts_with_other_drivers_share_a_folder(tmp_path: Path, stand_in: list[str]) -> None:
    for driver in (12_080, 13_000, 12_080):
        first_accepted(0, (7, 0, driver), Loader(), tmp_path)
    assert stand_in == ["sm_70", "sm_70"]
    names = sorted(path.name.partition("sm_")[2] for path in tmp_path.iterdir())
    assert names == ["70-nvrtc13.5-driver12080.bin", "70-nvrtc13.5-driver13000.bin"]


def test_without_a_driver_the_pool_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(gpu: int) -> tuple[int, int, int]:
        raise TransportUnavailable("libcuda.so.1 is missing")

    monkeypatch.setattr(kernels._core, "kernel_target", missing)
    assert kernels.kernel_for(3) is None
    assert "cuda:3 copies without kvlink's kernel: libcuda.so.1 is missing" in caplog.text


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
    assert first_accepted(0, (7, 0, 13_000), Loader(), tmp_path) is None
    assert "NVRTC is not installed: Failure finding libnvrtc.so.13" in caplog.text


@pytest.mark.usefixtures("with_nvrtc")
def test_the_version_of_nvrtc() -> None:
    assert re.fullmatch(r"\d+\.\d+", nvrtc.version())


@pytest.fixture
def with_nvrtc() -> None:
    """It needs no GPU."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="pip install cuda-bindings nvidia-cuda-nvrtc")
    try:
        compiled(b"", "sm_90")
    except TransportUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("with_nvrtc")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_source_compiles(target: str) -> None:
    image = compiled(SOURCE.read_bytes(), target).image
    assert image.startswith(b"\x7fELF")
    assert b"kvlink_gather" in image


@pytest.mark.usefixtures("with_nvrtc")
def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(TransportUnavailable, match=r"does not compile for sm_90: gather\.cu\(1\): error"):
        compiled(b"nonsense", "sm_90")


def test_the_source_has_the_kernel_that_the_core_asks_for() -> None:
    core = (SOURCE.parents[3] / "csrc" / "device" / "gather_kernel.cc").read_text()
    (name,) = re.findall(r'module_get_function\(.*"(\w+)"', core)
    assert f"__global__ void {name}(" in SOURCE.read_text()


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


def compiled_headers(
    folder: Path, include: Path, calls: Pairs, numbers: Pairs
) -> subprocess.CompletedProcess[str]:
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
    done = compiled_headers(tmp_path, include, functions(text), constants(text))
    assert done.returncode == 0, done.stderr
    wrong = [
        ([("init", "cuCtxPopCurrent_v2")], []),
        ([("memory_free", "cuModuleUnload"), ("memory_alloc", "cuDeviceGet")], []),
        ([], [("kNotReady", "CUDA_ERROR_NOT_SUPPORTED")]),
    ]
    for calls, numbers in wrong:
        assert compiled_headers(tmp_path, include, calls, numbers).returncode != 0, (
            "the comparison sees nothing"
        )
