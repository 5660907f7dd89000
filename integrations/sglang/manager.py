# SPDX-License-Identifier: Apache-2.0
"""Holds what a scheduler process of SGLang has once: its caches, its rooms, and the connections to its peers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError, KVLinkError

from .caches import AuxRows, Buffers, grouped, open_caches
from .incoming import Incoming
from .messages import CHUNK, WANT, Chunk, Want
from .outgoing import Outgoing, Written
from .rank import rank_of
from .restarts import was_restarted
from .rooms import LiveRooms, refusal

_log = logging.getLogger("kvlink.sglang")

_FAILED_ROOMS = 1024  # kept to notify decode ranks that come late


class KVLinkManager(CommonKVManager):  # type: ignore[misc]
    """The manager of a scheduler process.

    A listener thread handles the messages of peers. Everything else runs on the scheduler's thread.
    """

    kv_status_msg_tag = b"KVLINK_STATUS"
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.rank = rank_of(self)
        self.caches = open_caches(
            grouped(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, "KV cache"),
            _states(args),
            self.rank,
            WorkerConfig.from_env(defaults={"host": self.local_ip}),
        )
        self.aux = AuxRows(args.aux_data_ptrs, args.aux_item_lens)
        self.outgoing = Outgoing(self.caches)
        self.incoming = Incoming(self.caches)
        self.live_rooms = LiveRooms()
        self._failed_rooms: deque[int] = deque(maxlen=_FAILED_ROOMS)
        self._after_events = ThreadPoolExecutor(1, "kvlink-after-events")
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self._listen({WANT: self._wanted, ABORT_TAG: self._aborted})
        else:
            self._listen({CHUNK: self._arrived, self.kv_status_msg_tag: self._failed})
            self._start_heartbeat_checker_thread()

    # The following methods belong to prefill.

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        *,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        wait_event: Any = None,
        **_: Any,
    ) -> None:
        """Offers a chunk and sends its tickets to the decode ranks that want it, after the CUDA event `wait_event`."""
        if self.request_status.get(bootstrap_room) in (None, KVPoll.Failed):
            return
        wants = [
            want for want in list(self.transfer_infos.get(bootstrap_room, {}).values()) if not want.is_dummy
        ]
        num_tokens = len(kv_indices) * self.rank.page_tokens if num_kv_tokens is None else num_kv_tokens
        written = Written(kv_indices, num_tokens, state_indices or (), is_last_chunk)
        aux = self.aux.read(aux_index) if wants and aux_index is not None else ()
        try:
            tickets = self.outgoing.offer(bootstrap_room, written, wants)
        except KVLinkError as error:
            self.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=str(error))
            return
        self.update_status(bootstrap_room, KVPoll.Transferring)
        for want, its_tickets in zip(wants, tickets, strict=True):
            chunk = Chunk(
                bootstrap_room, want.generation, self._prefill_unique_rank(), index_slice.start, len(kv_indices),
                is_last_chunk, tuple(its_tickets), aux,
            )  # fmt: skip
            if wait_event is None:
                self._tell(want, chunk)
            else:
                self._after_events.submit(self._tell, want, chunk, wait_event)
        self._conclude_if_delivered(bootstrap_room)

    def collect(self) -> None:
        """Collects leases that ended. A settled one is the acknowledgement, anything else a failure."""
        for room, problem in self.outgoing.ended():
            if problem:
                self.conclude_failure(
                    bootstrap_room=room, failure_reason=f"decode did not read the pages: {problem}"
                )
            else:
                self._conclude_if_delivered(room)

    def remember_failed(self, room: int) -> None:
        """Remembers a failed room, so that a decode rank that comes later fails immediately, not by its timeout."""
        self._failed_rooms.append(room)

    def _conclude_if_delivered(self, room: int) -> None:
        if self.outgoing.delivered(room):
            self.update_status(room, KVPoll.Success)

    def _tell(self, want: Want, chunk: Chunk, after: Any = None) -> None:
        peer = NetworkAddress(want.endpoint, want.dst_port)
        try:
            if after is not None:
                after.synchronize()
            self._send_multipart_locked(peer.to_tcp(), chunk.to_frames(), is_ipv6=peer.is_ipv6)
        except (zmq.ZMQError, RuntimeError, ConfigError) as error:
            reason = f"cannot announce pages to decode at {peer.to_host_port_str()}: {error}"
            self.conclude_failure(bootstrap_room=want.room, failure_reason=reason)

    def _send_multipart_locked(self, endpoint: str, parts: list[bytes], is_ipv6: bool = False) -> None:
        """Sends like the base class, but fails at once if a peer accepts nothing, because schedulers must not wait."""
        socket = self._connect(endpoint, is_ipv6=is_ipv6)
        with self._socket_send_locks[endpoint]:
            socket.send_multipart(parts, flags=zmq.NOBLOCK)

    # The following methods belong to decode.

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        decode_prefix_len: int | None,
        is_dummy: bool,
        **_: Any,
    ) -> list[bytes]:
        """Returns the message that `CommonKVReceiver.send_metadata` sends to each prefill rank."""
        want = Want(
            bootstrap_room, self.incoming.generation(bootstrap_room), self.local_ip, self.rank_port,
            self.rank.total_heads, self.rank.tp_rank, self.rank.tp_size, required_dst_info_num,
            decode_prefix_len or 0, is_dummy,
        )  # fmt: skip
        return want.to_frames()

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Returns whether this server can read from the prefill server. If not, fails the requests that name it.

        SGLang raises an error for a prefill server with other settings, such as another page size, and the scheduler,
        and with it the whole server, would end for one request of a router.
        """
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        except RuntimeError as error:
            reason = f"the prefill server at {bootstrap_addr} does not fit this decode server: {error}"
        rooms = [*self.addr_to_rooms_tracker.get(bootstrap_addr, ())]
        for room in rooms:
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)
        if rooms:
            _log.error("refuses %d requests: %s", len(rooms), reason)
        return False

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        """Fails the requests at a prefill server that was restarted, and finds its new ranks for the next ones."""
        super()._on_heartbeat_success(bootstrap_addr)
        with self.connection_lock:
            known = [
                infos[0]
                for key, infos in self.connection_pool.items()
                if key.startswith(f"{bootstrap_addr}_") and infos
            ]
        if was_restarted(self.session_pool[bootstrap_addr], bootstrap_addr, known):
            _log.warning("the prefill server at %s was restarted", bootstrap_addr)
            self._handle_node_failure(bootstrap_addr)

    # The following methods handle messages of peers, on the listener's thread.

    def _listen(self, handlers: dict[bytes, Callable[[list[bytes]], None]]) -> None:
        receive = self._make_worker_recv(self.server_socket)

        def handle_next() -> bool:
            try:
                frames = receive()
                if frames and frames[0] in handlers:
                    handlers[frames[0]](frames)
            except zmq.ZMQError as error:
                _log.warning("stops listening error=%s", error)
                return False
            except Exception as error:
                _log.warning("dropped a message error=%s", error)
            return True

        def listen() -> None:
            while handle_next():
                pass

        threading.Thread(target=listen, name="kvlink-listener", daemon=True).start()

    def _wanted(self, frames: list[bytes]) -> None:
        want = Want.from_frames(frames)
        status = self.request_status.get(want.room)
        if status == KVPoll.Failed or want.room in self._failed_rooms:
            self._refuse(want, "prefill aborted the request before decode asked for it")
        elif clash := refusal(self.transfer_infos.get(want.room, {}), want):
            self._refuse(want, clash)
        elif status in (None, KVPoll.Bootstrapping):
            self._admit(want)

    def _refuse(self, want: Want, why: str) -> None:
        self.send_kv_status_message(
            targets=[(want.endpoint, want.dst_port)],
            bootstrap_room=want.room,
            status=KVPoll.Failed,
            failure_reason=why,
        )

    def _admit(self, want: Want) -> None:
        wants = self.transfer_infos.setdefault(want.room, {})
        wants[want.endpoint, want.dst_port] = want
        if len(wants) >= want.required_dst_info_num:
            self.resolve_kv_replica_factor(wants)
            self.req_to_decode_prefix_len[want.room] = want.prefix_tokens
            self.update_status(want.room, KVPoll.WaitingForInput)

    def _aborted(self, frames: list[bytes]) -> None:
        abort = AbortNotification.from_zmq(frames)
        if abort is not None and self.request_status.get(abort.room) not in (None, KVPoll.Success):
            self.record_failure(abort.room, "decode aborted the request")
            self.update_status(abort.room, KVPoll.Failed)

    def _arrived(self, frames: list[bytes]) -> None:
        self.incoming.arrived(Chunk.from_frames(frames))

    def _failed(self, frames: list[bytes]) -> None:
        """Handles a report of prefill. It ignores success, because decode itself knows what has arrived."""
        report = self.parse_kv_status_message(frames)
        if report is not None and report[1] != KVPoll.Success:
            room, status, rank, reason = report
            self.apply_prefill_status(
                bootstrap_room=room, status=status, prefill_rank=rank, failure_reason=reason
            )


def _states(args: Any) -> list[tuple[str, list[Buffers]]]:
    kinds = [kind.value for kind in args.state_types]
    columns = zip(kinds, args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return [(kind, grouped(addresses, lengths, items, kind)) for kind, addresses, lengths, items in columns]
