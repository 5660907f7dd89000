# SPDX-License-Identifier: Apache-2.0
"""Signs tickets. A signature proves that one of the tenant's workers wrote the ticket, including its block ids.

A lease proves that blocks were pinned, but not which: a reader with a ticket could ask under its lease for other blocks
of that worker. The key belongs to the tenant, and whoever has it may read all of the tenant's blocks anyway. The
owner's lease says when a ticket ends, by the owner's clock. Without certificates, on loopback, the key comes from the
token that processes of this host show each other.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable, Sequence
from pathlib import Path

from kvlink.config import WorkerConfig
from kvlink.control.security.host_tokens import HOW, HostTokens, host_tokens
from kvlink.control.security.own_file import mode_of
from kvlink.control.security.reloading_file import LOOK_EVERY_S, ReloadingFile
from kvlink.errors import AccessDenied, ConfigError
from kvlink.ticket import SIGNATURE_BYTES, Ticket

_NONE = "none"
"""This value in place of a path leaves tickets unsigned."""
_LEAST_BYTES = 32
_MAX_KEYS = 8

_Pass = Callable[[Ticket], Ticket]
_Mac = Callable[[bytes, bytes], bytes]
"""Maps a secret and a message to a signature."""
Secrets = Callable[[bool], Sequence[bytes]]
"""Returns the secrets, of which the first one signs. With True, it first looks for new ones."""


class TicketKeys:
    """Signs and checks under the same secrets. `name` describes them, and `advice` who else must have them.

    With `believes_all` it signs for those who check, and checks nothing itself.
    """

    def __init__(
        self, secrets: Secrets, mac: _Mac, name: str, advice: str, *, believes_all: bool = False
    ) -> None:
        self._secrets = secrets
        self._mac = mac
        self._believes_all = believes_all
        self.name = name
        self.advice = advice

    @classmethod
    def of_file(cls, path: Path, look_every_s: float = LOOK_EVERY_S) -> TicketKeys:
        """Takes the secrets in a file, one per line. Raises ConfigError for a file without secrets."""
        file = _KeyFile([path], functools.partial(_read, path), look_every_s)
        advice = f"other KVLINK_TICKET_KEYS than {path}; a tenant's workers need the same"
        return cls(lambda again: file.current(), _hmac, "any of this tenant's keys", advice)

    @classmethod
    def of_host(cls, tokens: HostTokens, *, believes_all: bool = False) -> TicketKeys:
        """Derives the secrets from the tokens of this host, which follow them when they change."""
        last: tuple[str, Sequence[bytes]] = ("", ())

        def secrets(again: bool) -> Sequence[bytes]:
            nonlocal last
            if again:
                return [_derived(token) for token in tokens.known(True)]
            shown = tokens.shown()
            if shown != last[0]:  # each pull asks
                last = (shown, (_derived(shown),))
            return last[1]

        advice = f"another token than this process: {HOW}"
        return cls(secrets, _blake2, "the token of this process", advice, believes_all=believes_all)

    def __repr__(self) -> str:
        """Omits the secrets."""
        return f"TicketKeys({self.name})"

    def derived(self, purpose: bytes) -> list[bytes]:
        """Returns a secret for another purpose from each of the secrets, that of the signing one first.

        Both ends of a channel have one of them in common. Empty without secrets, and if this process believes all.
        """
        known = () if self._believes_all else (*self._secrets(False), *self._secrets(True))
        return [hmac.digest(key, purpose, "sha256") for key in dict.fromkeys(known)]

    def sign(self, ticket: Ticket) -> Ticket:
        """Returns the ticket with this tenant's signature. Without secrets it stays unsigned."""
        keys = self._secrets(False)
        return ticket.signed(functools.partial(self._mac, keys[0])) if keys else ticket

    def checked(self, ticket: Ticket) -> Ticket:
        """Returns the ticket itself. Raises AccessDenied unless one of the keys signed it."""
        if not self._believes_all and not self._made(ticket.signed_bytes(), ticket.signature):
            what = f"is not signed by {self.name}" if ticket.signature else "is not signed"
            raise AccessDenied(
                f"request {ticket.request_id}: the ticket {what}. It was changed, or comes from another tenant, or "
                f"from a worker with {self.advice}"
            )
        return ticket

    def mark(self, message: bytes) -> str:
        """Signs another message that is sent with tickets. Returns "" without secrets."""
        return "".join(self._mac(key, message).hex() for key in self._secrets(False)[:1])

    def marked(self, message: bytes, mark: str) -> bool:
        """Returns whether one of the keys made this mark of the message."""
        try:
            return self._believes_all or self._made(message, bytes.fromhex(mark))
        except ValueError:
            return False

    def _made(self, message: bytes, signature: bytes) -> bool:
        """Returns whether one of the secrets made the signature. It looks for new secrets before it says no."""
        for key in self._secrets(False):
            if hmac.compare_digest(signature, self._mac(key, message)):
                return True
        return any(hmac.compare_digest(signature, self._mac(key, message)) for key in self._secrets(True))


