# SPDX-License-Identifier: Apache-2.0
"""Receives the messages of peers on a ZMQ socket of SGLang, each bounded before it is copied."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from kvlink.runtime.supervised import guarded

from .messages import MAX_FRAMES

_log = logging.getLogger("kvlink.sglang")

_POLL_MS = 500
_MAX_MESSAGE_BYTES = 256 << 20
_CLOSED = (errno.ENOTSOCK, 156384765)  # 156384765 is ETERM of libzmq: the context was terminated
NAME = "sglang-listener"


class BoundedSocket:
    """A ZMQ socket as SGLang's receiving function uses it, which drops messages that are too long."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def recv_multipart(self) -> list[bytes]:
        """Returns the frames of the next message, none of one that is too long."""
        frames: list[bytes] = []
        num_frames, num_bytes, more = 0, 0, True
        while more:
            frame = self._socket.recv(copy=False)
            num_frames, num_bytes, more = num_frames + 1, num_bytes + len(frame), frame.more
            if num_frames <= MAX_FRAMES and num_bytes <= _MAX_MESSAGE_BYTES:
                frames.append(frame.bytes)
        if len(frames) == num_frames:
            return frames
        _log.warning("dropped a message of %d frames and %d bytes", num_frames, num_bytes)
        return []


class Listener:
    """Calls the handler of each message, and `each_round` between messages and at least twice a second.

    receive: returns the frames of a message, or None if SGLang handled it.
    """

    def __init__(
        self,
        socket: Any,
        receive: Callable[[], list[bytes] | None],
        handlers: Mapping[bytes, Callable[[list[bytes]], None]],
        each_round: Callable[[], None],
    ) -> None:
        self._socket, self._receive = socket, receive
        self._handlers = {tag: guarded(NAME, handler) for tag, handler in handlers.items()}
        self._look_around = guarded(NAME, each_round)

    def run(self) -> None:
        """Handles messages until the socket is closed. Raises ZMQError: the supervisor runs it again."""
        while self.step():
            pass
        _log.info("stops listening: the socket is closed")

    def step(self) -> bool:
        """Handles at most one message. Returns whether there may be more."""
        try:
            frames = self._receive() if self._socket.poll(_POLL_MS) else None
        except zmq.ZMQError as error:
            if self._socket.closed or error.errno in _CLOSED:
                return False
            raise
        self._dispatch(frames or [])
        self._look_around()
        return True

    def _dispatch(self, frames: list[bytes]) -> None:
        handler = self._handlers.get(frames[0]) if frames else None
        if handler is not None:
            handler(frames)
