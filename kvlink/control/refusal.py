# SPDX-License-Identifier: Apache-2.0
"""Maps the reason for a refused call to a gRPC status, and back to the exception that the caller sees."""

from __future__ import annotations

from enum import Enum

from kvlink.errors import (
    AccessDenied,
    ConfigError,
    CoordinatorError,
    CoordinatorUnavailable,
    KVLinkError,
    LeaseExpired,
    TransportUnavailable,
    UnknownRequest,
)

REASON_TRAILER = "kvlink-reason"
"""Metadata key of a refused call. The value is the name of a Reason."""


class NotJoined(CoordinatorError):
    """The coordinator does not know the caller, for instance because it restarted. `Session` rejoins."""

    retryable = True


class Replaced(CoordinatorError):
    """Another process has joined under the caller's worker_id."""


class WorkerIdTaken(CoordinatorError):
    """Another process has joined under the worker_id and its agent answers. The id is free once that process ends."""

    retryable = True


class Overloaded(CoordinatorError):
    """A limit of the coordinator is reached."""

    retryable = True


class Reason(Enum):
    """Says why a call was refused. The member's name is sent with the gRPC status that `status` names."""

    MALFORMED = ("INVALID_ARGUMENT", ConfigError)
    TOO_MANY = ("RESOURCE_EXHAUSTED", Overloaded)
    UNKNOWN = ("NOT_FOUND", UnknownRequest)
    EXPIRED = ("NOT_FOUND", LeaseExpired)
    RESTARTED = ("FAILED_PRECONDITION", UnknownRequest)
    """The worker runs under another epoch than the caller named."""
    NOT_JOINED = ("FAILED_PRECONDITION", NotJoined)
    REPLACED = ("ABORTED", Replaced)
    TAKEN = ("ALREADY_EXISTS", WorkerIdTaken)
    NO_TRANSPORT = ("UNIMPLEMENTED", TransportUnavailable)
    DENIED = ("PERMISSION_DENIED", AccessDenied)
    NOT_READY = ("UNAVAILABLE", CoordinatorUnavailable)
    """The server is starting or ending. The caller retries a little later."""
    FAILED = ("INTERNAL", CoordinatorError)

    def __init__(self, status: str, error: type[KVLinkError]) -> None:
        self.status = status
        self.error = error


class RefusedError(Exception):
    """Refuses a call. Handlers raise it, the server sends it, and the client turns it into `reason.error`."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


def refusal_of(error: BaseException) -> RefusedError:
    """Returns the refusal that a failed handler answers with. Unexpected errors become FAILED."""
    if isinstance(error, RefusedError):
        return error
    for reason in (Reason.MALFORMED, Reason.UNKNOWN, Reason.EXPIRED, Reason.NO_TRANSPORT, Reason.DENIED):
        if isinstance(error, reason.error):
            return RefusedError(reason, str(error))
    return RefusedError(Reason.FAILED, f"{type(error).__name__}: {error}")


def forget_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an error and of those behind it.

    Their frames hold the message of the call. A future that a frame holds, and that holds the error, would keep it.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        forget_frames(error.__cause__)
        error = error.__context__


def error_of(reason: str, sentence: str) -> KVLinkError:
    """Returns the exception for a refusal that came over the wire."""
    known = Reason.__members__.get(reason)
    return known.error(sentence) if known else CoordinatorError(f"{sentence} ({reason})")


def named(name: str) -> str:
    """Quotes and shortens a name that a peer chose, for use in an error text."""
    return repr(name if len(name) <= 80 else f"{name[:77]}...")
