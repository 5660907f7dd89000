# SPDX-License-Identifier: Apache-2.0
"""Formats the log of kvlink, the standard library's logger "kvlink", as key=value or as one JSON object a line.

A message is a short event followed by its values: `log.info("pulled request=%s bytes=%d", request_id, num_bytes)`.
These formatters separate the pairs from the event, so that JSON has them by name and type. Handlers of other libraries
show the text unchanged. A line that concerns a request names it as `request=%s`, or within a sentence as `request %s`.
The formatters also show values passed as `extra`. Only programs call `setup`, libraries never do.
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
    event, named = _split_event(record)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
    level, logger = record.levelname.lower(), record.name
    return {"time": stamp, "level": level, "logger": logger, "event": event, **named, **extra}


def _split_event(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Returns the event without the pairs at its end, and the values that the template names."""
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
    """Formats each message as one line: time level logger: event key=value …"""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line. Values with blanks are quoted as in JSON. Pairs within the event are not repeated."""
        found = _fields(record)
        event = _printable(found.pop("event"))  # it may contain ids, which are untrusted text
        head = f"{found.pop('time')} {found.pop('level'):7} {found.pop('logger')}: {event}"
        said = [f"{key}={value}" in event for key, value in found.items()]
        pairs = (f"{key}={_quoted(str(value))}" for key, value in found.items())
        return " ".join([head, *(pair for pair, is_said in zip(pairs, said, strict=True) if not is_said)])


class JsonFormatter(logging.Formatter):
    """Formats each message as one line with a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns an object with time, level, logger, event and the fields of `extra`."""
        return json.dumps(_fields(record), default=str)


def _quoted(text: str) -> str:
    if text.isprintable():
        return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=' for c in text) else text
    return f'"{_printable(json.dumps(text, ensure_ascii=False)[1:-1])}"'


def _printable(text: str) -> str:
    """Escapes unprintable characters as Python does, so that a terminal does not execute control sequences in a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def setup(level: str = "warning", as_json: bool = False) -> None:
    """Sends messages of "kvlink" at `level` and above to stderr. A second call replaces the first."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else KeyValueFormatter())
    logger = logging.getLogger("kvlink")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
