# SPDX-License-Identifier: Apache-2.0
"""Stands in for what SGLang's backends build on, reduced to how it keeps a request's status: under its room alone.

Follows sglang/srt/disaggregation/common/conn.py of 0.5.23. Messages go through `Network`, where a test delivers them.
SGLang itself runs in the engines' lane.
"""

from __future__ import annotations

import enum
import itertools
import sys
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class KVClassType(enum.Enum):
    KVARGS, MANAGER, SENDER, RECEIVER, BOOTSTRAP_SERVER = range(5)


class DisaggregationMode(enum.Enum):
    PREFILL, DECODE = "prefill", "decode"


class KVTransferError(Exception):
    def __init__(self, room: int, reason: str | None, is_from_another_rank: bool = False) -> None:
        super().__init__(reason)


class ZMQError(Exception):
    def __init__(self, errno: int = 11) -> None:
        self.errno = errno


class NetworkAddress(NamedTuple):
    host: str
    port: int
    is_ipv6: bool = False

    def to_tcp(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def to_host_port_str(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass
class AbortNotification:
    room: int
    decode_ip: str | None = None
    decode_port: int | None = None
    generation: int | None = None

    @classmethod
    def from_zmq(cls, frames: list[bytes]) -> AbortNotification | None:
        try:
            room, host, port, *generation = (frame.decode("ascii") for frame in frames[1:])
            return cls(int(room), host, int(port), *(int(one) for one in generation[:1]))
        except (ValueError, UnicodeDecodeError):
            return None

    def to_zmq(self) -> list[bytes]:
        values = [self.room, self.decode_ip, self.decode_port]
        values += [] if self.generation is None else [self.generation]
        return [b"ABORT", *(str(value).encode() for value in values)]


class Frame(NamedTuple):
    bytes: bytes
    more: bool

    def __len__(self) -> int:
        return len(self.bytes)


class Socket:
    """A PULL socket with the messages that a test has delivered to it."""

    closed = False

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.frames)

    def recv(self, copy: bool) -> Frame:
        return self.frames.popleft()

    def deliver(self, parts: list[bytes]) -> None:
        self.frames.extend(Frame(part, number + 1 < len(parts)) for number, part in enumerate(parts))


@dataclass
class Network:
    """Messages that were sent and are not delivered yet, in order, with the port each is for."""

    sockets: dict[int, Socket] = field(default_factory=dict)
    sent: list[tuple[int, list[bytes]]] = field(default_factory=list)

    def send(self, endpoint: str, parts: list[bytes]) -> None:
        port = int(endpoint.rpartition(":")[2])
        if port not in self.sockets:
            raise ZMQError
        self.sent.append((port, parts))

    def deliver(self, number: int = 0, *, keep: bool = False) -> None:
        port, parts = self.sent[number] if keep else self.sent.pop(number)
        self.sockets[port].deliver(parts)


network = Network()
_ports = itertools.count(7000)


class CommonKVManager:
    waiting_timeout = bootstrap_timeout = 300.0
    kv_status_msg_tag: bytes
    deferred_bootstrap = None

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        self.kv_args, self.disaggregation_mode, self.server_args = args, mode, server_args
        self.is_mla_backend = is_mla_backend
        self.kv_cache_dtype_str = "uint8"
        self.attn_tp_rank, self.attn_tp_size = args.tp_rank, args.tp_size
        self.attn_cp_size = self.dcp_size = 1
        self.attn_dp_rank = self.system_dp_rank = 0
        self.kv_shard_size = 1
        self.local_ip, self.rank_port, self.server_socket = "127.0.0.1", next(_ports), Socket()
        network.sockets[self.rank_port] = self.server_socket
        self.request_status: dict[int, int] = {}
        self.failure_records: dict[int, str] = {}
        self.failure_lock = threading.Lock()
        self._socket_cache: dict[str, Any] = {}
        self._monitor_cache: dict[str, Any] = {}
        self._socket_lock = threading.Lock()
        self._socket_send_locks: dict[str, Any] = defaultdict(threading.Lock)
        if mode == DisaggregationMode.PREFILL:
            self.transfer_infos: dict[int, dict[Any, Any]] = {}
            self.req_to_decode_prefix_len: dict[int, int] = {}
        else:
            self.addr_to_rooms_tracker: dict[str, set[int]] = defaultdict(set)
            self.prefill_response_tracker: dict[int, set[int]] = {}
            self.required_prefill_response_num_table: dict[int, int] = {}
        self.misfits: set[str] = set()

    def _make_worker_recv(self, socket: Any) -> Any:
        return socket.recv_multipart

    def _start_heartbeat_checker_thread(self) -> None:
        pass

    def _prefill_unique_rank(self) -> int:
        return self.attn_tp_rank

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> Any:
        return self._socket_cache.setdefault(
            endpoint,
            SimpleNamespace(
                send_multipart=lambda parts, flags=0: network.send(endpoint, parts), close=lambda linger: None
            ),
        )

    def resolve_kv_replica_factor(self, transfer_infos: Any) -> None:
        pass

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        if bootstrap_addr in self.misfits:
            raise RuntimeError("Page size mismatch")
        return True

    def check_status(self, room: int) -> int:
        return self.request_status[room]

    def update_status(self, room: int, status: int) -> None:
        now = self.request_status.get(room)
        if now is None:
            if status in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
                self.request_status[room] = status
        elif KVPoll.Failed in (now, status):
            self.request_status[room] = KVPoll.Failed
        else:
            self.request_status[room] = max(now, status)

    def record_failure(self, room: int, reason: str) -> None:
        self.failure_records[room] = reason

    def send_kv_status_message(
        self, *, targets: Any, bootstrap_room: int, status: int, failure_reason: str | None = None
    ) -> None:
        values = (bootstrap_room, status, self._prefill_unique_rank(), failure_reason or "")
        parts = [self.kv_status_msg_tag, *(str(value).encode() for value in values)]
        for host, port in targets:
            try:
                network.send(f"tcp://{host}:{port}", parts)
            except Exception:
                continue

    def parse_kv_status_message(self, frames: list[bytes]) -> Any:
        try:
            room, status, rank = (int(frame.decode("ascii")) for frame in frames[1:4])
        except (ValueError, UnicodeDecodeError):
            return None
        return room, status, rank, frames[4].decode("utf-8", "replace") if len(frames) > 4 else None

    def conclude_failure(self, *, bootstrap_room: int, failure_reason: str) -> None:
        if bootstrap_room not in self.request_status:
            return
        reason = self.failure_records.setdefault(bootstrap_room, failure_reason)
        wants = list(self.transfer_infos.get(bootstrap_room, {}).values())
        targets = [(want.endpoint, want.dst_port) for want in wants if not want.is_dummy]
        self.update_status(bootstrap_room, KVPoll.Failed)
        self.send_kv_status_message(
            targets=targets, bootstrap_room=bootstrap_room, status=KVPoll.Failed, failure_reason=reason
        )

    def apply_prefill_status(
        self, *, bootstrap_room: int, status: int, prefill_rank: int, failure_reason: str | None
    ) -> None:
        if bootstrap_room in self.request_status and status == KVPoll.Failed:
            self.record_failure(bootstrap_room, failure_reason or "prefill failed")
            self.update_status(bootstrap_room, KVPoll.Failed)


class CommonKVSender:
    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self.conclude_state: int | None = None
        self.curr_idx, self.num_kv_indices = 0, 0
        self.aux_index: int | None = None
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)
        self.init_time = time.time()

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self.num_kv_indices, self.aux_index = num_kv_indices, aux_index

    def pop_decode_prefix_len(self) -> int:
        prefix: int = self.kv_mgr.req_to_decode_prefix_len.pop(self.bootstrap_room, 0)
        return prefix

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        index_slice = slice(self.curr_idx, self.curr_idx + len(kv_indices))
        self.curr_idx += len(kv_indices)
        is_last = self.curr_idx == self.num_kv_indices
        self.kv_mgr.add_transfer_request(
            self.bootstrap_room, kv_indices, index_slice, is_last,
            aux_index=self.aux_index if is_last else None, state_indices=state_indices if is_last else None,
            num_kv_tokens=num_kv_tokens,
        )  # fmt: skip

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        status: int = self.kv_mgr.request_status.get(self.bootstrap_room, KVPoll.Failed)
        if status == KVPoll.Bootstrapping and time.time() - self.init_time >= self.kv_mgr.bootstrap_timeout:
            self.kv_mgr.record_failure(self.bootstrap_room, "timed out in KVPoll.Bootstrapping")
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            status = KVPoll.Failed
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return status

    def clear(self) -> None:
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)
        self.kv_mgr.req_to_decode_prefix_len.pop(self.bootstrap_room, None)
        self.kv_mgr.transfer_infos.pop(self.bootstrap_room, None)

    def failure_exception(self) -> None:
        self.conclude_state = KVPoll.Failed
        self.clear()
        reason = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        raise KVTransferError(
            self.bootstrap_room, reason or "Failed due to an unknown reason from another rank"
        )

    def abort(self) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed


