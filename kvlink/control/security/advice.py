# SPDX-License-Identifier: Apache-2.0
"""What to do when the two ends of a connection do not trust each other. gRPC's own words are for its authors."""

from __future__ import annotations

import time

from kvlink.control.security.keys import Keys, expiry
from kvlink.control.security.names import listed

_TRY = "(KVLINK_TLS_CA, KVLINK_TLS_CERT, KVLINK_TLS_KEY; `kvlink certs` makes them for development)"

_HUNG_UP = ("ocket closed", "reset", "TSI_DATA_CORRUPTED")
"""gRPC's own servers close without a word; those in Go, as etcd, send an alert first, which gRPC cannot read."""


def for_plaintext(sentence: str) -> str:
    """Of a client without certificates. "": nothing points at TLS."""
    if "failed to connect" in sentence and "ocket closed" in sentence:
        return f"It hung up at once: if it wants TLS, give this process certificates {_TRY}"
    return ""


def for_tls(sentence: str, keys: Keys, wanted: str) -> str:
    """`wanted`: the name that the far end's certificate must have. "": nothing points at TLS."""
    own = f"this process's certificate ({listed(keys.names)}; {expiry(keys.expires_at)})"
    if "WRONG_VERSION_NUMBER" in sentence:
        return f"It speaks plaintext and this process TLS: give it certificates {_TRY}, or take them from this one"
    if "certificate has expired" in sentence:
        return "Its certificate has expired: renew it (for development: `kvlink certs --renew`)"
    if "CERTIFICATE_VERIFY_FAILED" in sentence:
        return "Its certificate was not made by a CA in this process's KVLINK_TLS_CA: give both the same CA"
    if "Hostname Verification" in sentence or "Peer name" in sentence:  # gRPC 1.85, 1.71
        return (
            f"Its certificate does not have the name {wanted}: it is something else, or make it one that has"
        )
    if "call host does not match" in sentence:
        return (
            "Its certificate does not name the host that was dialled: make it with that name or address, or check only "
            "roles and tenants (KVLINK_TLS_HOSTS=0)"
        )
    if "failed to connect" in sentence and any(sign in sentence for sign in _HUNG_UP):
        if keys.expires_at < time.time():
            return f"It hung up: {own} has expired; renew it (for development: `kvlink certs --renew`)"
        return (
            f"It hung up while shaking hands: it does not trust {own}. Give both the same CA (KVLINK_TLS_CA)"
        )
    return ""
