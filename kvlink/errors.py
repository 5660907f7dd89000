# SPDX-License-Identifier: Apache-2.0
"""Everything kvlink raises. `retryable` says whether the same call may succeed later without any change."""

from __future__ import annotations

from enum import Enum


class KVLinkError(Exception):
    """Base of all errors of kvlink. The message says what failed, where, and what to do next."""

    retryable: bool = False


class ConfigError(KVLinkError):
    """An argument or option is wrong; nothing was started."""


class LayoutMismatch(KVLinkError):
    """The two ends describe their blocks differently; the message names the field."""


class TransportUnavailable(KVLinkError):
    """No allowed transport reaches the peer, or a named one cannot work here."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason}. {fix}" if fix else reason)
        self.reason = reason
        self.fix = fix


class CoordinatorError(KVLinkError):
    """The coordinator refused a request."""


class CoordinatorUnavailable(CoordinatorError):
    """The coordinator (or a worker's agent) does not answer."""

    retryable = True

    def __init__(self, message: str, telling: int = 0) -> None:
        super().__init__(message)
        self.telling = telling
        """Of several attempts the most telling is raised: 1 is the far end's own word, -1 that time ran out."""


class UnknownRequest(CoordinatorError):
    """Nobody offered this request, it was claimed already, or its worker has restarted."""


class LeaseExpired(CoordinatorError):
    """The offer ran out before it was claimed or settled."""


class TransferError(KVLinkError):
    """A pull did not bring valid bytes. The destination blocks must not be used."""


class PeerUnreachable(TransferError):
    """The owner died, restarted, or its connection broke."""

    retryable = True

    def __init__(self, message: str, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """Nobody refused and nobody answered in time: the owner, or this process, may only be slow."""


class AccessDenied(TransferError):
    """The owner or the kernel refused a read: wrong key, out of bounds, or missing right."""


class TransferTimeout(TransferError):
    """The deadline passed. No late byte lands in the destination."""

    retryable = True


class Cancelled(TransferError):
    """The caller cancelled the pull, or its process is ending. No late byte lands in the destination."""


class StaleReason(Enum):
    """Why blocks are stale. The numbers are those of csrc/base/status.h."""

    UNKNOWN = 0
    SETTLED = 1
    """Another reader of the seat settled it."""
    EXPIRED = 2
    """The time to live ran out."""
    ABORTED = 3
    """The owner took the offer back."""
    EVICTED = 4
    """The owner gave the blocks new content."""
    REUSED = 5
    """The lease ended, and a new lease has its slot."""
    NEVER_GRANTED = 6
    """The owner has not granted this lease yet."""
    RESTARTED = 7
    """The worker restarted since the ticket was made."""


class StaleBlocks(TransferError):
    """The lease ended before the read did; the bytes were dropped. Recompute the request. `why` says how it ended."""

    def __init__(self, message: str, why: StaleReason = StaleReason.UNKNOWN) -> None:
        super().__init__(message)
        self.why = why
