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

from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.base import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.utils import KVClassType

from kvlink.errors import KVLinkError

from .manager import KVLinkManager


class KVLinkSender(CommonKVSender):  # type: ignore[misc]
    """One request on the prefill server. SGLang frees its pages after `clear`, or after `abort`."""

    def poll(self) -> Any:
        """See KVPoll. Never waits."""
        self.kv_mgr.collect()
        return super().poll()

    def clear(self) -> None:
        """Ends what is still offered: the pages may be written."""
        self.kv_mgr.outgoing.end(self.bootstrap_room)
        if self.conclude_state == KVPoll.Failed:
            self.kv_mgr.remember_failed(self.bootstrap_room)
        super().clear()

    def abort(self) -> None:
        """Tells decode too, which would wait for its timeout."""
        self.kv_mgr.outgoing.end(self.bootstrap_room)
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason="aborted on prefill")
        super().abort()


class KVLinkReceiver(CommonKVReceiver):  # type: ignore[misc]
    """One request on the decode server. SGLang frees its pages after a failed `poll`, after `clear` or `abort`."""

    _aux_index: int | None = None
    """Row of the metadata buffers; None until the pages are allocated."""

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
        if self.bootstrap_infos:
            num_ranks = sum(not info["is_dummy"] for info in self.bootstrap_infos)
            self.kv_mgr.incoming.expect(self.bootstrap_room, kv_indices, state_indices or (), num_ranks)
            self._aux_index = aux_index
        super().send_metadata(kv_indices, aux_index, state_indices, *args, **options)

    def poll(self) -> Any:
        """See KVPoll. Never waits, but for the piece under way when pulls are ended."""
        if self.conclude_state is None and self._aux_index is not None:
            self._advance(self._aux_index)
        status = super().poll()
        if status == KVPoll.Failed:
            self.kv_mgr.incoming.drop(self.bootstrap_room)
        return status

    def clear(self) -> None:
        """Ends the pulls under way."""
        self.kv_mgr.incoming.drop(self.bootstrap_room)
        super().clear()

    def abort(self) -> None:
        """Ends the pulls under way and tells prefill."""
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
