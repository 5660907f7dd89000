# SPDX-License-Identifier: Apache-2.0
"""Implements a certificate authority for development and tests. Needs `cryptography` (the extra "certs")."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvlink.errors import ConfigError

_BACKDATED = timedelta(minutes=5)
"""Certificates start this much earlier, because clocks of hosts differ."""
_CA_LIFE = timedelta(days=3650)


class Pair(NamedTuple):
    """Holds the PEM of a certificate and of its key."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates for both ends of TLS."""

    _cert: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls) -> Authority:
        """Makes a new authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvlink development CA")])
        signs_certificates = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = (
            _builder(name, name, key, datetime.now(timezone.utc) - _BACKDATED, _CA_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(signs_certificates, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def of(cls, pair: Pair) -> Authority:
        """Loads an authority from its `pem`. Raises ConfigError for any other pair."""
        try:
            cert = x509.load_pem_x509_certificate(pair.cert)
            key = serialization.load_pem_private_key(pair.key, None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the files do not hold a certificate authority of kvlink: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or cert.public_key() != key.public_key():
            raise ConfigError(
                "the files do not hold a certificate authority of kvlink: the key does not belong to the certificate"
            )
        return cls(cert, key)

    @property
    def pem(self) -> Pair:
        """Returns the authority's certificate and key. Whoever has the key can issue any certificate."""
        return _pem(self._cert, self._key)

    def issue(self, names: Sequence[str], life: timedelta, starts: datetime | None = None) -> Pair:
        """Issues a certificate for DNS names, addresses and URIs. Raises ConfigError for any other name."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        starts = starts or datetime.now(timezone.utc) - _BACKDATED
        builder = (
            _builder(x509.Name([]), self._cert.subject, key, starts, life)
            .add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(issuer, critical=False)
        )
        return _pem(builder.sign(self._key, hashes.SHA256()), key)


def names_in(cert: bytes) -> list[str]:
    """Returns the names that a PEM certificate was issued for. Raises ConfigError if it cannot be read."""
    try:
        found = x509.load_pem_x509_certificate(cert).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"the file does not hold a certificate of kvlink: {error}") from None
    return [str(name.value) for name in found.value]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, starts: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(starts + life)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.UniformResourceIdentifier(name) if "://" in name else x509.DNSName(name)
    except ValueError as error:
        raise ConfigError(f"{name!r} is not a host name, address or URI: {error}") from None


def _pem(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    unencrypted = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return Pair(
        cert.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted)
    )
