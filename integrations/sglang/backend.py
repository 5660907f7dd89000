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

import logging
from collections.abc import Sequence
from typing import Any, cast

from sglang.srt.disaggregation.base import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import KVClassType

from kvlink.errors import KVLinkError

from .manager import KVLinkManager
from .restarts import Route, with_route

_log = logging.getLogger("kvlink.sglang")


class _OwnsRoom:
    """Makes a sender or a receiver do nothing in a room that another live request of this process owns.

    SGLang stores status, failure and peers by room alone, and all of these belong to the owner.
    """

    kv_mgr: KVLinkManager
    bootstrap_room: int
    conclude_state: Any
    _refused: str = ""

    def __init__(
        self, mgr: KVLinkManager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **options: Any
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **options)  # type: ignore[call-arg]
        self._refused = self.kv_mgr.live_rooms.assign(self.bootstrap_room, self)
        if self._refused:
            self._owns_bootstrap_room = False
            self.conclude_state = KVPoll.Failed
            _log.warning("refused a request: %s", self._refused)

    def _release_room(self) -> None:
        self.kv_mgr.live_rooms.release(self.bootstrap_room, self)

    def failure_exception(self) -> None:
        """Raises the error of the request."""
        if self._refused:
            raise KVTransferError(self.bootstrap_room, self._refused)
        super().failure_exception()  # type: ignore[misc]


class KVLinkSender(_OwnsRoom, CommonKVSender):  # type: ignore[misc]
    """A request on the prefill server. SGLang frees its pages after `clear` or `abort`."""

    def poll(self) -> Any:
        """Returns a KVPoll. Never waits."""
        self.kv_mgr.collect()
        return super().poll()

    def clear(self) -> None:
        """Ends the leases that are still active, after which the pages may be written."""
        if self._refused:
            return
        self.kv_mgr.outgoing.end(self.bootstrap_room)
        if self.conclude_state == KVPoll.Failed:
            self.kv_mgr.remember_failed(self.bootstrap_room)
        super().clear()
        self._release_room()

    def abort(self) -> None:
        """Aborts the request and notifies decode, which otherwise waits for its timeout."""
        if self._refused:
            return
        self.kv_mgr.outgoing.end(self.bootstrap_room)
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason="aborted on prefill")
        super().abort()


class KVLinkReceiver(_OwnsRoom, CommonKVReceiver):  # type: ignore[misc]
    """A request on the decode server. SGLang frees its pages after a failed `poll`, after `clear` or `abort`."""

    _aux_index: int | None = None
    """The row of the metadata buffers; None until the pages are allocated."""

    def __init__(
        self, mgr: KVLinkManager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **options: Any
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **options)
        owner = mgr.live_rooms.owner(bootstrap_room)
        if self._refused and getattr(owner, "bootstrap_addr", "") != bootstrap_addr:
            # A failure of this prefill server does not concern the room's owner.
            mgr.addr_to_rooms_tracker[bootstrap_addr].discard(bootstrap_room)

    def _get_bootstrap_info_from_server(self, *route: Any) -> dict[str, Any] | None:
        return with_route(super()._get_bootstrap_info_from_server(*route), cast(Route, route))

    def _register_kv_args(self) -> bool:
        """Does nothing: prefill needs no addresses of decode."""
        return self.bootstrap_infos is not None

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Tells prefill that pages are allocated. From now on kvlink may write them."""
        if self._refused:
            return
        if self.bootstrap_infos:
            num_ranks = sum(not info["is_dummy"] for info in self.bootstrap_infos)
            self.kv_mgr.incoming.drop(self.bootstrap_room)  # an earlier owner may have left without a message
            self.kv_mgr.incoming.expect(self.bootstrap_room, kv_indices, state_indices or (), num_ranks)
            self._aux_index = aux_index
        super().send_metadata(kv_indices, aux_index, state_indices, *args, **options)

    def poll(self) -> Any:
        """Returns a KVPoll. Waits only for the current piece when pulls are ended."""
        if self._refused:
            return KVPoll.Failed
        if self.conclude_state is None and self._aux_index is not None:
            self._advance(self._aux_index)
        status = super().poll()
        if status == KVPoll.Failed:
            self.kv_mgr.incoming.drop(self.bootstrap_room)
        return status

    def clear(self) -> None:
        """Ends the active pulls."""
        if self._refused:
            return
        self.kv_mgr.incoming.drop(self.bootstrap_room)
        super().clear()
        self._release_room()

    def abort(self) -> None:
        """Ends the active pulls and notifies prefill."""
        if self._refused:
            return
        self.kv_mgr.incoming.drop(self.bootstrap_room)
        super().abort()

    def _advance(self, aux_index: int) -> None:
        try:
            rows = self.kv_mgr.incoming.poll(self.bootstrap_room)
            if rows is None:
                return
            self.kv_mgr.aux.write(aux_index, rows)
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        except KVLinkError as error:
            self.kv_mgr.record_failure(self.bootstrap_room, f"{type(error).__name__}: {error}")
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.ensure_abort_notified()
        self.kv_mgr.incoming.drop(self.bootstrap_room)


_CLASSES = {
    KVClassType.KVARGS: KVArgs,
    KVClassType.MANAGER: KVLinkManager,
    KVClassType.SENDER: KVLinkSender,
    KVClassType.RECEIVER: KVLinkReceiver,
    KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
}


def class_of(class_type: Any) -> Any:
    """Returns the backend's class for a role."""
    return _CLASSES[class_type]
