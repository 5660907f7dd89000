# SPDX-License-Identifier: Apache-2.0
"""Logging of kvlink: the standard library's logger "kvlink", as key=value or as one JSON object a line.

A message is a short event; what it is about goes into `extra`, for example
`log.info("pulled", extra={"request_id": "r1", "bytes": 4096})`. Libraries never call `setup`, programs do.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if record.exc_info and record.exc_info[1] is not None:
        extra["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
    level, logger = record.levelname.lower(), record.name
    return {"time": stamp, "level": level, "logger": logger, "event": record.getMessage(), **extra}


class KeyValueFormatter(logging.Formatter):
    """One line a message: time level logger: event key=value …"""

    def format(self, record: logging.LogRecord) -> str:
        """Quotes values with blanks, as JSON does."""
        found = _fields(record)
        event = found.pop("event").replace("\r", "\\r").replace("\n", "\\n")  # ids in it are foreign text
        head = f"{found.pop('time')} {found.pop('level'):7} {found.pop('logger')}: {event}"
        return " ".join([head, *(f"{key}={_quoted(str(value))}" for key, value in found.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Writes time, level, logger, event and the fields of `extra`."""
        return json.dumps(_fields(record), default=str)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=\n\r\t' for c in text) else text


def setup(level: str = "warning", as_json: bool = False) -> None:
    """Sends the messages of "kvlink" from `level` up to stderr. Calling it again replaces the choice."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else KeyValueFormatter())
    logger = logging.getLogger("kvlink")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
