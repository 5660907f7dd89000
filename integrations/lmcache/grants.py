# SPDX-License-Identifier: Apache-2.0
"""Implements the owner's side: it offers the pages that a reader asks for, each read under a lease of its own."""

from __future__ import annotations

import itertools
import logging

from kvlink import LeaseEnd, Worker
from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import KVLinkError, LayoutMismatch

from .messages import Ask, refusal
from .pages import Pages

_log = logging.getLogger("kvlink.lmcache")


class Grants:
    """Answers the readers of one server. Only one thread uses it."""

    def __init__(self, worker: Worker, pages: Pages, keys: TicketKeys | None) -> None:
        self._worker = worker
        self._pages = pages
        self._keys = keys
        self._numbers = itertools.count(1)

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to a reader's message, which may be malformed."""
        self._report_ended()
        try:
            return self._answer(Ask.from_bytes(message, self._keys))
        except KVLinkError as error:
            _log.warning("refused a reader: %s", error)
            return refusal(error)

    def _answer(self, ask: Ask) -> bytes:
        if ask.page_bytes != self._pages.page_bytes:
            raise LayoutMismatch(
                f"pages have {ask.page_bytes} bytes at {ask.reader} and {self._pages.page_bytes} here; start LMCache's "
                "servers with the same --l1-align-bytes"
            )
        if not ask.objects:
            return b""
        name = f"{ask.reader}/{next(self._numbers)}"
        return self._worker.offer(name, self._pages.ids(ask.objects)).to_bytes()

    def _report_ended(self) -> None:
        for event in self._worker.events():
            if event.how is not LeaseEnd.SETTLED:
                _log.warning(
                    "read %s: the lease %s after %.1f s", event.request_id, event.how.value, event.held_s
                )
