# SPDX-License-Identifier: Apache-2.0
"""Carries asks and answers over ZMQ. What arrives is bounded before it is read, and ends neither thread.

With keys, both ends prove in ZMQ's own handshake (CURVE) that they have one in common, before either takes a message,
and everything is encrypted. The owner's long-term key pair is derived from the secret, and its public half is sent to
nobody: only who has the secret can begin a handshake with it, or answer one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvlink.config.addresses import joined, split_address
from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import AccessDenied, Cancelled, ConfigError, PeerUnreachable
from kvlink.runtime.supervised import start_thread

from .frames import Reply, reply_to
from .messages import MOST_ANSWER_BYTES, MOST_ASK_BYTES

_LOOK_MS = 100
_NOT_PROVEN = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Secrets:
    """The secrets of one end of the channel. Without keys, or if the process believes everybody, there are none."""

    def __init__(self, keys: TicketKeys | None) -> None:
        """Raises ConfigError if ZMQ cannot use them."""
        self._keys = keys
        if self() != [b""] and not zmq.has("curve"):
            raise ConfigError(
                "LMCache's servers prove themselves to each other by ZMQ's CURVE, which this pyzmq does not have; "
                "install a wheel of pyzmq, or set KVLINK_INSECURE=1 if everybody on this network may read all objects"
            )

    def __call__(self) -> list[bytes]:
        """Returns the secrets, the first of which an owner uses, or [b""] for none."""
        return (self._keys.derived(b"kvlink lmcache") if self._keys else []) or [b""]

    def denied(self, url: str) -> AccessDenied:
        """Returns the error of a reader that has no secret in common with an owner."""
        advice = "" if self._keys is None else f", or runs with {self._keys.advice}"
        return AccessDenied(
            f"LMCache's server at {url!a} did not prove that it has the same keys: another program has the address"
            f"{advice}"
        )


def be_owner(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Lets a socket, before it is bound, talk only to those who have the secret."""
    socket.curve_secretkey = z85.encode(secret)
    socket.curve_server = True


def be_reader(socket: zmq.Socket[Any], secret: bytes) -> None:
    """Lets a socket, before it connects, talk only to owners that have the secret."""
    socket.curve_serverkey = zmq.curve_public(z85.encode(secret))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


class Asking:
    """Sends asks to one owner, one after the other, on one thread. Only `stop` may be called on others."""

    def __init__(self, context: zmq.Context[Any], url: str, keys: TicketKeys | None) -> None:
        self._context = context
        self._url = url
        self._secrets = Secrets(keys)
        self._secret = b""
        self._socket: zmq.Socket[Any] | None = None
        self._monitor: zmq.Socket[Any] | None = None
        self._stopped = threading.Event()

    def __call__(self, message: bytes, timeout_s: float) -> bytes:
        """Is an `Exchange`. Raises AccessDenied if the owner has none of this end's secrets."""
        deadline = time.monotonic() + timeout_s
        secrets = self._secrets()
        if self._socket is not None and self._secret in secrets:
            secrets = [self._secret, *(each for each in secrets if each != self._secret)]
        for secret in secrets:
            try:
                frames = self._ask(message, secret, deadline, _LOOK_MS if timeout_s else 0)
            except (zmq.ZMQError, ValueError) as error:
                self.close()
                raise PeerUnreachable(f"LMCache's server at {self._url!a} cannot be asked: {error}") from None
            if frames is not None and len(frames) == 1:
                return bytes(frames[0])
            self.close()  # its late answer is nobody's
            if frames is not None:
                raise self._no_answer(len(frames), timeout_s)
        raise self._secrets.denied(self._url)

    def _ask(self, message: bytes, secret: bytes, deadline: float, look_ms: int) -> list[bytes] | None:
        """Returns the frames of the answer, no frames without an answer in time, or None without a common secret."""
        socket = self._opened(secret)
        socket.send(message, zmq.NOBLOCK)
        waiting = zmq.Poller()
        waiting.register(socket, zmq.POLLIN)
        if self._monitor is not None:
            waiting.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(waiting.poll(look_ms))
            if socket in ready:
                frames: list[bytes] = socket.recv_multipart(zmq.NOBLOCK)
                return frames
            if ready and recv_monitor_message(self._monitor)["event"] & _NOT_PROVEN:
                return None
            if self._stopped.is_set() or time.monotonic() >= deadline:
                return []

    def _no_answer(self, num_frames: int, timeout_s: float) -> PeerUnreachable | Cancelled:
        if self._stopped.is_set():
            return Cancelled(f"the client of {self._url!a} is closed")
        if num_frames:
            return PeerUnreachable(f"LMCache's server at {self._url!a} answered in {num_frames} frames")
        return PeerUnreachable(
            f"LMCache's server at {self._url} did not answer within {timeout_s:.1f} s; check its "
            "--p2p-advertise-url, and that it runs with --p2p-transfer-engine kvlink"
        )

    def _opened(self, secret: bytes) -> zmq.Socket[Any]:
        if self._stopped.is_set():
            raise Cancelled(f"the client of {self._url!a} is closed")
        if self._socket is not None and self._secret != secret:
            self.close()
        if self._socket is None:
            self._socket = self._context.socket(zmq.REQ)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_ANSWER_BYTES)
            self._secret = secret
            if secret:
                be_reader(self._socket, secret)
                self._monitor = self._socket.get_monitor_socket(_NOT_PROVEN)
            self._socket.connect(endpoint(self._url))
        return self._socket

    def stop(self) -> None:
        """Ends a running ask soon, and refuses later ones."""
        self._stopped.set()

    def close(self) -> None:
        """Closes the socket. The next ask opens another one."""
        if self._socket is not None:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close()
                self._monitor = None
            self._socket.close()
            self._socket = None


class Answering:
    """Answers what arrives at an address on a thread of its own. Each sender has its own state, so none stops others.

    idle: is called between messages, and at least every 100 ms. Raises PeerUnreachable if the address is taken.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        url: str,
        keys: TicketKeys | None,
        reply: Reply,
        idle: Callable[[], None],
    ) -> None:
        self._secrets = Secrets(keys)
        self._endpoint = endpoint(url)
        self._reply = reply
        self._idle = idle
        self._closing = threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_ASK_BYTES)
        try:
            self._secret = self._secrets()[0]
            self._bind(self._secret)
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
            if (secret := self._secrets()[0]) != self._secret:
                self._change(secret)
            self._idle()

    def _bind(self, secret: bytes) -> None:
        if secret:
            be_owner(self._socket, secret)
        self._socket.bind(self._endpoint)

    def _change(self, secret: bytes) -> None:
        """Takes connections under another secret from now on. Tried again until the address is free for a moment."""
        with suppress(zmq.ZMQError):  # it is no longer bound since an earlier try
            self._socket.unbind(self._endpoint)
        with suppress(zmq.ZMQError):
            self._bind(secret)
            self._secret = secret

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
