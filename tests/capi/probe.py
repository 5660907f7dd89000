# SPDX-License-Identifier: Apache-2.0
"""Calls the codecs of csrc/codec, see probe.cc."""

from __future__ import annotations

import ctypes
import functools

from capi.built import built

_MOST = 16 << 20


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(built("libkvlink_probe.so")))
    for name in ("card", "sealed", "request", "reply", "ticket", "sign", "check", "hmac", "crc"):
        getattr(library, f"probe_{name}").restype = ctypes.c_int64
    return library


class Refused(Exception):
    """The codec refused the bytes, and its sentence says why."""


def again(kind: str, blob: bytes, *more: bytes) -> bytes:
    """Returns what the codec writes of what it has read. Raises Refused."""
    out = ctypes.create_string_buffer(len(blob) + 4096)
    call = getattr(_library(), f"probe_{kind}")
    length = call(blob, ctypes.c_uint64(len(blob)), *more, out, ctypes.c_uint64(len(out)))
    assert length != -2, "it writes more than it has read"
    if length < 0:
        raise Refused(out.raw.rstrip(b"\0").decode())
    return out.raw[:length]


def hmac(key: bytes, message: bytes) -> bytes:
    """Returns the HMAC-SHA256 of a message."""
    out = ctypes.create_string_buffer(32)
    _library().probe_hmac(key, ctypes.c_uint64(len(key)), message, ctypes.c_uint64(len(message)), out)
    return out.raw


def crc(blob: bytes) -> int:
    """Returns the checksum of cards and tickets."""
    return int(_library().probe_crc(blob, ctypes.c_uint64(len(blob))))