class CommonKVReceiver:
    init_time: float | None = None
    bootstrap_infos: Any

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room
        self.conclude_state: int | None = None
        self.abort_notified = False
        self._abort_generation: int | None = None
        mgr.addr_to_rooms_tracker[bootstrap_addr].add(bootstrap_room)
        mgr.update_status(bootstrap_room, KVPoll.Bootstrapping)

    def init(self, prefill_dp_rank: int) -> None:
        if self.conclude_state != KVPoll.Failed:
            port = int(self.bootstrap_addr.rpartition(":")[2])
            self.bootstrap_infos = [{"is_dummy": False, "rank_ip": "127.0.0.1", "rank_port": port}]
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def send_metadata(
        self, kv_indices: Any, aux_index: Any, state_indices: Any, decode_prefix_len: int | None = None
    ) -> None:
        for info in self.bootstrap_infos:
            message = self.kv_mgr.build_receiver_metadata_message(
                bootstrap_room=self.bootstrap_room, required_dst_info_num=1, kv_indices=kv_indices,
                aux_index=aux_index, state_indices=state_indices, decode_prefix_len=decode_prefix_len,
                is_dummy=info["is_dummy"],
            )  # fmt: skip
            try:
                network.send(f"tcp://{info['rank_ip']}:{info['rank_port']}", message)
            except ZMQError:
                self.kv_mgr.record_failure(self.bootstrap_room, "send_metadata to prefill failed")
                self.conclude_state = KVPoll.Failed
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
                return
        self.init_time = time.time()

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        status: int = self.kv_mgr.check_status(self.bootstrap_room)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        if status != KVPoll.WaitingForInput or self.init_time is None:
            return status
        if time.time() - self.init_time < self.kv_mgr.waiting_timeout:
            return status
        self.kv_mgr.record_failure(self.bootstrap_room, "timed out in KVPoll.WaitingForInput")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.ensure_abort_notified()
        return KVPoll.Failed

    def clear(self) -> None:
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)

    def failure_exception(self) -> None:
        self.conclude_state = KVPoll.Failed
        self.clear()
        reason = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        raise KVTransferError(
            self.bootstrap_room, reason or "Failed due to an unknown reason from another rank"
        )

    def abort(self) -> None:
        if self.conclude_state != KVPoll.Failed:
            self.kv_mgr.record_failure(self.bootstrap_room, "Aborted by AbortReq.")
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        if self.abort_notified or getattr(self, "bootstrap_infos", None) is None:
            return
        self.abort_notified = True
        for info in self.bootstrap_infos:
            mgr = self.kv_mgr
            abort = AbortNotification(
                self.bootstrap_room, mgr.local_ip, mgr.rank_port, self._abort_generation
            )
            try:
                network.send(f"tcp://{info['rank_ip']}:{info['rank_port']}", abort.to_zmq())
            except Exception:
                continue


