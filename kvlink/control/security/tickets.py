# SPDX-License-Identifier: Apache-2.0
"""Signs tickets. A signature proves that one of the tenant's workers wrote the ticket, including its block ids.

A lease proves that blocks were pinned, but not which: a reader with a ticket could ask under its lease for other blocks
of that worker. The key belongs to the tenant, and whoever has it may read all of the tenant's blocks anyway. The
owner's lease says when a ticket ends, by the owner's clock.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvlink.config import WorkerConfig
from kvlink.control.security.reloading_file import LOOK_EVERY_S, ReloadingFile
from kvlink.errors import AccessDenied, ConfigError
from kvlink.ticket import SIGNATURE_BYTES, Ticket

_NONE = "none"
"""This value in place of a path leaves tickets unsigned although the process has certificates."""
_LEAST_BYTES = 32
_MAX_KEYS = 8

_Pass = Callable[[Ticket], Ticket]


class TicketKeys(ReloadingFile[tuple[bytes, ...]]):
    """Holds the secrets in a file, one per line. The first one signs, and all are accepted.

    Raises ConfigError for a file without secrets.
    """

    def __init__(self, path: Path, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__([path], functools.partial(_read, path), look_every_s)

    def __repr__(self) -> str:
        """Omits the secrets."""
        return f"TicketKeys({self._files[0]}, {len(self._value)} keys)"

    def sign(self, ticket: Ticket) -> Ticket:
        """Returns the ticket with this tenant's signature."""
        return replace(ticket, signature=_signature(self.current()[0], ticket.signed_bytes()))

    def checked(self, ticket: Ticket) -> Ticket:
        """Returns the ticket itself. Raises AccessDenied unless one of the keys signed it."""
        signed = ticket.signed_bytes()
        if not any(hmac.compare_digest(ticket.signature, _signature(key, signed)) for key in self.current()):
            what = "is not signed by any of this tenant's keys" if ticket.signature else "is not signed"
            raise AccessDenied(
                f"request {ticket.request_id}: the ticket {what}. It was changed, or comes from another tenant, or "
                f"from a worker with other KVLINK_TICKET_KEYS than {self._files[0]}; a tenant's workers need the same"
            )
        return ticket

    def mark(self, message: bytes) -> str:
        """Signs another message that is sent with tickets."""
        return _signature(self.current()[0], message).hex()

    def marked(self, message: bytes, mark: str) -> bool:
        """Returns whether one of the keys made this mark of the message."""
        marks = [_signature(key, message).hex() for key in self.current()]
        return any(hmac.compare_digest(mark.encode(), each.encode()) for each in marks)


@functools.lru_cache(maxsize=64)
def ticket_keys(path: str) -> TicketKeys | None:
    """Returns one shared TicketKeys per file, or None for "" and "none". Raises ConfigError."""
    return TicketKeys(Path(path)) if path not in ("", _NONE) else None


def ticket_signing(config: WorkerConfig) -> tuple[_Pass, _Pass]:
    """Returns the functions with which a worker signs and checks tickets. Without keys both do nothing.

    Raises ConfigError if keys are missing under TLS, where unsigned tickets must be allowed explicitly.
    """
    if config.tls_cert and not config.ticket_keys:
        raise ConfigError(
            "a worker with certificates needs keys to sign its tickets: set KVLINK_TICKET_KEYS (`kvlink certs` makes "
            f"a file for each tenant), or KVLINK_TICKET_KEYS={_NONE} to accept unsigned tickets"
        )
    keys = ticket_keys(config.ticket_keys)
    return (keys.sign, keys.checked) if keys else (_unchanged, _unchanged)


def _unchanged(ticket: Ticket) -> Ticket:
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
            f"{path} (KVLINK_TICKET_KEYS) must hold 1 to {_MAX_KEYS} secrets of {_LEAST_BYTES} characters or more, "
            "one per line; `kvlink certs` makes one for each tenant"
        )
    return tuple(line.encode() for line in lines)
