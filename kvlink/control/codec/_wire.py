# SPDX-License-Identifier: Apache-2.0
"""What all codecs share. Everything that is parsed is foreign: bounds are checked, both ways.

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
    """Both directions of one message."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """One call: its service and name as in the .proto file, and what goes each way."""

    service: str
    name: str
    request: Codec[Q]
    reply: Codec[R]

    @property
    def path(self) -> str:
        """As gRPC names it."""
        return f"/{self.service}/{self.name}"


Write = Callable[[T], M]


def encoding(write: Callable[[T], M], value: T) -> M:
    """Calls `write`; raises ConfigError when a field is out of its range or not UTF-8."""
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
    """`bounds`: of all its fields that repeat, looked at before anything is built; `most_bytes`: of several entries."""

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
    """For a NamedTuple of at least two scalar fields that are named as the message's."""
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
    """Terminals and logs show them: escapes among them would write whatever their author likes."""
    for text in texts:
        if not text.isprintable():
            raise ConfigError(f"{field} has characters that cannot be printed: {text[:80]!a}")


def check_opaque(field: str, *blobs: bytes | str) -> None:
    for blob in blobs:
        if len(blob) > limits.MAX_OPAQUE_BYTES:
            raise ConfigError(f"{field} has {len(blob)} bytes, at most {limits.MAX_OPAQUE_BYTES} are taken")


def check_within(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # also refuses NaN
        raise ConfigError(f"{field} is {value:g}, {least:g} to {most:g} are taken")
