# SPDX-License-Identifier: Apache-2.0
"""What runs on GPUs, compiled when it is first needed: by NVRTC, through cuda-python, and kept on disk.

Nothing is imported before that. Without NVRTC the driver's own copies do, and `compiled_for` says so in the log.
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


def compiled_for(gpu: int, folder: Path | None = None) -> bytes:
    """gather.cu as a module that the driver loads on this GPU, by CUDA's number; empty without NVRTC.

    `folder` keeps it for the next process; None: kvlink in the user's cache folder (XDG_CACHE_HOME).
    """
    try:
        major, minor = CudaDriver().capability(gpu)
        return kept(folder or _cache_folder(), SOURCE.read_bytes(), f"sm_{major}{minor}", compiled)
    except TransportUnavailable as error:
        _log.warning(
            "cuda:%d copies without kvlink's kernel: %s", gpu, str(error)
        )  # the error keeps its frames
        return b""


def kept(folder: Path, source: bytes, target: str, compile_: Callable[[bytes, str], bytes]) -> bytes:
    """What `compile_` makes of `source`, from `folder` when it is there and whole. A folder that cannot be used is
    done without."""
    name = hashlib.sha256(source).hexdigest()[:16]
    file = folder / f"gather-{name}-{target}.bin"
    with suppress(OSError):
        found = file.read_bytes()
        image = found[_DIGEST_BYTES:]
        if hashlib.sha256(image).digest() == found[:_DIGEST_BYTES]:
            return image
    image = compile_(source, target)
    with suppress(OSError):
        _keep(file, hashlib.sha256(image).digest() + image)
    return image


def compiled(source: bytes, target: str) -> bytes:
    """By NVRTC, ending in a zero byte. Raises TransportUnavailable without NVRTC, or with one that is too old."""
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
    """Whole or not at all, whoever else writes it now."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
        new.write(content)
    Path(new.name).replace(file)


def _nvrtc() -> Any:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as missing:
        raise TransportUnavailable("cuda-python is not installed", _INSTALL) from missing


def _call(nvrtc: Any, name: str, *arguments: Any) -> Any:
    try:
        error, *values = getattr(nvrtc, name)(*arguments)
    except RuntimeError as missing:  # the bindings' own, of a library that is not there
        raise TransportUnavailable(f"NVRTC is not installed: {missing}", _INSTALL) from missing
    if int(error):
        raise TransportUnavailable(f"{name}: {getattr(error, 'name', error)}", _INSTALL)
    return values[0] if values else None
