# SPDX-License-Identifier: Apache-2.0
"""Derives kvlink's name of a request from the engine's id, which may be any text that a client sent.

Owner and reader derive the same name, so offers, claims, handoffs and releases agree. The engine's own tables keep the
engine's id.
"""

from __future__ import annotations

import hashlib

from kvlink.errors import ConfigError
from kvlink.runtime.names import MAX_NAME_BYTES
from kvlink.ticket import check_request_id

_DERIVED = "kvlink-id-"
_DIGEST_BYTES = 16
_SHOWN = 80


def name_of(request_id: object, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Returns the id itself if it can be a kvlink request id of `max_bytes`, else a digest of it. Raises nothing.

    An id is replaced if it is empty, longer than allowed, not printable, no valid UTF-8, contains a ticket, or looks
    like a derived name, so that no client can choose the name of another's request. Give `max_bytes` if more text
    follows the name in a request id.
    """
    text = request_id if isinstance(request_id, str) else repr(request_id)
    try:
        check_request_id(text)
    except ConfigError:
        return _derived(text)
    is_kept = text.isprintable() and not text.startswith(_DERIVED) and len(text.encode()) <= max_bytes
    return text if is_kept else _derived(text)


def printable(request_id: object) -> str:
    """Returns the derived name, shortened for a log line. It never shows a ticket."""
    name = name_of(request_id)
    return name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"


def _derived(text: str) -> str:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
    return _DERIVED + digest.hexdigest()
