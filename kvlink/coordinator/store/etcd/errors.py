# SPDX-License-Identifier: Apache-2.0
"""Converts failures of etcd to refusals for the callers of the coordinator."""

from __future__ import annotations

from kvlink.control.refusal import Reason, Refused, refusal_of
from kvlink.errors import CoordinatorError, CoordinatorUnavailable


class StoreFull(CoordinatorError):
    """etcd has reached its quota (NOSPACE). It refuses writes, but reads, deletions and renewals continue."""


def as_refusal(error: BaseException) -> Refused:
    """Returns the refusal that a failed call of the store raises."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, CoordinatorUnavailable):
        return Refused(
            Reason.NOT_READY,
            f"the coordinator does not reach its store: {error}. Connected workers continue without it; retry",
        )
    if isinstance(error, StoreFull):
        return Refused(
            Reason.TOO_MANY,
            f"the coordinator's store is full: {error}. Compact it, defragment it and disarm its alarm as the "
            "operator's guide describes, then retry",
        )
    if isinstance(error, CoordinatorError):
        return Refused(Reason.FAILED, f"the coordinator's store refused the call: {error}")
    return refusal_of(error)
