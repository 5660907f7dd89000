# SPDX-License-Identifier: Apache-2.0
"""Implements SGLang's disaggregation backend "kvlink": a sender on the prefill server, a receiver on the decode server.

SGLang's own backends push: decode registers its memory, and prefill writes into it. Here decode reads:

- decode, `send_metadata`: sends "want"; the room's pages are allocated, and it gives decode's socket
- prefill, `send`: takes a lease on the chunk's pages and sends its ticket to the decode ranks; the last chunk carries
  the metadata (aux) row
- decode, any time: pulls each chunk into its own pages, validates it, and settles the lease
- prefill, `poll`: returns Success once every lease is settled; only then does SGLang free the pages

So only decode writes into decode's pages, and an abort there has only its own pulls to stop. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

from aiohttp import web
from sglang.srt.disaggregation.base import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.utils import KVClassType

from kvlink.errors import ConfigError, KVLinkError

from .bootstrap import check_registration, checked_rank, problem_of_address
from .manager import KVLinkManager
from .requests import OwnsRoom, guarded
from .restarts import Route, with_route


class KVLinkSender(OwnsRoom, CommonKVSender):  # type: ignore[misc]
    """A request on the prefill server. SGLang frees its pages after `clear` or `abort`."""

    _prefix_tokens = 0
    _waits_since: float | None = None
    """When a request without pages to send began. SGLang never sends one whose prompt is shorter than its prefix."""

    def opened(self) -> None:
        """Admits the decode ranks that asked before."""
        self.kv_mgr.open_room(self.bootstrap_room)

    @guarded(otherwise=0)
    def pop_decode_prefix_len(self) -> int:
        """Returns the number of tokens that decode has cached."""
        self._prefix_tokens = super().pop_decode_prefix_len()
        return self._prefix_tokens

    @guarded()
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Prepares for this number of pages."""
        super().init(num_kv_indices, aux_index)
        if num_kv_indices < 0:
            raise ConfigError(self._too_much_cached())
        if num_kv_indices == 0 and self._prefix_tokens:
            self._waits_since = time.time()

    @guarded()
    def send(self, *args: Any, **options: Any) -> None:
        """Offers a chunk."""
        self._waits_since = None
        super().send(*args, **options)

    @guarded()
    def mark_prefill_complete(self) -> None:
        """Tells decode that the prompt is computed, if decode waits for that."""
        super().mark_prefill_complete()

    @guarded()
    def get_max_transfer_tokens(self) -> int | None:
        """Returns the limit of one chunk."""
        return cast("int | None", super().get_max_transfer_tokens())

    def poll(self) -> Any:
        """Returns a KVPoll. Never waits."""
        self.kv_mgr.collect()
        if not self.owns_room:
            return self.conclude_state
        try:
            since = self._waits_since
            if since is not None and time.time() - since > self.kv_mgr.bootstrap_timeout:
                raise ConfigError(self._too_much_cached())
            if self.conclude_state is None and self.kv_mgr.wants.is_given_up(self.bootstrap_room):
                raise ConfigError("decode aborted the request")
            return super().poll()
        except Exception as error:
            self.fail("poll", error)
            return KVPoll.Failed

    @guarded()
    def clear(self) -> None:
        """Ends the leases that are still active, after which the pages may be written."""
        has_failed = self.conclude_state != KVPoll.Success
        with ExitStack() as last:
            last.callback(self.detach)
            last.callback(super().clear)
            last.callback(self.kv_mgr.close_room, self.bootstrap_room, has_failed)
            self.stop()

    @guarded()
    def abort(self) -> None:
        """Aborts the request and notifies decode, which otherwise waits for its timeout.

        SGLang does not always call `clear` afterwards, so the room is freed here.
        """
        self.reason = "aborted on prefill"
        with ExitStack() as last:
            last.callback(self.kv_mgr.forget, self.bootstrap_room)
            last.callback(self.detach)
            last.callback(super().clear)
            last.callback(super().abort)
            last.callback(self.tell_failure, self.reason)
            self.stop()

    def stop(self) -> None:
        """Ends the leases."""
        self.kv_mgr.outgoing.end(self.bootstrap_room)

    def tell_failure(self, reason: str) -> None:
        """Marks the room as failed and notifies the decode ranks."""
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason=reason)

    def _too_much_cached(self) -> str:
        return f"decode says that it has {self._prefix_tokens} tokens of the prompt, which are more than the prompt has"


