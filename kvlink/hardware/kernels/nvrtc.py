# SPDX-License-Identifier: Apache-2.0
"""Compiles a kernel with NVRTC, through cuda-python, and caches images on disk. Both are imported at the first call."""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvlink.errors import TransportUnavailable

_INSTALL = (
    "pip install 'kvlink[cuda]' nvidia-cuda-nvrtc (for CUDA 12: 'kvlink[cuda12]' nvidia-cuda-nvrtc-cu12)"
)
_DIGEST_BYTES = 32


class Compiled(NamedTuple):
    """A cubin, or PTX, and what the compiler says."""

    image: bytes
    log: str


def cached(source: bytes, target: str, driver: int, folder: Path | None = None) -> bytes:
    """Returns `source` compiled for `target`, from `folder` if it is there.

    By default that is kvlink in the user's cache directory (XDG_CACHE_HOME), which hosts with other drivers may share.
    """
    key = f"{target}-nvrtc{version()}-driver{driver}"
    return kept(folder or _cache_folder(), source, key, lambda: compiled(source, target).image)


def kept(folder: Path, source: bytes, key: str, make: Callable[[], bytes]) -> bytes:
    """Returns the image of `source` for `key`, from `folder` if a complete one is there, else from `make`.

    A directory that cannot be read or written is ignored, as is one that another user could have written to.
    """
    name = hashlib.sha256(source).hexdigest()[:16]
    file = folder / f"gather-{name}-{key}.bin"
    with suppress(OSError):
        found = file.read_bytes() if _is_own(folder) and _is_own(file) else b""
        image = found[_DIGEST_BYTES:]
        if hashlib.sha256(image).digest() == found[:_DIGEST_BYTES]:
            return image
    image = make()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(folder):
            _keep(file, hashlib.sha256(image).digest() + image)
    return image


def _is_own(path: Path) -> bool:
    """Returns whether only this user can write to it. Raises OSError if it is not there."""
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def compiled(source: bytes, target: str, *options: str) -> Compiled:
    """Compiles `source` to a cubin for "sm_90", or to PTX for "compute_90".

    Raises TransportUnavailable if NVRTC is missing or too old.
    """
    nvrtc = _nvrtc()
    kind = "PTX" if target.startswith("compute_") else "CUBIN"
    program = _call(nvrtc, "nvrtcCreateProgram", source, b"gather.cu", 0, [], [])
    try:
        words = [word.encode() for word in (f"--gpu-architecture={target}", "--std=c++17", *options)]
        try:
            _call(nvrtc, "nvrtcCompileProgram", program, len(words), words)
        except TransportUnavailable as error:
            why = f"NVRTC does not compile for {target}: {_log(nvrtc, program)}"
            raise TransportUnavailable(why, error.fix) from None
        image = bytearray(_call(nvrtc, f"nvrtcGet{kind}Size", program))
        _call(nvrtc, f"nvrtcGet{kind}", program, image)
        return Compiled(bytes(image.rstrip(b"\0") if kind == "PTX" else image), _log(nvrtc, program))
    finally:
        _call(nvrtc, "nvrtcDestroyProgram", program)


def version() -> str:
    """Returns the version of NVRTC, for example 12.9. Raises TransportUnavailable without it."""
    return ".".join(map(str, _values(_nvrtc(), "nvrtcVersion")))


def _log(nvrtc: Any, program: Any) -> str:
    log = bytearray(_call(nvrtc, "nvrtcGetProgramLogSize", program))
    _call(nvrtc, "nvrtcGetProgramLog", program, log)
    return log.rstrip(b"\0\n").decode(errors="replace")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlink"


def _keep(file: Path, content: bytes) -> None:
    """Writes the file atomically, so that concurrent writers do not mix their content."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
        new.write(content)
    Path(new.name).replace(file)


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
