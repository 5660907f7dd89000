# SPDX-License-Identifier: Apache-2.0
"""Logging of kvlink: the standard library's logger "kvlink", as key=value or as one JSON object a line.

A message is a short event, then what it is about: `log.info("pulled request=%s bytes=%d", request_id, num_bytes)`.
These formatters take the pairs apart, so that JSON has them by name and type; handlers of other libraries show them as
they are. A line that concerns a request names it: `request=%s`, or in a sentence `request %s`. `extra` works, too.
Libraries never call `setup`, programs do.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_PLACEHOLDER = re.compile(r"(?:(?P<name>[a-z_]+)=|(?P<request>\brequest) )?%[-#0+ .\d]*(?P<kind>[a-zA-Z%])")
_PAIRS_AT_END = re.compile(r"(?:\s+[a-z_]+=%[-#0+.\d]*[a-zA-Z])+$")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if record.exc_info and record.exc_info[1] is not None:
        extra["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    event, named = _taken_apart(record)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
    level, logger = record.levelname.lower(), record.name
    return {"time": stamp, "level": level, "logger": logger, "event": event, **named, **extra}


def _taken_apart(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """The event, without the pairs at its end, and the values that the template names."""
    template, values = str(record.msg), record.args
    found = [match for match in _PLACEHOLDER.finditer(template) if match["kind"] != "%"]
    if not isinstance(values, tuple) or len(found) != len(values):
        return record.getMessage(), {}
    names = [match["name"] or match["request"] for match in found]
    named = {name: _plain(value) for name, value in zip(names, values, strict=True) if name}
    end = _PAIRS_AT_END.search(template)
    if end is None:
        return record.getMessage(), named
    ahead = sum(match.start() < end.start() for match in found)
    return template[: end.start()] % values[:ahead], named


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


class KeyValueFormatter(logging.Formatter):
    """One line a message: time level logger: event key=value …"""

    def format(self, record: logging.LogRecord) -> str:
        """Quotes values with blanks, as JSON does."""
        found = _fields(record)
        event = _printable(found.pop("event"))  # ids in it are foreign text
        head = f"{found.pop('time')} {found.pop('level'):7} {found.pop('logger')}: {event}"
        return " ".join([head, *(f"{key}={_quoted(str(value))}" for key, value in found.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Writes time, level, logger, event and the fields of `extra`."""
        return json.dumps(_fields(record), default=str)


def _quoted(text: str) -> str:
    if text.isprintable():
        return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=' for c in text) else text
    return f'"{_printable(json.dumps(text, ensure_ascii=False)[1:-1])}"'


def _printable(text: str) -> str:
    """Control characters and the like as Python writes them: a terminal must not obey a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def setup(level: str = "warning", as_json: bool = False) -> None:
    """Sends the messages of "kvlink" from `level` up to stderr. Calling it again replaces the choice."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else KeyValueFormatter())
    logger = logging.getLogger("kvlink")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
