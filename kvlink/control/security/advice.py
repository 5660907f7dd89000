# SPDX-License-Identifier: Apache-2.0
"""Turns gRPC's error texts about failed trust between two peers into advice for operators."""

from __future__ import annotations

import time

from kvlink.control.security.keys import Keys, expiry
from kvlink.control.security.names import listed

_TRY = "(KVLINK_TLS_CA, KVLINK_TLS_CERT, KVLINK_TLS_KEY; `kvlink certs` makes them for development)"

_HUNG_UP = ("ocket closed", "reset", "TSI_DATA_CORRUPTED")
"""gRPC's own servers close the connection silently. Go servers such as etcd send an alert that gRPC cannot read."""


def for_plaintext(sentence: str) -> str:
    """Returns advice for a client without certificates, or "" if the error does not point at TLS."""
    if "failed to connect" in sentence and "ocket closed" in sentence:
        return f"It closed the connection at once. If it requires TLS, give this process certificates {_TRY}"
    return ""


def for_tls(sentence: str, keys: Keys, wanted: str) -> str:
    """Returns advice for a client with certificates, or "" if the error does not point at TLS.

    `wanted` is the name that the server's certificate must have.
    """
    own = f"this process's certificate ({listed(keys.names)}; {expiry(keys.expires_at)})"
    if "WRONG_VERSION_NUMBER" in sentence:
        return f"It speaks plaintext and this process TLS: give it certificates {_TRY}, or unset them for this process"
    if "certificate has expired" in sentence:
        return "Its certificate has expired: renew it (for development: `kvlink certs --renew`)"
    if "CERTIFICATE_VERIFY_FAILED" in sentence:
        return "Its certificate was not issued by a CA in this process's KVLINK_TLS_CA: give both the same CA"
    if "Hostname Verification" in sentence or "Peer name" in sentence:  # gRPC 1.85, 1.71
        return f"Its certificate lacks the name {wanted}: check the address, or issue a certificate with that name"
    if "call host does not match" in sentence:
        return (
            "Its certificate does not have the host name of its address: issue one with that name or address, or check "
            "only roles and tenants (KVLINK_TLS_HOSTS=0)"
        )
    if "failed to connect" in sentence and any(sign in sentence for sign in _HUNG_UP):
        if keys.expires_at < time.time():
            return f"It closed the connection: {own} has expired; renew it (for development: `kvlink certs --renew`)"
        return (
            f"It closed the connection during the handshake: it does not trust {own}. Give both the same CA "
            "(KVLINK_TLS_CA)"
        )
    return ""
