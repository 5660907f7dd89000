# SPDX-License-Identifier: Apache-2.0
"""Says which headers of a client go on to servers, and which of a server to its client. Does no I/O."""

from __future__ import annotations

from typing import Final

from multidict import CIMultiDict, MultiMapping

REQUEST_ID: Final = "X-Request-Id"
ENCODING: Final = "Content-Encoding"

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
} | {"te", "trailer", "transfer-encoding", "upgrade"}
# The client of HTTP writes these itself. Servers are asked for plain answers, because the router reads some.
_OF_THE_CONNECTION = frozenset(("accept-encoding", "content-length", "expect", "host"))


def end_to_end(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Returns the headers that are not about one connection.

    It leaves out what cannot be sent again: values that are not UTF-8.
    """
    named = {name.strip().lower() for name in ",".join(headers.getall("Connection", [])).split(",")}
    dropped = _HOP_BY_HOP | _OF_THE_CONNECTION | named
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped and _is_text(value)
    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
