# SPDX-License-Identifier: Apache-2.0
"""Limits what the HTTP server logs: a line for a malformed request, and a traceback for an error of the server."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

from kvlink.control.denials import LogQuota

_MAX_SHOWN = 200
"""Bounds the characters of a text that a client chooses."""


class _Bounded(logging.Filter):
    def __init__(self, quota: LogQuota) -> None:
        super().__init__()
        self._quota = quota

    def filter(self, record: logging.LogRecord) -> bool:
        """Drops records beyond the quota, and the traceback of a malformed request."""
        suppressed = self._quota.take()
        if suppressed is None:
            return False
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
            record.exc_info = record.exc_text = None
            why = " ".join(error.message.split())[:_MAX_SHOWN]
            record.msg = "bad request status=%d why=%s suppressed=%d"
            record.args = (error.code, why, suppressed)
        return True


def request_log(quota: LogQuota | None = None) -> logging.Logger:
    """Returns the logger for an aiohttp server. Its lines have the form and destination of kvlink's log."""
    logger = logging.getLogger("kvlink.http")
    logger.filters[:] = [_Bounded(quota or LogQuota())]
    return logger
