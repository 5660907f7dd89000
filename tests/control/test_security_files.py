# SPDX-License-Identifier: Apache-2.0
"""Certificates that do not fit, are damaged or have expired are refused with their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from control.certificates import Pki, write
from cryptography.hazmat.primitives import serialization

from kvlink.control.security import Keyring, tenant_name
from kvlink.control.security.authority import Authority
from kvlink.errors import ConfigError

ACME = tenant_name("acme")
OTHERS = Authority.make().pem.cert


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def test_files_that_do_not_fit_are_not_taken(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    files = pki.files("worker", [ACME])
    ring = Keyring(files, look_every_s=0.0)
    before = ring.current()
    files.key.write_bytes(pki.issue([ACME]).key)
    assert ring.current() is before
    assert "key values mismatch" in caplog.text
    write(files, pki.authority.pem.cert, pki.issue([ACME, "a.example.org"]))
    assert ring.current().names == (ACME, "a.example.org")


def encrypted(key: bytes) -> bytes:
    locked = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return serialization.load_pem_private_key(key, None).private_bytes(pem, pkcs8, locked)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pki, files: files.key.unlink(), r"worker\.key.*KVLINK_TLS_CA, _CERT, _KEY"),
        (lambda pki, files: files.key.write_bytes(pki.issue([ACME]).key), "key values mismatch"),
        (
            lambda pki, files: files.key.write_bytes(encrypted(files.key.read_bytes())),
            "are not a certificate, its key and its CA in PEM",
        ),
        (
            lambda pki, files: files.cert.write_bytes(b"?"),
            "are not a certificate, its key and its CA in PEM",
        ),
        (lambda pki, files: files.ca.write_bytes(OTHERS), "not valid under .*issuer certificate; renew it"),
        (
            lambda pki, files: write(files, pki.authority.pem.cert, pki.issue([ACME], expired=True)),
            "has expired; renew",
        ),
    ],
)
def test_bad_files_are_refused_at_the_start(pki: Pki, spoil: Callable[..., object], says: str) -> None:
    files = pki.files("worker", [ACME])
    spoil(pki, files)
    with pytest.raises(ConfigError, match=says):
        Keyring(files)
