# SPDX-License-Identifier: Apache-2.0
"""Adapts UCX itself, in ucx.cc: posts one ucp_get_nbx or ucp_put_nbx for each run of blocks, then progresses."""

from __future__ import annotations

import base64
import ctypes
import json
import sys
from ctypes import POINTER, byref, c_bool, c_char_p, c_size_t, c_uint64, c_void_p
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numpy.ctypeslib import as_array

from . import Transfer
from .blocks import Blocks, Ids

_ARGUMENTS = {
    "ucx_open": (c_void_p, c_size_t, c_bool, POINTER(c_void_p), POINTER(c_void_p)),
    "ucx_card": (c_void_p, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_void_p), POINTER(c_size_t)),
    "ucx_connect": (c_void_p, c_char_p, c_char_p, c_uint64),
    "ucx_start": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_bool),
    "ucx_finish": (c_void_p, c_bool),
}


class Ucx:
    """One worker. Options: `push` writes from the owner; `allocate` uses memory of UCX, which others can map; `poll`
    makes an end poll instead of sleeping until it is needed.
    """

    def __init__(self, blocks: Blocks, options: dict[str, Any]) -> None:
        self.version = version("libucx-cu12")
        self._blocks, self._push = blocks, bool(options.get("push"))
        self._library = ctypes.CDLL(str(Path(sys.prefix) / "lib" / "libbench-ucx.so"))
        for name, arguments in _ARGUMENTS.items():
            call = getattr(self._library, name)
            call.argtypes, call.restype = arguments, c_char_p
        allocate, sleeps = bool(options.get("allocate")), not options.get("poll")
        self._end, base = c_void_p(), c_void_p()
        address = None if allocate else blocks.address
        self._call("ucx_open", address, blocks.num_bytes, sleeps, byref(self._end), byref(base))
        if allocate:
            assert base.value is not None
            memory = (ctypes.c_uint8 * blocks.num_bytes).from_address(base.value)
            blocks.move_to(as_array(memory))

    def card(self) -> str:
        """Returns the worker's address, the memory's key, and the address of the blocks."""
        worker, key, worker_bytes, key_bytes = c_void_p(), c_void_p(), c_size_t(), c_size_t()
        places = (byref(worker), byref(worker_bytes), byref(key), byref(key_bytes))
        self._call("ucx_card", self._end, *places)
        card = {"worker": _text(worker, worker_bytes), "key": _text(key, key_bytes)}
        return json.dumps({**card, "address": self._blocks.address})

    def connect(self, card: str) -> None:
        """Connects. Returns once the other end has answered."""
        other = json.loads(card)
        worker, key = base64.b64decode(other["worker"]), base64.b64decode(other["key"])
        self._call("ucx_connect", self._end, worker, key, other["address"])

    def prepare(self, there: Ids, here: Ids) -> Transfer:
        """Prepares all reads, or all writes and their flush, which are timed until the last byte is there."""
        starts, sizes = self._blocks.starts(), self._blocks.sizes()[here]
        theirs, mine = starts[there], starts[here]

        def start() -> None:
            lists = (theirs.ctypes.data, mine.ctypes.data, sizes.ctypes.data, len(sizes))
            self._call("ucx_start", self._end, *lists, self._push)

        return Transfer(start, lambda: self._call("ucx_finish", self._end, self._push), lambda: None)

    def _call(self, name: str, *arguments: Any) -> None:
        if why_not := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name}: {why_not.decode()}")


def _text(address: c_void_p, num_bytes: c_size_t) -> str:
    assert address.value is not None
    return base64.b64encode(ctypes.string_at(address.value, num_bytes.value)).decode()


make = Ucx
