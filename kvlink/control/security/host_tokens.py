# SPDX-License-Identifier: Apache-2.0
"""Who may call where nobody has a certificate: processes of this host that can read the same token.

Callers do not send the token. Any user may listen on a free port of loopback and be called by mistake, so what is sent
is good for one port and for minutes: an HMAC of both under the token. A tool without kvlink may send the token itself
as a bearer's.
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
"""More than a call waits anywhere before it is looked at."""
_LOOK_EVERY_S = 1.0
_MAX_PROOF = 128
_HOW = (
    "run both as one user, or have KVLINK_TOKEN_FILE of both name one file that only their users can read, or set "
    "KVLINK_TLS_CA, KVLINK_TLS_CERT and KVLINK_TLS_KEY (`kvlink certs` makes them for development)"
)

Clock = Callable[[], float]
"""Seconds, the same for all processes of the host."""


class HostTokens(Protocol):
    """Tokens of one process. Safe from any thread."""

    def prepare(self) -> None:
        """Of a server, before it listens: the token is there. Raises ConfigError."""

    def shown(self) -> str:
        """What a client proves to know; "": it knows none."""

    def known(self, again: bool) -> Sequence[str]:
        """What a server believes; with `again` it looks whether there are more."""

    def who(self) -> str:
        """Those that a server admits, in words."""


class SharedToken:
    """The token of the file that KVLINK_TOKEN_FILE names. Every user who can read the file is admitted."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read, or that every user can write."""
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError as error:
            raise ConfigError(
                f"cannot read the token in {path} (KVLINK_TOKEN_FILE): {error.strerror}"
            ) from None
        self._file: TokenFile = token_file(path)
        if mode & stat.S_IWOTH:
            raise ConfigError(
                f"every user of this host can write {path} (KVLINK_TOKEN_FILE): chmod o= {path}"
            )
        if mode & stat.S_IROTH:
            _log.warning(
                "every user who reaches file=%s (KVLINK_TOKEN_FILE) can read the token: chmod o=", path
            )

    def prepare(self) -> None:  # noqa: D102
        pass

    def shown(self) -> str:  # noqa: D102
        return self._file.current()

    def known(self, again: bool) -> Sequence[str]:  # noqa: D102
        return (self._file.current(),)

    def who(self) -> str:  # noqa: D102
        return f"processes that show the token in {self._file.path} (KVLINK_TOKEN_FILE)"


class OwnToken:
    """The token of a user's own file. A server makes the file, and makes it again after somebody removed it."""

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
                    _log.warning("the token of this user is gone: %s", error)
        return tuple(self._known)

    def who(self) -> str:  # noqa: D102
        where = (
            f"the token in {self._file}" if self._file else "a token that no server of the user has made yet"
        )
        return f"processes of user {self._uid}, who show {where}"

    def _look(self) -> None:
        self._look_at = self._clock() + _LOOK_EVERY_S
        found = own_file.tokens(self._places, self._uid)
        self._known |= dict.fromkeys(found.values())
        self._file, self._shown = next(iter(found.items()), (None, self._shown))

    def _make(self) -> None:
        self._file, self._shown = own_file.make(self._places, self._uid, self._shown)
        self._known[self._shown] = None


def host_tokens(named_file: str, env: Mapping[str, str] = os.environ) -> HostTokens:
    """One a process and user. Raises ConfigError for a named file that cannot be read."""
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
    """What a client sends along with each call to one address."""

    def __init__(self, tokens: HostTokens, port: int, clock: Clock = time.monotonic) -> None:
        self._tokens = tokens
        self._port = port
        self._clock = clock
        self._last: tuple[str, int] = ("", 0)
        self._metadata: tuple[tuple[str, str], ...] = ()

    def __call__(self) -> tuple[tuple[str, str], ...]:
        """Metadata; none where this process knows no token."""
        now = self._tokens.shown(), int(self._clock())
        if now != self._last:
            self._last = now
            self._metadata = ((HEADER, _proof(now[0], self._port, now[1])),) if now[0] else ()
        return self._metadata


class Verifier:
    """What a server believes of those who call its port."""

    def __init__(self, tokens: HostTokens, clock: Clock = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock

    def admits(self, metadata: Sequence[tuple[str, Any]], port: int) -> bool:
        """Compares in constant time. Looks for new tokens before it says no."""
        sent = dict(metadata)
        proof, token = str(sent.get(HEADER, "")), bearer(sent.get("authorization", ""))
        if not proof and not token:
            return False
        return self._fits(proof, token, port, False) or self._fits(proof, token, port, True)

    def refusal(self, what: str) -> str:
        """Who is answered, and what the others do about it."""
        return f"this {what} has no certificate and answers {self._tokens.who()}; you showed another or none: {_HOW}"

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
