# SPDX-License-Identifier: Apache-2.0
"""This process's certificate, its key and the CA: read from files, tried on each other, read again when they change."""

from __future__ import annotations

import functools
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvlink.control.security.reloading_file import LOOK_EVERY_S, Watched
from kvlink.errors import ConfigError

_HANDSHAKE_STEPS = 8
"""TLS 1.3 needs three."""


class TlsFiles(NamedTuple):
    """PEM files: trusted CAs, the certificate chain (leaf first), its private key."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Keys:
    """What the files hold, known to fit together."""

    ca: bytes
    cert: bytes
    key: bytes
    names: tuple[str, ...]
    """Everything in the certificate's subjectAltName."""
    expires_at: float
    """Unix time."""

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Keys({', '.join(self.names)}; {expiry(self.expires_at)})"


class Keyring(Watched[Keys]):
    """The Keys that the files hold now. Raises ConfigError when they are missing, expired or do not fit together."""

    def __init__(self, files: TlsFiles, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__(files, functools.partial(read, files), look_every_s)


@functools.lru_cache(maxsize=64)
def keyring(files: TlsFiles) -> Keyring:
    """One a process for the same files. Raises ConfigError."""
    return Keyring(files)


def read(files: TlsFiles) -> Keys:
    """Reads the files and has the certificate shake hands with itself, in both roles. Raises ConfigError."""
    try:
        ca, cert, key = (path.read_bytes() for path in files)
        said = _shake_hands(files)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate {files.cert} is no good under {files.ca}: {error.verify_message}; renew it with that "
            "CA, for both serverAuth and clientAuth (for development: `kvlink certs`)"
        ) from None
    except ssl.SSLError as error:
        why = (error.reason or str(error)).replace("_", " ").lower()
        raise ConfigError(
            f"{files.cert}, {files.key} and {files.ca} do not make a certificate, its key and its CA, in PEM ({why})"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename}: {error.strerror} (KVLINK_TLS_CA, _CERT, _KEY)"
        ) from None
    names = tuple(name for _, name in said.get("subjectAltName", ()))
    return Keys(ca, cert, key, names, ssl.cert_time_to_seconds(said["notAfter"]))


def expiry(expires_at: float) -> str:
    """In words."""
    verb = "expires" if expires_at > time.time() else "expired"
    return f"{verb} {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(expires_at))}"


def _shake_hands(files: TlsFiles) -> dict[str, Any]:
    """Returns the certificate as ssl.SSLSocket.getpeercert does. Raises ssl.SSLError, OSError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _context(ssl.PROTOCOL_TLS_CLIENT, files).wrap_bio(down, up)
    server = _context(ssl.PROTOCOL_TLS_SERVER, files).wrap_bio(up, down, server_side=True)
    for _ in range(_HANDSHAKE_STEPS):
        if all([_step(client), _step(server)]):
            break
    return server.getpeercert() or {}


def _step(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key, password="")  # or it asks at the terminal
    return context
