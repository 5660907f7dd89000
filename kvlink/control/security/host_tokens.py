# SPDX-License-Identifier: Apache-2.0
"""Authenticates callers without certificates: processes of this host that can read the same token.

Callers do not send the token, because any user may listen on a free loopback port and be called by mistake. They send
an HMAC of the port and the time under the token, which is valid for that port and for minutes. A tool without kvlink
may send the token itself as a bearer token.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvlink.control.security import own_file
from kvlink.control.security.tokens import TokenFile, bearer, token_file
from kvlink.errors import ConfigError

_log = logging.getLogger("kvlink.control")

HEADER = "kvlink-proof"
_GOOD_FOR_S = 300
"""This is longer than any call waits before it is checked."""
_LOOK_EVERY_S = 1.0
_MAX_PROOF = 128
_HOW = (
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
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            raise ConfigError(
                f"cannot read the token in {path} (KVLINK_TOKEN_FILE): {error.strerror}"
            ) from None
        self._file: TokenFile = token_file(path)
        if mode & stat.S_IWOTH:
            raise ConfigError(
                f"every user of this host can write {path} (KVLINK_TOKEN_FILE): run chmod o= {path}"
            )
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


class Prover:
    """Makes the proof that a client sends with each call to one address."""

    def __init__(self, tokens: HostTokens, port: int, clock: Clock = time.monotonic) -> None:
        self._tokens = tokens
        self._port = port
        self._clock = clock
        self._last: tuple[str, int] = ("", 0)
        self._metadata: tuple[tuple[str, str], ...] = ()

    def __call__(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call, which is empty if this process knows no token."""
        now = self._tokens.shown(), int(self._clock())
        if now != self._last:
            self._last = now
            self._metadata = ((HEADER, _proof(now[0], self._port, now[1])),) if now[0] else ()
        return self._metadata


class Verifier:
    """Checks the proofs and tokens that a server receives."""

    def __init__(self, tokens: HostTokens, clock: Clock = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock

    def admits(self, metadata: Sequence[tuple[str, Any]], port: int) -> bool:
        """Returns whether the metadata of a call to `port` holds a valid proof or token.

        It compares in constant time, and looks for new tokens before it returns False.
        """
        sent = dict(metadata)
        proof, token = str(sent.get(HEADER, "")), bearer(sent.get("authorization", ""))
        if not proof and not token:
            return False
        return self._fits(proof, token, port, False) or self._fits(proof, token, port, True)

    def refusal(self, what: str) -> str:
        """Returns the error text for a refused caller: which callers are admitted, and what to do."""
        admitted = self._tokens.describe_admitted()
        return (
            f"this {what} has no certificate and answers {admitted}; you showed another token or none: {_HOW}"
        )

    def _fits(self, proof: str, token: str, port: int, again: bool) -> bool:
        stamp = proof.partition(".")[0]
        in_time = (
            len(proof) <= _MAX_PROOF
            and stamp.isascii()
            and stamp.isdigit()
            and abs(self._clock() - int(stamp)) <= _GOOD_FOR_S
        )
        fits = False
        for known in self._tokens.known(again):
            fits |= in_time and _same(proof, _proof(known, port, int(stamp)))
            fits |= bool(token) and _same(token, known)
        return fits


def _proof(token: str, port: int, stamp: int) -> str:
    return f"{stamp}.{hmac.digest(token.encode(), f'kvlink {port} {stamp}'.encode(), hashlib.sha256).hex()}"


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())
