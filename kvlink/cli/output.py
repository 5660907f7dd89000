# SPDX-License-Identifier: Apache-2.0
"""Standard output as commands find it: in any encoding, on a full disk, in a pipe that nobody reads, or closed."""

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
    """What was printed did not get out."""


class _Output(io.FileIO):
    """Says by an exception of kvlink's what went wrong, so that nobody on the way takes it for something else."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise OutputLost("the output was closed before its end") from None
        except OSError as error:
            raise OutputLost(f"cannot write the output: {error.strerror}") from None


def prepare() -> None:
    """Makes stdout safe to print to. Where it is closed, as a daemon's may be, what is printed goes nowhere."""
    for number in range(3):
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    codecs.register_error(_HANDLER, _plain)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors=_HANDLER)
    if sys.stdout is not sys.__stdout__:
        return  # a caller's own
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    raw = _Output(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, _HANDLER, line_buffering=raw.isatty())


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def give_up() -> None:
    """What is still in buffers goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each, ascii(each)[1:-1]) for each in lost), error.end
