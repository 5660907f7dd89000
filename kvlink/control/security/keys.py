# SPDX-License-Identifier: Apache-2.0
"""Reads this process's certificate, its key and the CA from files, checks that they fit, and reloads changed files."""

from __future__ import annotations

import functools
import re
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvlink.control.security.own_file import mode_of
from kvlink.control.security.reloading_file import LOOK_EVERY_S, ReloadingFile
from kvlink.errors import ConfigError

COORDINATOR = "coordinator.kvlink.internal"
"""Every coordinator's certificate has this DNS name, and no other certificate has it."""
_OF_TENANT = ".tenant.kvlink.internal"
_TENANT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def tenant_name(tenant: str) -> str:
    """Returns the DNS name in the certificates of a tenant's workers. Raises ConfigError if it is not a DNS label."""
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} is not a valid tenant: use 1 to 63 of a-z, 0-9 and -, without - at either end"
        )
    return tenant + _OF_TENANT


def tenants_in(names: Iterable[str]) -> list[str]:
    """Returns the tenants that the names in a certificate state."""
    stated = [name.removesuffix(_OF_TENANT) for name in names if name.endswith(_OF_TENANT)]
    return [tenant for tenant in dict.fromkeys(stated) if _TENANT.fullmatch(tenant)]


def listed(names: Iterable[str]) -> str:
    """Joins and shortens the names in a certificate for an error text."""
    shown = [name[:80] for name in names]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "") or "no name"


_HANDSHAKE_STEPS = 8
"""TLS 1.3 needs three steps; the rest is slack."""


class TlsFiles(NamedTuple):
    """Names PEM files: the trusted CAs, the certificate chain (leaf first), and its private key."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Keys:
    """Holds the contents of the files, which are known to fit together."""

    ca: bytes
    cert: bytes
    key: bytes
    names: tuple[str, ...]
    """All names in the certificate's subjectAltName."""
    expires_at: float
    """Unix time at which the certificate expires."""

    def __repr__(self) -> str:
        """Omits the key, which is secret."""
        return f"Keys({', '.join(self.names)}; {expiry(self.expires_at)})"


class Keyring(ReloadingFile[Keys]):
    """Holds the current Keys. Raises ConfigError if the files are missing or expired, or do not fit together."""

    def __init__(self, files: TlsFiles, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__(files, functools.partial(read, files), look_every_s)


@functools.lru_cache(maxsize=64)
def keyring(files: TlsFiles) -> Keyring:
    """Returns one shared Keyring per set of files. Raises ConfigError."""
    return Keyring(files)


def read(files: TlsFiles) -> Keys:
    """Reads the files and tests them with a TLS handshake of the certificate with itself. Raises ConfigError."""
    try:
        for path in files:
            mode_of(path, "KVLINK_TLS_CA, _CERT, _KEY")
        ca, cert, key = (path.read_bytes() for path in files)
        certificate = _shake_hands(files)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the certificate {files.cert} is not valid under {files.ca}: {error.verify_message}; renew it with that "
            "CA, for both serverAuth and clientAuth (for development: `kvlink certs`)"
        ) from None
    except ssl.SSLError as error:
        why = (error.reason or str(error)).replace("_", " ").lower()
        raise ConfigError(
            f"{files.cert}, {files.key} and {files.ca} are not a certificate, its key and its CA in PEM ({why}); give "
            "three files that belong together"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename}: {error.strerror} (KVLINK_TLS_CA, _CERT, _KEY)"
        ) from None
    names = tuple(name for _, name in certificate.get("subjectAltName", ()))
    return Keys(ca, cert, key, names, ssl.cert_time_to_seconds(certificate["notAfter"]))


def expiry(expires_at: float) -> str:
    """Describes when a certificate expires or expired, for an error text."""
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
    context.load_cert_chain(files.cert, files.key, password="")  # without it, OpenSSL asks at the terminal
    return context
