# SPDX-License-Identifier: Apache-2.0
"""Authenticates both ends of a call without certificates: processes of this host that can read the same token.

Neither end sends the token, because any user may listen on a free loopback port. A caller sends an HMAC of the port and
the time under the token. It is valid for that port, for minutes, and only at a server that listened before: what
another user received at the port of a restarting server cannot be shown to that server. The server answers each
call with an HMAC of the caller's nonce, and callers believe nothing without it. A tool without kvlink may send the
token itself as a bearer token.
"""

from __future__ import annotations

import functools
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvlink.control.security import own_file
from kvlink.control.security.tokens import TokenFile, bearer, token_file
from kvlink.errors import ConfigError

_log = logging.getLogger("kvlink.control")

HEADER = "kvlink-proof"
NONCE = "kvlink-nonce"
ANSWER = "kvlink-answer"
"""The header of a server's own proof, in the initial metadata of its answer."""
_GOOD_FOR_S = 300
"""This is longer than any call waits before it is checked."""
_LOOK_EVERY_S = 1.0
_MAX_PROOF = 128
_NONCE_BYTES = 16
_STAMPS_PER_S = 1_000_000
HOW = (
    "run both as one user, or set KVLINK_TOKEN_FILE of both to one file that only their users can read, or set "
    "KVLINK_TLS_CA, KVLINK_TLS_CERT and KVLINK_TLS_KEY (`kvlink certs` makes them for development)"
)

Clock = Callable[[], float]
"""Returns seconds, the same for all processes of the host."""


class HostTokens(Protocol):
    """Provides the tokens of one process. All methods are safe from any thread."""

    def prepare(self) -> None:
        """Makes sure that there is a token, before a server listens. Raises ConfigError."""

    def shown(self) -> str:
        """Returns the token that a client proves to know, or "" if it has none."""

    def known(self, again: bool) -> Sequence[str]:
        """Returns the tokens that a server accepts. With `again`, it first looks for new ones."""

    def describe_admitted(self) -> str:
        """Describes the callers that a server admits."""


class SharedToken:
    """Provides the token in the file KVLINK_TOKEN_FILE. Every user who can read the file is admitted."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read, or if every user can write it."""
        try:
            mode = own_file.mode_of(path, "KVLINK_TOKEN_FILE")
        except OSError as error:
            raise ConfigError(
                f"cannot read the token in {path} (KVLINK_TOKEN_FILE): {error.strerror}"
            ) from None
        self._file: TokenFile = token_file(path)
        if mode & stat.S_IROTH:
            _log.warning(
                "every user of this host can read the token (KVLINK_TOKEN_FILE), run chmod o= on it file=%s",
                path,
            )

    def prepare(self) -> None:  # noqa: D102
        pass

    def shown(self) -> str:  # noqa: D102
        return self._file.current()

    def known(self, again: bool) -> Sequence[str]:  # noqa: D102
        return (self._file.current(),)

    def describe_admitted(self) -> str:  # noqa: D102
        return f"processes that show the token in {self._file.path} (KVLINK_TOKEN_FILE)"


class OwnToken:
    """Provides the token in the user's own file. A server creates the file, and recreates it if it was removed."""

    def __init__(self, places: Sequence[Path], uid: int, clock: Clock = time.monotonic) -> None:
        self._places = places
        self._uid = uid
        self._clock = clock
        self._look_at = clock()
        self._file: Path | None = None
        self._shown = ""
        self._known: dict[str, None] = {}

    def prepare(self) -> None:  # noqa: D102
        self._look()
        if self._file is None:
            self._make()

    def shown(self) -> str:  # noqa: D102
        if self._clock() >= self._look_at:
            self._look()
        return self._shown

    def known(self, again: bool) -> Sequence[str]:  # noqa: D102
        if again and self._clock() >= self._look_at:
            self._look()
            if self._file is None:
                try:
                    self._make()
                except ConfigError as error:
                    _log.warning("cannot recreate the token file of this user error=%s", error)
        return tuple(self._known)

    def describe_admitted(self) -> str:  # noqa: D102
        where = (
            f"the token in {self._file}" if self._file else "a token that no server of the user has made yet"
        )
        return f"processes of user {self._uid} that show {where}"

    def _look(self) -> None:
        self._look_at = self._clock() + _LOOK_EVERY_S
        found = own_file.tokens(self._places, self._uid)
        self._known |= dict.fromkeys(found.values())
        self._file, self._shown = next(iter(found.items()), (None, self._shown))

    def _make(self) -> None:
        self._file, self._shown = own_file.make(self._places, self._uid, self._shown)
        self._known[self._shown] = None


def host_tokens(named_file: str, env: Mapping[str, str] = os.environ) -> HostTokens:
    """Returns the tokens of this process: one instance per file or user. Raises ConfigError for an unreadable file."""
    if named_file:
        return _shared(named_file)
    uid = os.geteuid()
    return _own(own_file.folders(env, uid), uid)


