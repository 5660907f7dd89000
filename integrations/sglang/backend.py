# SPDX-License-Identifier: Apache-2.0
"""SGLang's disaggregation backend "kvlink": a request on the prefill server, one on the decode server.

SGLang's own backends push: decode registers its memory, prefill writes into it. Here decode reads:

    decode   send_metadata  "want": the room's pages are allocated, and here is decode's socket
    prefill  send           a lease on the chunk's pages; its ticket goes to the decode ranks; the last chunk brings
                            the metadata (aux) row
    decode   (any time)     a pull of each chunk into its own pages, validated; it settles the lease
    prefill  poll           Success once every lease is settled: only then SGLang frees the pages

So nobody but decode writes into decode's pages, and an abort there has only its own pulls to stop.
Written against SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

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

_log = logging.getLogger("kvlink.sglang")


class _OwnsRoom:
    """What a sender and a receiver do about a room that another live request of this process has: nothing.

    SGLang keeps status, failure and peers under the room alone; all of it is the other one's.
    """

    kv_mgr: KVLinkManager
    bootstrap_room: int
    conclude_state: Any
    _refused: str = ""

    def _claim_room(self) -> None:
        self._refused = self.kv_mgr.live_rooms.claim(self.bootstrap_room, self)
        if self._refused:
            self._owns_bootstrap_room = False
            self.conclude_state = KVPoll.Failed
            _log.warning("refused a request: %s", self._refused)

    def _release_room(self) -> None:
        self.kv_mgr.live_rooms.release(self.bootstrap_room, self)

    def _raise_if_refused(self) -> None:
        if self._refused:
            raise KVTransferError(self.bootstrap_room, self._refused)


class KVLinkSender(_OwnsRoom, CommonKVSender):  # type: ignore[misc]
    """One request on the prefill server. SGLang frees its pages after `clear`, or after `abort`."""

    def __init__(
        self, mgr: KVLinkManager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **options: Any
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **options)
        self._claim_room()

    def poll(self) -> Any:
        """See KVPoll. Never waits."""
        self.kv_mgr.collect()
        return super().poll()

    def clear(self) -> None:
        """Ends what is still offered: the pages may be written."""
        if self._refused:
            return
        self.kv_mgr.outgoing.end(self.bootstrap_room)
        if self.conclude_state == KVPoll.Failed:
            self.kv_mgr.remember_failed(self.bootstrap_room)
        super().clear()
        self._release_room()

    def failure_exception(self) -> None:
        """Raises why it failed."""
        self._raise_if_refused()
        super().failure_exception()

    def abort(self) -> None:
        """Tells decode too, which would wait for its timeout."""
        if self._refused:
            return
        self.kv_mgr.outgoing.end(self.bootstrap_room)
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason="aborted on prefill")
        super().abort()


class KVLinkReceiver(_OwnsRoom, CommonKVReceiver):  # type: ignore[misc]
    """One request on the decode server. SGLang frees its pages after a failed `poll`, after `clear` or `abort`."""

    _aux_index: int | None = None
    """Row of the metadata buffers; None until the pages are allocated."""

    def __init__(
        self, mgr: KVLinkManager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **options: Any
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **options)
        self._claim_room()
        owner = mgr.live_rooms.owner(bootstrap_room)
        if self._refused and getattr(owner, "bootstrap_addr", "") != bootstrap_addr:
            # The owner does not depend on this one's prefill server.
            mgr.addr_to_rooms_tracker[bootstrap_addr].discard(bootstrap_room)

    def _register_kv_args(self) -> bool:
        """Prefill needs no addresses of decode."""
        return self.bootstrap_infos is not None

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Tells prefill that pages are allocated. From now on they may be written."""
        if self._refused:
            return
        if self.bootstrap_infos:
            num_ranks = sum(not info["is_dummy"] for info in self.bootstrap_infos)
            self.kv_mgr.incoming.drop(self.bootstrap_room)  # an earlier owner may have gone without a word
            self.kv_mgr.incoming.expect(self.bootstrap_room, kv_indices, state_indices or (), num_ranks)
            self._aux_index = aux_index
        super().send_metadata(kv_indices, aux_index, state_indices, *args, **options)

    def poll(self) -> Any:
        """See KVPoll. Never waits, but for the piece under way when pulls are ended."""
        if self._refused:
            return KVPoll.Failed
        if self.conclude_state is None and self._aux_index is not None:
            self._advance(self._aux_index)
        status = super().poll()
        if status == KVPoll.Failed:
            self.kv_mgr.incoming.drop(self.bootstrap_room)
        return status

    def clear(self) -> None:
        """Ends the pulls under way."""
        if self._refused:
            return
        self.kv_mgr.incoming.drop(self.bootstrap_room)
        super().clear()
        self._release_room()

    def failure_exception(self) -> None:
        """Raises why it failed."""
        self._raise_if_refused()
        super().failure_exception()

    def abort(self) -> None:
        """Ends the pulls under way and tells prefill."""
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
    """The backend's class for a role."""
    return _CLASSES[class_type]
