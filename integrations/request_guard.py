# SPDX-License-Identifier: Apache-2.0
"""Keeps one request's failure inside that request: an exception that left an engine's step would end all of them.

The code that catches one calls `RequestGuard.caught`, then reports the request as failed in the engine's own way. Only
`Exception` is caught, and nothing before the start is guarded: a wrong configuration must refuse to start.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections import Counter
from collections.abc import Iterator

from .request_names import printable

_TICKET = re.compile(r"S1ZUM[\w-]{16,}", re.ASCII)
_MAX_SHOWN = 500


class RequestGuard:
    """Counts and logs unexpected exceptions by the kind of work they came from."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._traced: set[tuple[str, type[Exception]]] = set()
        self.counts: Counter[str] = Counter()
        """Exceptions by the kind of work, since the last `take_counts`."""

    def caught(self, kind: str, request_id: object, error: Exception) -> None:
        """Counts an exception of one request. The first of its kind is logged with its trace, later ones in a line."""
        self.counts[kind] += 1
        first = (kind, type(error)) not in self._traced
        self._traced.add((kind, type(error)))
        trace = "".join(traceback.format_tb(error.__traceback__)) if first else ""
        self._log.error(
            "request %s: %s failed, and the others go on: %s%s",
            printable(request_id),
            kind,
            _shown(error),
            f"\n{trace}" if trace else "",
        )

    @contextlib.contextmanager
    def around(self, kind: str, request_id: object = "") -> Iterator[None]:
        """Keeps an exception of the block inside it, where nothing is left to undo or to report."""
        try:
            yield
        except Exception as error:
            self.caught(kind, request_id, error)

    def take_counts(self) -> dict[str, int]:
        """Returns and resets the counts."""
        counts = dict(self.counts)
        self.counts.clear()
        return counts


def _shown(error: Exception) -> str:
    """Describes an error without tickets. It is about what somebody sent, and a ticket is secret."""
    return _TICKET.sub("(a ticket)", f"{type(error).__name__}: {error}")[:_MAX_SHOWN]
