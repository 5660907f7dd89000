# SPDX-License-Identifier: Apache-2.0
"""Carries asks and answers over ZMQ. What arrives is bounded before it is read, and ends neither thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from kvlink.addresses import joined, split_address
from kvlink.errors import Cancelled, ConfigError, PeerUnreachable
from kvlink.runtime.supervised import start_thread

from .frames import Reply, reply_to
from .messages import MOST_ANSWER_BYTES, MOST_ASK_BYTES

_LOOK_MS = 100


class Asking:
    """Sends asks to one owner, one after the other, on one thread. Only `stop` may be called on others."""

    def __init__(self, context: zmq.Context[Any], url: str) -> None:
        self._context = context
        self._url = url
        self._socket: zmq.Socket[Any] | None = None
        self._stopped = threading.Event()

    def __call__(self, message: bytes, timeout_s: float) -> bytes:
        """Is an `Exchange`."""
        deadline = time.monotonic() + timeout_s
        try:
            socket = self._opened()
            socket.send(message, zmq.NOBLOCK)
            while not (ready := socket.poll(_LOOK_MS if timeout_s else 0)):
                if self._stopped.is_set() or time.monotonic() >= deadline:
                    break
            frames = socket.recv_multipart(zmq.NOBLOCK) if ready else []
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise PeerUnreachable(f"LMCache's server at {self._url!a} cannot be asked: {error}") from None
        if len(frames) == 1:
            return bytes(frames[0])
        self.close()  # its late answer is nobody's
        if self._stopped.is_set():
            raise Cancelled(f"the client of {self._url!a} is closed")
        if frames:
            raise PeerUnreachable(f"LMCache's server at {self._url!a} answered in {len(frames)} frames")
        raise PeerUnreachable(
            f"LMCache's server at {self._url} did not answer within {timeout_s:.1f} s; check its "
            "--p2p-advertise-url, and that it runs with --p2p-transfer-engine kvlink"
        )

    def _opened(self) -> zmq.Socket[Any]:
        if self._stopped.is_set():
            raise Cancelled(f"the client of {self._url!a} is closed")
        if self._socket is None:
            self._socket = self._context.socket(zmq.REQ)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_ANSWER_BYTES)
            self._socket.connect(endpoint(self._url))
        return self._socket

    def stop(self) -> None:
        """Ends a running ask soon, and refuses later ones."""
        self._stopped.set()

    def close(self) -> None:
        """Closes the socket. The next ask opens another one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Answering:
    """Answers what arrives at an address on a thread of its own. Each sender has its own state, so none stops others.

    idle: is called between messages, and at least every 100 ms. Raises PeerUnreachable if the address is taken.
    """

    def __init__(self, context: zmq.Context[Any], url: str, reply: Reply, idle: Callable[[], None]) -> None:
        self._reply = reply
        self._idle = idle
        self._closing = threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_ASK_BYTES)
        try:
            self._socket.bind(endpoint(url))
        except zmq.ZMQError as error:
            self._socket.close()
            raise PeerUnreachable(f"cannot listen at {url} (--p2p-listen-url): {error}") from None
        self.thread = start_thread("lmcache-answer", self._serve, self._closing)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(_LOOK_MS):
                answer = reply_to(self._socket.recv_multipart(), self._reply)
                if answer is not None:
                    self._send(answer)
            self._idle()

    def _send(self, answer: list[bytes]) -> None:
        """Sends an answer, or drops it if the sender does not take it."""
        try:
            self._socket.send_multipart(answer, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._reply.refuse(PeerUnreachable(f"an answer was not taken: {error}"))

    def close(self) -> None:
        """Stops answering. Idempotent."""
        self._closing.set()
        self.thread.join()
        self._socket.close()


def endpoint(url: str) -> str:
    """Returns the ZMQ endpoint of LMCache's "host:port". Raises ConfigError."""
    if not url.isascii():
        raise ConfigError(f"{url!a:.200} is no host:port")
    return "tcp://" + joined(*split_address(plain(url)))


def plain(url: str) -> str:
    """Returns "host:port" of an address with or without a scheme."""
    return url.split("://", 1)[-1]
