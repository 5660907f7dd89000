# SPDX-License-Identifier: Apache-2.0
"""Runs within one of LMCache's servers as a `--server-module`: stores, loads and frees objects without an engine.

Each command is a JSON object of a POST request to `port`. Objects have the number in all of their bytes.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.storage_manager import StorageManager

_PATIENCE_S = 60.0


class Objects:
    """The commands."""

    def __init__(self, storage: StorageManager) -> None:
        self._storage = storage
        self._l1 = storage._l1_manager

    def store(self, numbers: list[int], size: int, model: str = "m") -> list[bool]:
        keys = [_key(number, model) for number in numbers]
        reserved = self._l1.reserve_write(keys, [False] * len(keys), _layout(size), "test")
        for number, key in zip(numbers, keys, strict=True):
            if reserved[key][0] == L1Error.SUCCESS:
                reserved[key][1].tensor.fill_(number)
        self._l1.finish_write(keys, "test")
        return [reserved[key][0] == L1Error.SUCCESS for key in keys]

    def load(self, numbers: list[int], size: int, model: str = "m") -> list[list[int] | None]:
        """Returns the different bytes of each object that a peer had, and forgets it again."""
        keys = [_key(number, model) for number in numbers]
        row = GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=_layout(size))
        handle = self._storage.submit_prefetch_task(PrefetchTaskSpec([row], fetching_policy="full"), "test")
        deadline = time.monotonic() + _PATIENCE_S
        while (result := self._storage.query_prefetch_status(handle)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("the load has not ended")
            time.sleep(0.01)
        found = result.hit_cells[0].gather(keys)
        states = dict(zip(*self._storage.unsafe_read(found), strict=True))
        values = [states[key].raw_data.unique().tolist() if key in states else None for key in keys]
        self._storage.finish_read_prefetched(found)
        self._l1.delete(found)
        return values

    def clear(self) -> None:
        self._storage.clear(force=True)


def build_server_modules(build: Any) -> None:
    """Is LMCache's factory of server modules."""
    objects = Objects(build.server_context.storage_manager)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            command = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, answer = 200, getattr(objects, command.pop("do"))(**command)
            except Exception as error:
                status, answer = 500, repr(error)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"answer": answer}).encode())

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", build.config["port"]), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _key(number: int, model: str) -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), model, 0)


def _layout(size: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