class ModelConfig(SimpleNamespace):
    """Describes a model with 4 KV heads."""

    hf_config = SimpleNamespace(architectures=["Tiny"])
    hf_text_config = SimpleNamespace(num_hidden_layers=3, _name_or_path="tiny")

    @classmethod
    def from_server_args(cls, server_args: Any) -> ModelConfig:
        return cls()

    def get_total_num_kv_heads(self) -> int:
        return 4


class KVArgs(SimpleNamespace):
    """SGLang's description of a rank's buffers."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable as SGLang's modules for one test; so is ZMQ, of which only names are needed."""
    network.sockets.clear()
    network.sent.clear()
    context = SimpleNamespace(
        device="cpu", pp_size=1, port=30000, disaggregation_decode_host_receive_threshold=1.0
    )
    names: dict[str, dict[str, Any]] = {
        "sglang.srt.disaggregation.base": {"KVArgs": KVArgs, "KVPoll": KVPoll},
        "sglang.srt.disaggregation.common.conn": {
            "ABORT_TAG": b"ABORT",
            "AbortNotification": AbortNotification,
            "CommonKVBootstrapServer": SimpleNamespace,
            "CommonKVManager": CommonKVManager,
            "CommonKVReceiver": CommonKVReceiver,
            "CommonKVSender": CommonKVSender,
            "KVTransferError": KVTransferError,
        },
        "sglang.srt.disaggregation.utils": {
            "DisaggregationMode": DisaggregationMode,
            "KVClassType": KVClassType,
        },
        "sglang.srt.environ": {
            "envs": SimpleNamespace(SGLANG_DISAGG_STAGING_BUFFER=SimpleNamespace(get=lambda: False))
        },
        "sglang.srt.utils.network": {"NetworkAddress": NetworkAddress},
        "sglang.srt.configs.model_config": {"ModelConfig": ModelConfig},
        "sglang.srt.runtime_context": dict.fromkeys(
            ("get_device", "get_disagg", "get_parallel", "get_serving"), lambda: context
        ),
        "zmq": {"ZMQError": ZMQError, "NOBLOCK": 1},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("backend", "listener", "manager", "rank", "requests"):
        monkeypatch.delitem(sys.modules, f"kvlink.integrations.sglang.{name}", raising=False)
