# SPDX-License-Identifier: Apache-2.0
"""Adapts NIXL as its vLLM connector uses it: prepares descriptors of all blocks once, reads by their indices."""

from __future__ import annotations

import base64
import json
import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

from . import Transfer
from .blocks import Blocks, Ids

_MEMORY = "DRAM"


class Nixl:
    """One agent with its progress thread, which an owner without calls needs.

    Options: `ucx` has UCX's settings; `backend` names another one than UCX, which is kvlink's; with `repeat` the handle
    of a transfer is made before it is timed.
    """

    def __init__(self, blocks: Blocks, options: dict[str, Any]) -> None:
        self.version = version("nixl-cu12")
        self._blocks, self._repeats = blocks, bool(options.get("repeat"))
        backend = options.get("backend", "UCX")
        if backend != "UCX":
            os.environ["NIXL_PLUGIN_DIR"] = _kvlinks_folder()
        self._agent = nixl_agent(options["name"], nixl_agent_config(backends=[]))
        self._agent.create_backend(backend, options.get("ucx", {}))
        self._agent.register_memory([(blocks.address, blocks.num_bytes, 0, "")], _MEMORY)

    def card(self) -> str:
        """Returns the agent's metadata, and the address of the blocks."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return json.dumps({"metadata": metadata, "address": self._blocks.address})

    def connect(self, card: str) -> None:
        """Connects, and prepares the descriptors of both ends."""
        other = json.loads(card)
        name = self._agent.add_remote_agent(base64.b64decode(other["metadata"]))
        name = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(name)
        self._here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._all(self._blocks.address), _MEMORY)
        self._there = self._agent.prep_xfer_dlist(name, self._all(other["address"]), _MEMORY)

    def prepare(self, there: Ids, here: Ids) -> Transfer:
        """Prepares make_prepped_xfer, transfer, and polling until it is done, which are timed."""
        agent = self._agent
        started: list[Any] = []

        def make() -> Any:
            return agent.make_prepped_xfer("READ", self._here, here, self._there, there)

        made = make() if self._repeats else None

        def start() -> None:
            handle = make() if made is None else made
            started.extend((handle, agent.transfer(handle)))

        def finish() -> None:
            state = started.pop()
            while state == "PROC":
                state = agent.check_xfer_state(started[0])
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")

        return Transfer(start, finish, lambda: started.pop().release())

    def _all(self, base: int) -> Any:
        starts = np.uint64(base) + self._blocks.starts()
        return np.stack([starts, self._blocks.sizes(), np.zeros_like(starts)], axis=1)


def _kvlinks_folder() -> str:
    spec = find_spec("kvlink_nixl")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("kvlink's backend is not in this environment: pip install packaging/nixl")
    return next(iter(spec.submodule_search_locations))


make = Nixl
