# SPDX-License-Identifier: Apache-2.0
"""Holds what a scheduler process of SGLang has once: its caches, its rooms, and the connections to its peers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress
from zmq import NOBLOCK

from kvlink.config import WorkerConfig
from kvlink.errors import KVLinkError
from kvlink.layout import num_seats
from kvlink.runtime.supervised import start_thread, survived

from ..request_guard import RequestGuard
from .bootstrap import check_server
from .caches import AuxRows, Buffers, grouped, open_caches
from .incoming import Incoming
from .listener import NAME, BoundedSocket, Listener
from .messages import CHUNK, FAILED, WANT, Chunk, Failed, Malformed, Want
from .outgoing import Outgoing, Written
from .rank import model_now, rank_of
from .restarts import was_restarted
from .rooms import LiveRooms
from .wants import Refusal, Wants
from .weight_changes import follow

_log = logging.getLogger("kvlink.sglang")

_MAX_PEERS = 4096
"""The number of sockets to peers, beyond which idle ones are closed."""
_UNKNOWN = "failed on another rank of this server"


class _Delivery(NamedTuple):
    """A chunk to be announced after the CUDA event `after`."""

    want: Want
    chunk: Chunk
    after: Any


class KVLinkManager(CommonKVManager):  # type: ignore[misc]
    """The manager of a scheduler process.

    A listener thread handles the messages of peers, and another thread announces chunks that wait for a CUDA event.
    Everything else runs on the scheduler's thread. `rooms_lock` guards what they share about rooms.
    """

    kv_status_msg_tag = b"KVLINK_STATUS"
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.rooms_lock = threading.RLock()
        self.guard = RequestGuard(_log)
        self.live_rooms = LiveRooms()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.rank = rank_of(self)
        self.caches = open_caches(
            grouped(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, "KV cache"),
            _states(args),
            self.rank,
            WorkerConfig.from_env(defaults={"host": self.local_ip}),
        )
        follow(self)
        self.aux = AuxRows(args.aux_data_ptrs, args.aux_item_lens)
        self.outgoing = Outgoing(self.caches)
        self.incoming = Incoming(self.caches)
        self._deliveries: queue.SimpleQueue[_Delivery] = queue.SimpleQueue()
        self.is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        if self.is_prefill:
            self.wants = Wants(self._misfit, self.bootstrap_timeout)
            handlers = {WANT: self._wanted, ABORT_TAG: self._aborted}
            start_thread("sglang-announcements", self._announce_for_ever)
        else:
            handlers = {CHUNK: self._arrived, FAILED: self._refused, self.kv_status_msg_tag: self._reported}
            self._start_heartbeat_checker_thread()
        receive = self._make_worker_recv(BoundedSocket(self.server_socket))
        self.listener = Listener(self.server_socket, receive, handlers, self._refuse_overdue)
        start_thread(NAME, self.listener.run)

    # The following methods belong to both.

    def model_changed(self) -> None:
        """Goes on with other weights or adapters. Tickets and pulls from now on have the identity of the new model."""
        text = model_now(self)
        for cache in self.caches:
            cache.worker.pool.model.change(text)
        _log.warning("the model was changed: it is now %s", text)

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        """Changes the status of a room as the base class does, which no two threads may do at the same time."""
        with self.rooms_lock:
            super().update_status(bootstrap_room, status)
            if status == KVPoll.Failed and self.is_prefill:
                self.wants.end(bootstrap_room, self.failure_of(bootstrap_room), failed=True)

    def failure_of(self, room: int) -> str:
        """Returns why a room has failed."""
        with self.failure_lock:
            return str(self.failure_records.get(room) or _UNKNOWN)

    def forget(self, room: int) -> None:
        """Forgets an attempt at a room that SGLang left without `clear`, and ends its reads and its leases."""
        self.outgoing.end(room)
        self.incoming.drop(room)
        with self.rooms_lock:
            if self.is_prefill:
                self.wants.end(room, "this attempt has ended", failed=False)
            for name in (
                "request_status", "transfer_infos", "req_to_decode_prefix_len", "prefill_response_tracker",
                "required_prefill_response_num_table",
            ):  # fmt: skip
                getattr(self, name, {}).pop(room, None)
            with self.failure_lock:
                self.failure_records.pop(room, None)
        for rooms in list(getattr(self, "addr_to_rooms_tracker", {}).values()):
            rooms.discard(room)

    # The following methods belong to prefill.

    def open_room(self, room: int) -> None:
        """Begins an attempt at a room, for which decode ranks may have asked already."""
        with self.rooms_lock:
            held = self.wants.open(room, self.transfer_infos.setdefault(room, {}))
            if self.request_status.get(room) == KVPoll.Failed:
                self.wants.end(room, self.failure_of(room), failed=True)
                refusals = [Refusal(want, self.failure_of(room)) for want in held]
            else:
                refusals = [Refusal(want, reason) for want in held if (reason := self._admitted(want))]
        for refusal in refusals:
            self._refuse(*refusal)

    def close_room(self, room: int, failed: bool) -> None:
        """Ends an attempt at a room. Decode ranks that ask for it later are refused."""
        with self.rooms_lock:
            reason = self.failure_of(room) if failed else "this attempt has ended"
            self.wants.end(room, reason, failed)

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
        """Offers a chunk and sends its tickets to the decode ranks that want it, after the CUDA event `wait_event`.

        Raises KVLinkError.
        """
        if self.request_status.get(bootstrap_room) in (None, KVPoll.Failed):
            return
        wants = [
            want for want in list(self.transfer_infos.get(bootstrap_room, {}).values()) if not want.is_dummy
        ]
        num_tokens = len(kv_indices) * self.rank.page_tokens if num_kv_tokens is None else num_kv_tokens
        written = Written(kv_indices, num_tokens, state_indices or (), is_last_chunk)
        aux = self.aux.read(aux_index) if wants and aux_index is not None else ()
        tickets = self.outgoing.offer(bootstrap_room, written, wants)
        self.update_status(bootstrap_room, KVPoll.Transferring)
        for want, its_tickets in zip(wants, tickets, strict=True):
            chunk = Chunk(
                bootstrap_room, want.generation, self._prefill_unique_rank(), index_slice.start, len(kv_indices),
                is_last_chunk, len(self.caches), tuple(its_tickets), aux,
            )  # fmt: skip
            if wait_event is None:
                self._announce(_Delivery(want, chunk, None))
            else:
                self._deliveries.put(_Delivery(want, chunk, wait_event))
        self._conclude_if_delivered(bootstrap_room)

    def collect(self) -> None:
        """Collects leases that ended. A settled one is the acknowledgement, anything else a failure. Raises nothing."""
        try:
            for room, problem in self.outgoing.ended():
                if problem:
                    reason = f"decode did not read the pages: {problem}"
                    self.conclude_failure(bootstrap_room=room, failure_reason=reason)
                else:
                    self._conclude_if_delivered(room)
        except Exception as error:
            survived("sglang-leases", error)

    def send_kv_status_message(
        self,
        *,
        targets: list[tuple[str, int]],
        bootstrap_room: int,
        status: Any,
        failure_reason: str | None = None,
    ) -> None:
        """Tells decode ranks that a room has failed, so that they know which attempt is meant.

        Success is not told, because decode itself knows what has arrived.
        """
        wants = self.transfer_infos.get(bootstrap_room, {}) if self.is_prefill else {}
        for target in targets:
            if status == KVPoll.Failed and target in wants:
                self._refuse(wants[target], failure_reason or _UNKNOWN)
            elif status != KVPoll.Success:
                super().send_kv_status_message(
                    targets=[target],
                    bootstrap_room=bootstrap_room,
                    status=status,
                    failure_reason=failure_reason,
                )

    def _conclude_if_delivered(self, room: int) -> None:
        if self.outgoing.delivered(room):
            self.update_status(room, KVPoll.Success)

    def _announce_for_ever(self) -> None:
        while True:
            self._announce(self._deliveries.get())

    def _announce(self, delivery: _Delivery) -> None:
        """Sends a chunk. Raises nothing: an error fails its attempt."""
        want = delivery.want
        peer = NetworkAddress(want.endpoint, want.dst_port)
        try:
            if delivery.after is not None:
                delivery.after.synchronize()
            self._send_multipart_locked(peer.to_tcp(), delivery.chunk.to_frames(), is_ipv6=peer.is_ipv6)
        except Exception as error:
            reason = f"cannot announce pages to decode at {peer.to_host_port_str()}: {error}"
            with self.rooms_lock:
                if self.transfer_infos.get(want.room, {}).get(want.address) is want:
                    self.conclude_failure(bootstrap_room=want.room, failure_reason=reason)

    def _send_multipart_locked(self, endpoint: str, parts: list[bytes], is_ipv6: bool = False) -> None:
        """Sends like the base class, but fails at once if a peer accepts nothing, because schedulers must not wait."""
        self._make_place(endpoint)
        socket = self._connect(endpoint, is_ipv6=is_ipv6)
        with self._socket_send_locks[endpoint]:
            socket.send_multipart(parts, flags=NOBLOCK)

    def _make_place(self, endpoint: str) -> None:
        """Closes the socket of the peer that was not written to for the longest time, if there are too many."""
        with self._socket_lock:
            sockets, monitors = self._socket_cache, self._monitor_cache
            if endpoint in sockets:
                sockets[endpoint] = sockets.pop(endpoint)
            if endpoint in sockets or len(sockets) < _MAX_PEERS:
                return
            idle = next(iter(sockets))
            socket, monitor, lock = sockets.pop(idle), monitors.pop(idle, None), self._socket_send_locks[idle]
        with lock:
            socket.close(linger=0)
            if monitor is not None:
                monitor.close()

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
        except Exception as error:
            if not isinstance(error, (RuntimeError, AssertionError, KVLinkError)):
                self.guard.caught("the bootstrap server's answer", bootstrap_addr, error)
            reason = f"the prefill server at {bootstrap_addr} does not fit this decode server: {error}"
        rooms = [*self.addr_to_rooms_tracker.get(bootstrap_addr, ())]
        for room in rooms:
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)
        if rooms:
            _log.error("refuses %d requests: %s", len(rooms), reason)
        return False

    def _resolve_rank_mapping(self, info: Any) -> None:
        check_server(info)
        super()._resolve_rank_mapping(info)

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

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Fails the requests at a prefill server. Raises nothing: SGLang's heartbeat thread would end."""
        try:
            super()._handle_node_failure(failed_bootstrap_addr)
        except Exception as error:
            survived("sglang-heartbeat", error)

    # The following methods handle messages of peers, on the listener's thread.

    def _wanted(self, frames: list[bytes]) -> None:
        try:
            want = Want.from_frames(frames)
        except Malformed as error:
            _log.warning("refused a message: %s", error)
            if error.asker:
                super().send_kv_status_message(
                    targets=[error.asker],
                    bootstrap_room=error.room,
                    status=KVPoll.Failed,
                    failure_reason=str(error),
                )
            return
        with self.rooms_lock:
            reason = self._admitted(want)
        if reason:
            self._refuse(want, reason)

    def _admitted(self, want: Want) -> str:
        """Admits or holds a want. Returns why it is refused, or ""."""
        reason = self.wants.arrived(want)
        ready = (
            self.wants.is_complete(want.room) and self.request_status.get(want.room) == KVPoll.Bootstrapping
        )
        if ready and not reason:
            self.resolve_kv_replica_factor(self.transfer_infos[want.room])
            self.req_to_decode_prefix_len[want.room] = want.prefix_tokens
            self.update_status(want.room, KVPoll.WaitingForInput)
        return reason

    def _misfit(self, want: Want) -> str:
        """Returns why this rank can never hand off pages to the decode rank, or ""."""
        ours = self.rank
        if want.total_heads != ours.total_heads:
            return f"decode's model has {want.total_heads} KV heads, prefill's {ours.total_heads}; start the same model"
        if want.prefix_tokens % ours.page_tokens:
            return f"decode has {want.prefix_tokens} tokens cached, no multiple of prefill's page of {ours.page_tokens}"
        try:
            for cache in self.caches:
                if cache.component is None:
                    num_seats(cache.worker.pool.layout, want.tp_size)
        except KVLinkError as error:
            return f"the servers' ranks do not fit: {error}"
        return ""

    def _refuse(self, want: Want, why: str) -> None:
        peer = NetworkAddress(want.endpoint, want.dst_port)
        message = Failed(want.room, want.generation, self._prefill_unique_rank(), why)
        try:
            self._send_multipart_locked(peer.to_tcp(), message.to_frames(), is_ipv6=peer.is_ipv6)
        except Exception as error:
            _log.warning(
                "cannot tell decode at %s that bootstrap_room %d has failed (%s): %r",
                peer.to_host_port_str(), want.room, why, error,
            )  # fmt: skip

    def _refuse_overdue(self) -> None:
        if not self.is_prefill:
            return
        with self.rooms_lock:
            overdue = list(self.wants.overdue())
        for refusal in overdue:
            self._refuse(*refusal)

    def _aborted(self, frames: list[bytes]) -> None:
        abort = AbortNotification.from_zmq(frames)
        if abort is None:
            return
        address = None if abort.decode_ip is None else (abort.decode_ip, abort.decode_port)
        with self.rooms_lock:
            is_running = self.wants.aborted(abort.room, abort.generation, address)
            if is_running and self.request_status.get(abort.room) not in (None, KVPoll.Success):
                self.record_failure(abort.room, "decode aborted the request")
                self.update_status(abort.room, KVPoll.Failed)

    def _arrived(self, frames: list[bytes]) -> None:
        try:
            self.incoming.arrived(Chunk.from_frames(frames))
        except Malformed as error:
            _log.warning("refused a message: %s", error)
            self.incoming.refuse(error.room, error.generation, error)

    def _refused(self, frames: list[bytes]) -> None:
        """Handles prefill's report that it failed an attempt."""
        report = Failed.from_frames(frames)
        if self.incoming.is_running(report.room, report.generation):
            self.apply_prefill_status(
                bootstrap_room=report.room, status=KVPoll.Failed, prefill_rank=report.prefill_rank,
                failure_reason=report.reason,
            )  # fmt: skip

    def _reported(self, frames: list[bytes]) -> None:
        """Handles a report of SGLang's own form. It ignores success, because decode knows what has arrived."""
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
