# SPDX-License-Identifier: Apache-2.0
"""Signatures of tickets: that one of the tenant's own workers wrote this, block ids included.

A lease proves that blocks were pinned, not which: whoever has a ticket could ask under its lease for other blocks of
that worker. The key is the tenant's: who has it may read all of the tenant's blocks anyway. When a ticket ends, its
owner's lease says, by the owner's clock.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvlink.config import WorkerConfig
from kvlink.control.security.reloading_file import LOOK_EVERY_S, Watched
from kvlink.errors import AccessDenied, ConfigError
from kvlink.ticket import SIGNATURE_BYTES, Ticket

_NONE = "none"
"""Instead of a path: tickets go unsigned although this process has certificates."""
_LEAST_BYTES = 32
_MAX_KEYS = 8

_Pass = Callable[[Ticket], Ticket]


class TicketKeys(Watched[tuple[bytes, ...]]):
    """The secrets in a file, one a line: the first signs, each is believed. Raises ConfigError for a file without."""

    def __init__(self, path: Path, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__([path], functools.partial(_read, path), look_every_s)

    def __repr__(self) -> str:
        """Without the secrets."""
        return f"TicketKeys({self._files[0]}, {len(self._value)} keys)"

    def sign(self, ticket: Ticket) -> Ticket:
        """With this tenant's signature."""
        return replace(ticket, signature=_signature(self.current()[0], ticket.signed_bytes()))

    def checked(self, ticket: Ticket) -> Ticket:
        """The same one. Raises AccessDenied unless one of the keys signed it."""
        signed = ticket.signed_bytes()
        if not any(hmac.compare_digest(ticket.signature, _signature(key, signed)) for key in self.current()):
            what = "is signed by none of this tenant's keys" if ticket.signature else "is not signed"
            raise AccessDenied(
                f"request {ticket.request_id}: the ticket {what}: it was changed, or comes from elsewhere, or from a "
                f"worker that has other KVLINK_TICKET_KEYS than {self._files[0]}"
            )
        return ticket

    def mark(self, message: bytes) -> str:
        """A signature of something else that travels with tickets."""
        return _signature(self.current()[0], message).hex()

    def marked(self, message: bytes, mark: str) -> bool:
        """Whether one of the keys made it."""
        marks = [_signature(key, message).hex() for key in self.current()]
        return any(hmac.compare_digest(mark.encode(), each.encode()) for each in marks)


@functools.lru_cache(maxsize=64)
def ticket_keys(path: str) -> TicketKeys | None:
    """One a process for the same file; None for "" and "none". Raises ConfigError."""
    return TicketKeys(Path(path)) if path not in ("", _NONE) else None


def ticket_signing(config: WorkerConfig) -> tuple[_Pass, _Pass]:
    """How a worker signs and checks; without keys it does neither, which has to be asked for under TLS.

    Raises ConfigError.
    """
    if config.tls_cert and not config.ticket_keys:
        raise ConfigError(
            "a worker with certificates signs its tickets, and reads no others: set KVLINK_TICKET_KEYS (`kvlink certs` "
            f"makes a file for each tenant), or KVLINK_TICKET_KEYS={_NONE} to believe every ticket that is passed on"
        )
    keys = ticket_keys(config.ticket_keys)
    return (keys.sign, keys.checked) if keys else (_as_it_is, _as_it_is)


def _as_it_is(ticket: Ticket) -> Ticket:
    return ticket


def _signature(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)[:SIGNATURE_BYTES]


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {path} (KVLINK_TICKET_KEYS): {error}") from None
    if not 0 < len(lines) <= _MAX_KEYS or min(map(len, lines)) < _LEAST_BYTES:
        raise ConfigError(
            f"{path} (KVLINK_TICKET_KEYS) holds 1 to {_MAX_KEYS} secrets of {_LEAST_BYTES} characters or more, one a "
            "line; `kvlink certs` makes one for each tenant"
        )
    return tuple(line.encode() for line in lines)
