# SPDX-License-Identifier: Apache-2.0
"""What the HTTP server logs of requests: a line for a malformed one, a traceback for a fault of ours, few of either."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

from kvlink.control.denials import LogQuota

_MAX_SHOWN = 200
"""Characters of what a client can choose."""


class _Bounded(logging.Filter):
    def __init__(self, quota: LogQuota) -> None:
        super().__init__()
        self._quota = quota

    def filter(self, record: logging.LogRecord) -> bool:
        """Leaves records out beyond the quota, and the traceback where the client is to blame."""
        unsaid = self._quota.take()
        if unsaid is None:
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
            record.exc_info = record.exc_text = None
            why = " ".join(error.message.split())[:_MAX_SHOWN]
            record.msg = "bad request status=%d why=%s unsaid=%d"
            record.args = (error.code, why, unsaid)
        return True


def request_log(quota: LogQuota | None = None) -> logging.Logger:
    """For an aiohttp server. Its lines go where those of kvlink go, in their form."""
    logger = logging.getLogger("kvlink.http")
    logger.filters[:] = [_Bounded(quota or LogQuota())]
    return logger
