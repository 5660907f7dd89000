# SPDX-License-Identifier: Apache-2.0
"""Reads the key that ends a command which shows a screen."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from kvlink.runtime.supervised import guarded


@contextmanager
def q_pressed() -> Iterator[asyncio.Future[None]]:
    """Yields a future that completes once q is pressed; it never completes where stdin is not a terminal.

    Restores the terminal's settings on exit.
    """
    loop = asyncio.get_running_loop()
    pressed: asyncio.Future[None] = loop.create_future()
    if sys.stdin is None or not sys.stdin.isatty():
        yield pressed
        return
    keyboard = sys.stdin.fileno()

    def read() -> None:
        try:
            keys = os.read(keyboard, 64)
        except OSError:  # the terminal is gone
            keys = b""
        if not keys:
            loop.remove_reader(keyboard)
        elif set(keys) & set(b"qQ") and not pressed.done():
            pressed.set_result(None)

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, guarded("keyboard", read))
    try:
        yield pressed
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
