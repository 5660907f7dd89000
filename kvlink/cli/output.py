# SPDX-License-Identifier: Apache-2.0
"""Makes standard output safe to print to in any encoding, on a full disk, in a pipe that nobody reads, or closed."""

from __future__ import annotations

import codecs
import io
import os
import sys

from kvlink.errors import KVLinkError

_PLAIN = {
    "µ": "u",
    "×": "x",
    "→": "->",
    "…": "...",
    "─": "-",
    "–": "-",
    "—": "-",
    "’": "'",
    "“": '"',
    "”": '"',
}
_HANDLER = "kvlink.plain"


class OutputLost(KVLinkError):
    """Standard output cannot be written."""


class _Output(io.FileIO):
    """Raises OutputLost for a failed write, so that no handler mistakes it for another OSError."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise OutputLost("the reader of the output closed it before all was written") from None
        except OSError as error:
            raise OutputLost(f"cannot write to standard output: {error.strerror}") from None


def prepare() -> None:
    """Makes stdout safe to print to. A closed stdout, which daemons may have, discards what is printed."""
    for number in range(3):
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    codecs.register_error(_HANDLER, _plain)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors=_HANDLER)
    if sys.stdout is not sys.__stdout__:
        return  # a caller has replaced it
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    raw = _Output(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, _HANDLER, line_buffering=raw.isatty())


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def discard() -> None:
    """Discards what is still in buffers."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each, ascii(each)[1:-1]) for each in lost), error.end
