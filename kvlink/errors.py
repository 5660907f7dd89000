# SPDX-License-Identifier: Apache-2.0
"""Defines every exception of kvlink. `retryable` says whether the same call may succeed later without any change."""

from __future__ import annotations

from enum import Enum


class KVLinkError(Exception):
    """Base of all errors of kvlink. The message says what failed, where, and what to do next."""

    retryable: bool = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        (public, *_) = (each for each in type(self).__mro__ if each.__module__ == __name__)
        # Python 3.11 and later print these below the message of a traceback.
        self.__notes__ = [f"Cause and fix: docs/reference/errors.md#{public.__name__.lower()}"]


class ConfigError(KVLinkError):
    """An argument or option is wrong. Nothing was started."""


class LayoutMismatch(KVLinkError):
    """The two ends describe their blocks differently. The message names the field."""


class TransportUnavailable(KVLinkError):
    """No allowed transport reaches the peer, or a selected transport cannot work on this machine."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason}. {fix}" if fix else reason)
        self.reason = reason
        self.fix = fix


class CoordinatorError(KVLinkError):
    """The coordinator refused a request."""


class CoordinatorUnavailable(CoordinatorError):
    """The coordinator or a worker's agent does not answer."""

    retryable = True

    def __init__(self, message: str, telling: int = 0) -> None:
        super().__init__(message)
        self.telling = telling
        """Ranks the errors of several attempts, of which the highest is raised: 1 for an answer of the remote end, -1
        for a timeout."""


class UnknownRequest(CoordinatorError):
    """No worker offers this request, it was claimed already, or its worker has restarted."""


class LeaseExpired(CoordinatorError):
    """The offer expired before it was claimed or settled."""


class TransferError(KVLinkError):
    """A pull did not deliver valid bytes. The destination blocks must not be used."""


class PeerUnreachable(TransferError):
    """The owner died or restarted, or its connection broke."""

    retryable = True

    def __init__(self, message: str, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """Whether there was neither a refusal nor an answer in time. The owner or this process may only be slow."""


class AccessDenied(TransferError):
    """The owner or the kernel refused a read because of a wrong key, a range out of bounds, or a missing permission."""


class TransferTimeout(TransferError):
    """The deadline passed. No late byte arrives in the destination."""

    retryable = True


class Cancelled(TransferError):
    """The caller cancelled the pull, or its process is exiting. No late byte arrives in the destination."""


class StaleReason(Enum):
    """Says why blocks are stale. The numbers are those of csrc/base/status.h."""

    UNKNOWN = 0
    SETTLED = 1
    """Another reader of the seat settled it."""
    EXPIRED = 2
    """The time to live of the lease expired."""
    ABORTED = 3
    """The owner aborted the offer."""
    EVICTED = 4
    """The owner wrote new content to the blocks."""
    REUSED = 5
    """The lease ended, and a new lease has its slot."""
    NEVER_GRANTED = 6
    """The owner has not granted this lease yet."""
    RESTARTED = 7
    """The worker has restarted since it created the ticket."""


class StaleBlocks(TransferError):
    """The lease ended before the read did, and the bytes were discarded. Recompute the request.

    `why` says how the lease ended.
    """

    def __init__(self, message: str, why: StaleReason = StaleReason.UNKNOWN) -> None:
        super().__init__(message)
        self.why = why