class _KeyFile(ReloadingFile[tuple[bytes, ...]]):
    def __repr__(self) -> str:
        """Omits the secrets."""
        return f"{len(self._value)} keys of {self._files[0]}"


@functools.lru_cache(maxsize=64)
def _file_keys(path: str) -> TicketKeys:
    return TicketKeys.of_file(Path(path))


def ticket_keys(config: WorkerConfig) -> TicketKeys | None:
    """Returns the keys of a process: those in its file, those of this host, or None if tickets are not signed.

    Without a file or certificates they are those of this host. Where plaintext is allowed everywhere, they sign for
    readers on this host, and check nothing. Raises ConfigError for a file without secrets or without a token.
    """
    if config.ticket_keys:
        return None if config.ticket_keys == _NONE else _file_keys(config.ticket_keys)
    if config.tls_cert:
        return None
    return TicketKeys.of_host(host_tokens(config.token_file), believes_all=config.insecure)


def ticket_signing(config: WorkerConfig) -> tuple[_Pass, _Pass]:
    """Returns the functions with which a worker signs and checks tickets. Without keys both do nothing.

    Raises ConfigError as `ticket_keys` does, and without keys under TLS, where unsigned tickets must be allowed.
    """
    if config.tls_cert and not config.ticket_keys:
        raise ConfigError(
            "a worker with certificates needs keys to sign its tickets: set KVLINK_TICKET_KEYS (`kvlink certs` makes "
            f"a file for each tenant), or KVLINK_TICKET_KEYS={_NONE} to accept unsigned tickets"
        )
    keys = ticket_keys(config)
    return (keys.sign, keys.checked) if keys else (_unchanged, _unchanged)


def _unchanged(ticket: Ticket) -> Ticket:
    return ticket


@functools.lru_cache(maxsize=64)
def _derived(token: str) -> bytes:
    return hmac.digest(token.encode(), b"kvlink tickets", "sha256")


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")[:SIGNATURE_BYTES]


def _blake2(key: bytes, message: bytes) -> bytes:
    """Is faster, and enough between processes of one host, which have the same release."""
    mac = _keyed(key).copy()
    mac.update(message)
    return mac.digest()


@functools.lru_cache(maxsize=64)
def _keyed(key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(key=key, digest_size=SIGNATURE_BYTES)


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        mode_of(path, "KVLINK_TICKET_KEYS")
        lines = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {path} (KVLINK_TICKET_KEYS): {error}") from None
    if not 0 < len(lines) <= _MAX_KEYS or min(map(len, lines)) < _LEAST_BYTES:
        raise ConfigError(
            f"{path} (KVLINK_TICKET_KEYS) must hold 1 to {_MAX_KEYS} secrets of {_LEAST_BYTES} characters or more, "
            "one per line; `kvlink certs` makes one for each tenant"
        )
    return tuple(line.encode() for line in lines)
