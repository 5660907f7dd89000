# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for GPUs on first use with NVRTC, through cuda-python, and caches them on disk.

cuda-python is not imported before that. Without NVRTC, copies of the driver are used and `compiled_for` logs a warning.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver

_log = logging.getLogger("kvlink.kernels")

SOURCE = Path(__file__).with_name("gather.cu")
_INSTALL = "pip install 'kvlink[cuda]' (kvlink[cuda12] for a driver of CUDA 12)"
_DIGEST_BYTES = 32


def compiled_for(gpu: int, folder: Path | None = None, make_driver: Callable[[], Any] = CudaDriver) -> bytes:
    """Returns gather.cu compiled for the GPU that CUDA numbers `gpu`, or an empty image if that is not possible.

    It is empty without NVRTC, and where the driver refuses the image, as a driver of CUDA 12 refuses what NVRTC 13
    makes. `folder` caches the image for later processes. By default it is kvlink in the user's cache directory
    (XDG_CACHE_HOME), which hosts with other drivers may share.
    """
    try:
        driver = make_driver()
        major, minor = driver.capability(gpu)
        target, source = f"sm_{major}{minor}", SOURCE.read_bytes()
        key = f"{target}-nvrtc{_nvrtc_version()}-driver{driver.version()}"
        image = cached(folder or _cache_folder(), source, key, lambda: compiled(source, target))
        driver.check_image(gpu, image)
        return image
    except TransportUnavailable as error:
        text = str(error)  # a log record must not keep the error, which keeps its frames alive
        _log.warning("cuda:%d copies without kvlink's kernel: %s", gpu, text)
        return b""


def cached(folder: Path, source: bytes, key: str, make: Callable[[], bytes]) -> bytes:
    """Returns the image of `source` for `key`, from `folder` if a complete one is there, else from `make`.

    A directory that cannot be read or written is ignored.
    """
    name = hashlib.sha256(source).hexdigest()[:16]
    file = folder / f"gather-{name}-{key}.bin"
    with suppress(OSError):
        found = file.read_bytes()
        image = found[_DIGEST_BYTES:]
        if hashlib.sha256(image).digest() == found[:_DIGEST_BYTES]:
            return image
    image = make()
    with suppress(OSError):
        _keep(file, hashlib.sha256(image).digest() + image)
    return image


def compiled(source: bytes, target: str) -> bytes:
    """Compiles `source` with NVRTC and returns the image with a zero byte at its end.

    Raises TransportUnavailable if NVRTC is missing or too old.
    """
    nvrtc = _nvrtc()
    program = _call(nvrtc, "nvrtcCreateProgram", source, b"gather.cu", 0, [], [])
    try:
        options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
        try:
            _call(nvrtc, "nvrtcCompileProgram", program, len(options), options)
        except TransportUnavailable as error:
            log = bytearray(_call(nvrtc, "nvrtcGetProgramLogSize", program))
            _call(nvrtc, "nvrtcGetProgramLog", program, log)
            why = log.rstrip(b"\0\n").decode(errors="replace")
            raise TransportUnavailable(f"NVRTC does not compile for {target}: {why}", error.fix) from None
        image = bytearray(_call(nvrtc, "nvrtcGetCUBINSize", program))
        _call(nvrtc, "nvrtcGetCUBIN", program, image)
        return bytes(image) + b"\0"
    finally:
        _call(nvrtc, "nvrtcDestroyProgram", program)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlink"


def _keep(file: Path, content: bytes) -> None:
    """Writes the file atomically, so that concurrent writers do not mix their content."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
        new.write(content)
    Path(new.name).replace(file)


def _nvrtc_version() -> str:
    return ".".join(map(str, _values(_nvrtc(), "nvrtcVersion")))


def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as missing:
        raise TransportUnavailable("cuda-python is not installed", _INSTALL) from missing


def _call(nvrtc: Any, name: str, *arguments: Any) -> Any:
    return next(iter(_values(nvrtc, name, *arguments)), None)


def _values(nvrtc: Any, name: str, *arguments: Any) -> list[Any]:
    try:
        error, *values = getattr(nvrtc, name)(*arguments)
    except RuntimeError as missing:  # the bindings raise it if the library is missing
        raise TransportUnavailable(f"NVRTC is not installed: {missing}", _INSTALL) from missing
    if int(error):
        raise TransportUnavailable(f"{name}: {getattr(error, 'name', error)}", _INSTALL)
    return list(values)
