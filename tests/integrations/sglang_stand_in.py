# SPDX-License-Identifier: Apache-2.0
"""Stands in for what SGLang's backends build on, reduced to how it keeps a request's status: under its room alone.

Follows sglang/srt/disaggregation/common/conn.py of 0.5.23. SGLang itself runs in the engines' lane.
"""

from __future__ import annotations

import enum
import sys
import time
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class KVClassType(enum.Enum):
    KVARGS, MANAGER, SENDER, RECEIVER, BOOTSTRAP_SERVER = range(5)


class KVTransferError(Exception):
    pass


class CommonKVManager:
    waiting_timeout = 300.0

    def __init__(self) -> None:
        self.request_status: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self.addr_to_rooms_tracker: dict[str, set[int]] = defaultdict(set)
        self.transfer_infos: dict[int, Any] = {}
        self.aborts: list[int] = []
        self.misfits: set[str] = set()

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        if bootstrap_addr in self.misfits:
            raise RuntimeError("Page size mismatch")
        return True

    def update_status(self, room: int, status: int) -> None:
        now = self.request_status.get(room)
        if now is None:
            if status == KVPoll.Bootstrapping:
                self.request_status[room] = status
        elif KVPoll.Failed in (now, status):
            self.request_status[room] = KVPoll.Failed
        else:
            self.request_status[room] = max(now, status)

    def record_failure(self, room: int, reason: str) -> None:
        self.failures[room] = reason

    def conclude_failure(self, *, bootstrap_room: int, failure_reason: str) -> None:
        self.failures.setdefault(bootstrap_room, failure_reason)
        self.update_status(bootstrap_room, KVPoll.Failed)


class _OfRoom:
    _owns_bootstrap_room = True

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.conclude_state: int | None = None
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        status: int = self.kv_mgr.request_status[self.bootstrap_room]
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return status

    def clear(self) -> None:
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)
        self.kv_mgr.transfer_infos.pop(self.bootstrap_room, None)

    def failure_exception(self) -> None:
        self.conclude_state = KVPoll.Failed
        self.clear()
        raise KVTransferError(self.bootstrap_room, self.kv_mgr.failures.pop(self.bootstrap_room, None))

    def abort(self) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, "Aborted")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed


class CommonKVSender(_OfRoom):
    pass


class CommonKVReceiver(_OfRoom):
    init_time: float | None = None
    bootstrap_infos: list[dict[str, Any]]

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        mgr.addr_to_rooms_tracker[bootstrap_addr].add(bootstrap_room)

    def init(self, prefill_dp_rank: int) -> None:
        if self.conclude_state != KVPoll.Failed:
            self.bootstrap_infos = [{"is_dummy": False}]
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def send_metadata(self, *args: Any, **options: Any) -> None:
        self.init_time = time.time()

    def poll(self) -> int:
        status = super().poll()
        if status != KVPoll.WaitingForInput or self.init_time is None:
            return status
        if time.time() - self.init_time < self.kv_mgr.waiting_timeout:
            return status
        self.kv_mgr.record_failure(self.bootstrap_room, "timed out")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        return KVPoll.Failed

    def ensure_abort_notified(self) -> None:
        self.kv_mgr.aborts.append(self.bootstrap_room)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable as SGLang's modules for one test; so is ZMQ, of which only names are needed."""
    names = {
        "sglang.srt.disaggregation.base": {"KVArgs": SimpleNamespace, "KVPoll": KVPoll},
        "sglang.srt.disaggregation.common.conn": {
            "ABORT_TAG": b"ABORT",
            "AbortNotification": SimpleNamespace,
            "CommonKVBootstrapServer": SimpleNamespace,
            "CommonKVManager": CommonKVManager,
            "CommonKVReceiver": CommonKVReceiver,
            "CommonKVSender": CommonKVSender,
            "KVTransferError": KVTransferError,
        },
        "sglang.srt.disaggregation.utils": {"DisaggregationMode": enum.Enum, "KVClassType": KVClassType},
        "sglang.srt.utils.network": {"NetworkAddress": SimpleNamespace},
        "sglang.srt.configs.model_config": {"ModelConfig": SimpleNamespace},
        "sglang.srt.runtime_context": dict.fromkeys(("get_device", "get_parallel", "get_serving")),
        "zmq": {"ZMQError": OSError, "NOBLOCK": 1},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("backend", "manager", "rank"):
        monkeypatch.delitem(sys.modules, f"kvlink.integrations.sglang.{name}", raising=False)