class KVLinkReceiver(OwnsRoom, CommonKVReceiver):  # type: ignore[misc]
    """A request on the decode server. SGLang frees its pages after a failed `poll`, after `clear` or `abort`."""

    _aux_index: int | None = None
    """The row of the metadata buffers; None until the pages are allocated."""
    _unresolved_since: float | None = None
    """When the request began, until prefill's data-parallel rank is known. SGLang waits for that for ever."""

    def problem(self) -> str:
        """Returns why the request cannot be served, or ""."""
        return super().problem() or problem_of_address(self.bootstrap_addr)

    @guarded()
    def init(self, prefill_dp_rank: int) -> None:
        """Finds the ranks of the prefill server."""
        self._unresolved_since = None
        super().init(prefill_dp_rank)

    def opened(self) -> None:
        """Starts the time within which the prefill server must be known."""
        self._unresolved_since = time.time()

    def _get_bootstrap_info_from_server(self, *route: Any) -> dict[str, Any] | None:
        answer = super()._get_bootstrap_info_from_server(*route)
        return None if answer is None else with_route(checked_rank(answer), cast(Route, route))

    def _register_kv_args(self) -> bool:
        """Does nothing: prefill needs no addresses of decode."""
        return self.bootstrap_infos is not None

    @guarded()
    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Tells prefill that pages are allocated. From now on kvlink may write them."""
        if (destination := options.get("destination")) is not None and destination != "device":
            raise ConfigError("kvlink does not write into host memory; set no host receive threshold")
        generation = None
        if self.bootstrap_infos and self.conclude_state is None:
            num_ranks = sum(not info["is_dummy"] for info in self.bootstrap_infos)
            generation = self._expect(kv_indices, state_indices or (), num_ranks)
            self._aux_index = aux_index
        super().send_metadata(kv_indices, aux_index, state_indices, *args, **options)
        if self.init_time is not None:  # each prefill rank knows the attempt: an abort can name it
            self._abort_generation = generation

    def _expect(self, pages: Any, states: Sequence[Any], num_ranks: int) -> int:
        incoming, room = self.kv_mgr.incoming, self.bootstrap_room
        incoming.drop(room)  # an earlier owner may have left without a message
        incoming.expect(room, pages, states, num_ranks)
        generation = incoming.generation(room)
        weakref.finalize(self, incoming.abandon, room, generation).atexit = False
        return generation

    def poll(self) -> Any:
        """Returns a KVPoll. Waits only for the current piece when pulls are ended."""
        if not self.owns_room:
            return self.conclude_state
        try:
            if self.conclude_state is None and self._aux_index is not None:
                self._advance(self._aux_index)
            since, limit_s = self._unresolved_since, self.kv_mgr.waiting_timeout
            if since is not None and time.time() - since > limit_s:
                raise ConfigError(
                    f"the prefill server at {self.bootstrap_addr} did not say within {limit_s} s which of its "
                    f"data-parallel ranks has bootstrap_room {self.bootstrap_room}"
                )
            status = super().poll()
        except Exception as error:
            self.fail("poll", error)
            return KVPoll.Failed
        if status == KVPoll.Failed:
            self.stop()
        return status

    @guarded()
    def clear(self) -> None:
        """Ends the active pulls."""
        with ExitStack() as last:
            last.callback(self.detach)
            last.callback(super().clear)
            self.stop()

    @guarded()
    def abort(self) -> None:
        """Ends the active pulls and notifies prefill."""
        self.stop()
        super().abort()

    @guarded()
    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Notifies prefill once."""
        super().ensure_abort_notified(force_arm=force_arm)

    def stop(self) -> None:
        """Ends the pulls. On return nothing writes the pages any more."""
        self.kv_mgr.incoming.drop(self.bootstrap_room)

    def tell_failure(self, reason: str) -> None:
        """Marks the room as failed and notifies the prefill ranks."""
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.ensure_abort_notified()

    def _advance(self, aux_index: int) -> None:
        try:
            rows = self.kv_mgr.incoming.poll(self.bootstrap_room)
            if rows is None:
                return
            self.kv_mgr.aux.write(aux_index, rows)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        except KVLinkError as error:
            self.tell_failure(f"{type(error).__name__}: {error}")
        self.stop()


class KVLinkBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's registry of prefill ranks, which accepts only ranks that can belong to this server."""

    async def _handle_route_put(self, request: web.Request) -> web.StreamResponse:
        sizes = ("attn_tp_size", "attn_cp_size", "pp_size")
        try:
            check_registration(await request.json(), {name: getattr(self, name, None) for name in sizes})
        except (ConfigError, ValueError) as error:
            return web.Response(text=f"kvlink refuses this rank: {error}", status=400)
        return cast(web.StreamResponse, await super()._handle_route_put(request))


_CLASSES = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: KVLinkManager,
    KVClassType.SENDER: KVLinkSender,
    KVClassType.RECEIVER: KVLinkReceiver,
    KVClassType.BOOTSTRAP_SERVER: KVLinkBootstrapServer,
}


def class_of(class_type: Any) -> Any:
    """Returns the backend's class for a role."""
    return _CLASSES[class_type]
