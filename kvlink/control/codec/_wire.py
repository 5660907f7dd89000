# SPDX-License-Identifier: Apache-2.0
"""Provides what all codecs share. Bounds are checked in both directions, because all input is untrusted.

`decode` raises ConfigError for bytes that are not the message or exceed a bound, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from kvlink import ticket
from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, check
from kvlink.control.values import Nothing
from kvlink.errors import ConfigError

T = TypeVar("T")
Q = TypeVar("Q")
R = TypeVar("R")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Encodes and decodes one message."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """Describes one call: its service and name as in the .proto file, and the codecs of request and reply."""

    service: str
    name: str
    request: Codec[Q]
    reply: Codec[R]

    @property
    def path(self) -> str:
        """Returns the path under which gRPC knows the method."""
        return f"/{self.service}/{self.name}"


Write = Callable[[T], M]


def encoding(write: Callable[[T], M], value: T) -> M:
    """Calls `write`. Raises ConfigError when a field is out of its range or not UTF-8."""
    try:
        return write(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cannot send this {type(value).__name__}: {error}") from None


def codec(
    message: type[M],
    write: Callable[[T], M],
    read: Callable[[M], T],
    bounds: Bounds | None = None,
    most_bytes: int | None = None,
) -> Codec[T]:
    """Makes the codec of a message.

    `bounds` covers all repeated fields and is checked before protobuf parses the message. `most_bytes` bounds a message
    with several entries.
    """

    def encode(value: T) -> bytes:
        return encoding(write, value).SerializeToString()

    def decode(blob: bytes) -> T:
        try:
            if bounds is not None:
                check(blob, bounds, most_bytes)
            return read(message.FromString(blob))
        except (DecodeError, ValueError, ConfigError) as error:
            raise ConfigError(f"malformed {message.__name__}: {error}") from None

    return Codec(encode, decode)


def nothing(message: type[M]) -> Codec[Nothing]:
    return codec(message, lambda _: message(), lambda _: Nothing())


def plain(
    value: type[T], message: type[M], check: Callable[[T], None] = lambda value: None
) -> tuple[Callable[[T], M], Callable[[M], T]]:
    """Returns (write, read) for a NamedTuple of at least two scalar fields that are named like the message's."""
    names: tuple[str, ...] = value._fields  # type: ignore[attr-defined]
    make: Callable[[Iterable[Any]], T] = partial(tuple.__new__, value)  # type: ignore[type-var]  # _make, in C
    fields = attrgetter(*names)

    def write(value: T) -> M:
        check(value)
        return message(**dict(zip(names, value, strict=True)))  # type: ignore[call-overload]

    def read(message: M) -> T:
        value = make(fields(message))
        check(value)
        return value

    return write, read


def check_name(field: str, name: str) -> None:
    ticket.check_name(name, field)
    check_printable(field, name)


def check_printable(field: str, *texts: str) -> None:
    """Raises ConfigError for unprintable characters, because terminals that show the texts would obey escapes."""
    for text in texts:
        if not text.isprintable():
            raise ConfigError(f"{field} has characters that cannot be printed: {text[:80]!a}")


def check_opaque(field: str, *blobs: bytes | str) -> None:
    for blob in blobs:
        if len(blob) > limits.MAX_OPAQUE_BYTES:
            raise ConfigError(
                f"{field} has {len(blob)} bytes, and at most {limits.MAX_OPAQUE_BYTES} are accepted"
            )


def check_within(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # also refuses NaN
        raise ConfigError(f"{field} is {value:g}, and must be {least:g} to {most:g}")