@functools.lru_cache(maxsize=64)
def _shared(named_file: str) -> SharedToken:
    return SharedToken(Path(named_file))


@functools.lru_cache(maxsize=64)
def _own(places: tuple[Path, ...], uid: int) -> OwnToken:
    return OwnToken(places, uid)


class Metadata(NamedTuple):
    """Holds what a client sends with one call, and the answer by which the server proves itself."""

    sent: tuple[tuple[str, str], ...]
    answer: str
    """"" if this process knows no token, so that no server can prove itself."""

    def is_proven(self, initial: Iterable[tuple[str, Any]] | None) -> bool:
        """Returns whether the initial metadata of an answer comes from a process that knows the token."""
        given = str(dict(initial or ()).get(ANSWER, ""))
        return bool(self.answer) and _same(given, self.answer)


class Prover:
    """Makes the metadata of calls to one address."""

    def __init__(self, tokens: HostTokens, port: int, clock: Clock = time.monotonic) -> None:
        self._tokens = tokens
        self._port = port
        self._clock = clock

    def __call__(self) -> Metadata:
        """Returns the metadata of one call. Without a token, nothing is sent."""
        token = self._tokens.shown()
        if not token:
            return Metadata((), "")
        nonce = secrets.token_hex(_NONCE_BYTES)
        proof = _proof(token, self._port, _stamp(self._clock))
        return Metadata(((HEADER, proof), (NONCE, nonce)), _answer(token, self._port, nonce))


class Verdict(Enum):
    """Says what a server does with a call."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    TOO_EARLY = "made before this server listened"
    """The proof is good, but another process may have received it at this port. The caller makes another one."""


class Verifier:
    """Checks the proofs and tokens that a server receives, and makes the server's own.

    With `admits_all` it only makes the server's proofs, for the callers that know the token.
    """

    def __init__(
        self, tokens: HostTokens, clock: Clock = time.monotonic, *, admits_all: bool = False
    ) -> None:
        self._tokens = tokens
        self._clock = clock
        self._without = Verdict.ADMITTED if admits_all else Verdict.REFUSED
        self._port = 0
        self._since = 0

    def listens(self, port: int) -> None:
        """Takes the port, once it is bound: from now on no other process receives what is sent there."""
        self._port, self._since = port, _stamp(self._clock)

    def judge(self, metadata: Sequence[tuple[str, Any]]) -> tuple[Verdict, tuple[tuple[str, str], ...]]:
        """Returns what to do with a call by its metadata, and the initial metadata of the answer.

        It compares in constant time, and looks for new tokens before it refuses a call.
        """
        sent = dict(metadata)
        proof, token = str(sent.get(HEADER, "")), bearer(sent.get("authorization", ""))
        if not proof and not token:
            return self._without, ()
        known = self._fitting(proof, token, False) or self._fitting(proof, token, True)
        if not known:
            return self._without, ()
        nonce = str(sent.get(NONCE, ""))
        answer = ((ANSWER, _answer(known, self._port, nonce)),) if 0 < len(nonce) <= _MAX_PROOF else ()
        is_early = not token and int(proof.partition(".")[0]) < self._since
        return Verdict.TOO_EARLY if is_early else Verdict.ADMITTED, answer

    def refusal(self, what: str) -> str:
        """Returns the error text for a refused caller: which callers are admitted, and what to do."""
        admitted = self._tokens.describe_admitted()
        return (
            f"this {what} has no certificate and answers {admitted}; you showed another token or none: {HOW}"
        )

    def _fitting(self, proof: str, token: str, again: bool) -> str:
        """Returns the token that the caller knows, or ""."""
        stamp = proof.partition(".")[0]
        in_time = (
            len(proof) <= _MAX_PROOF
            and stamp.isascii()
            and stamp.isdigit()
            and abs(_stamp(self._clock) - int(stamp)) <= _GOOD_FOR_S * _STAMPS_PER_S
        )
        fitting = ""
        for known in self._tokens.known(again):
            proven = in_time and _same(proof, _proof(known, self._port, int(stamp)))
            if proven | (bool(token) and _same(token, known)):
                fitting = known
        return fitting


def not_proven(address: str) -> str:
    """Returns the error text about a server that cannot show that it knows this process's token."""
    return (
        f"the server at {address} did not prove that it knows the token of this process: another user's program may "
        f"have taken the port, or the server's user has another token: {HOW}"
    )


def _stamp(clock: Clock) -> int:
    """Returns the time in microseconds, so that no two events of a port have the same."""
    return int(clock() * _STAMPS_PER_S)


def _proof(token: str, port: int, stamp: int) -> str:
    return f"{stamp}.{_mac(token, f'kvlink {port} {stamp}')}"


def _answer(token: str, port: int, nonce: str) -> str:
    return _mac(token, f"kvlink server {port} {nonce}")


def _mac(token: str, text: str) -> str:
    return hmac.digest(token.encode(), text.encode("utf-8", "replace"), "sha256").hex()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())
