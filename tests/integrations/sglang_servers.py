# SPDX-License-Identifier: Apache-2.0
"""Scheduler processes of SGLang, with kvlink's real manager, workers and memory, on the stand-in for SGLang's classes.

A test takes the steps of the schedulers and of the listeners itself, so every order of events can be had.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_stand_in as sglang
from sglang_stand_in import DisaggregationMode, KVPoll, KVTransferError
from test_sglang_handoff import HEAD_BYTES, HEADS, LAYERS, PAGE

PAGES, SLOTS, ROWS, ROW_BYTES = 64, 16, 64, 24
STATE_BYTES = 48
SERVER_ARGS = SimpleNamespace(enable_pd_role_switch=False, enable_memory_saver=False)


class Scheduler:
    """One rank of a prefill or decode server with its memory. `manager` is kvlink's."""

    def __init__(
        self,
        backend: ModuleType,
        mode: DisaggregationMode,
        *,
        has_states: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.backend, self.mode = backend, mode
        self.rank, self.ranks = rank, ranks
        rng = np.random.default_rng(mode is DisaggregationMode.PREFILL)
        shape = (PAGES, PAGE, HEADS // ranks, HEAD_BYTES)
        self.kv = [rng.integers(0, 256, shape, np.uint8) for _ in range(2 * LAYERS)]
        self.states = [rng.integers(0, 256, (SLOTS, STATE_BYTES), np.uint8) for _ in range(2)]
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.manager = backend.KVLinkManager(self._args(has_states), mode, SERVER_ARGS)
        self.address = f"127.0.0.1:{self.manager.rank_port}"

    def _args(self, has_states: bool) -> Any:
        states = self.states if has_states else []
        kinds = [SimpleNamespace(value="mamba")] if has_states else []
        return sglang.KVArgs(
            page_size=PAGE, gpu_id=0, tp_rank=self.rank, tp_size=self.ranks, num_draft_entries=0,
            kv_data_ptrs=[a.ctypes.data for a in self.kv], kv_data_lens=[a.nbytes for a in self.kv],
            kv_item_lens=[a[0].nbytes for a in self.kv],
            state_types=kinds, state_data_ptrs=[[a.ctypes.data for a in states]] if kinds else [],
            state_data_lens=[[a.nbytes for a in states]] if kinds else [],
            state_item_lens=[[a[0].nbytes for a in states]] if kinds else [],
            aux_data_ptrs=[self.rows.ctypes.data], aux_item_lens=[ROW_BYTES],
        )  # fmt: skip

    def listen(self) -> None:
        """Takes the listener's steps until no message is left."""
        while self.manager.server_socket.frames:
            assert self.manager.listener.step()
        assert self.manager.listener.step()

    def sender(self, room: int) -> Any:
        return self.backend.KVLinkSender(mgr=self.manager, bootstrap_addr=self.address, bootstrap_room=room)

    def receiver(self, room: int, prefill: Scheduler) -> Any:
        made = self.backend.KVLinkReceiver(
            mgr=self.manager, bootstrap_addr=prefill.address, bootstrap_room=room
        )
        made.init(0)
        return made

    def close(self) -> None:
        for cache in self.manager.caches:
            cache.worker.close()


def make_backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns kvlink's backend over the stand-in. Its threads are not started: tests take the steps."""
    sglang.install(monkeypatch)
    from kvlink.integrations.sglang import backend, manager

    monkeypatch.setattr(manager, "start_thread", lambda *args: None)
    return backend


def deliver_all(*schedulers: Scheduler) -> None:
    """Delivers every message in order, and those that they cause."""
    while sglang.network.sent:
        sglang.network.deliver()
        for scheduler in schedulers:
            scheduler.listen()


def failure_of(request: Any) -> str:
    """Asserts that a request has failed. Returns the reason, as SGLang's scheduler gets it."""
    assert request.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        request.failure_exception()
    return str(raised.value)
