# SPDX-License-Identifier: Apache-2.0
"""Provides what all codecs share. Bounds are checked in both directions, because all input is untrusted.

`decode` raises ConfigError for bytes that are not the message or exceed a bound, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, check
from kvlink.control.values import Nothing
from kvlink.errors import ConfigError
from kvlink.runtime import names
from kvlink.types import PROTOCOL_VERSION

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


_UNSAID = 1
"""The version of a peer whose message has no version field. All peers spoke this version before the field existed."""


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


Both = tuple[Callable[[T], M], Callable[[M], T]]
"""The two directions of a codec: (write, read)."""


def by_name(
    value: type[T],
    message: type[M],
    check: Callable[[T], None] = lambda value: None,
    optional: Collection[str] = (),
    **parts: tuple[Callable[[Any], Any], Callable[[Any], Any]],
) -> Both[T, M]:
    """Returns (write, read) for a NamedTuple or dataclass of at least two fields that are named like the message's.

    `parts` has (write, read) for fields that hold other values than the message, and for a repeated field those of one
    entry. A repeated field becomes a tuple. The fields in `optional` may be None.
    """
    names = tuple(inspect.signature(value).parameters)
    get = attrgetter(*names)
    repeated = {field.name for field in message.DESCRIPTOR.fields if field.default_value == []}
    special = [
        (at, name, *parts.get(name, (_same, _same)))
        for at, name in enumerate(names)
        if name in repeated.union(parts)
    ]

    def write(value: T) -> M:
        check(value)
        values = dict(zip(names, get(value), strict=True))
        for _, name, write_part, _ in special:
            if name in repeated:
                if write_part is not _same:
                    values[name] = map(write_part, values[name])
            elif values[name] is not None or name not in optional:
                values[name] = write_part(values[name])
        return message(**values)

    def read(message: M) -> T:
        values = [*get(message)]
        for at, name, _, read_part in special:
            if name in repeated:
                values[at] = tuple(values[at] if read_part is _same else map(read_part, values[at]))
            elif name not in optional or message.HasField(name):
                values[at] = read_part(values[at])
            else:
                values[at] = None
        found = value(*values)
        check(found)
        return found

    return write, read


def _same(value: T) -> T:
    return value


def versioned(peer: str, both: Both[T, M]) -> Both[T, M]:
    """Adds this process's protocol version to what is written. Reading checks that of `peer`."""
    write, read = both

    def write_versioned(value: T) -> Any:
        message: Any = write(value)
        message.protocol_version = PROTOCOL_VERSION
        return message

    def read_versioned(message: Any) -> T:
        check_version(peer, message.protocol_version or _UNSAID)
        return read(message)

    return write_versioned, read_versioned


def check_version(peer: str, version: int) -> None:
    """Raises ConfigError that names both versions if the peer's version differs from this process's.

    Releases may differ. Within a version, messages only gain fields that may be missing, and services gain methods that
    callers can do without.
    """
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{peer} speaks protocol version {version} and this process speaks {PROTOCOL_VERSION}; run releases of "
            "kvlink that have the same protocol version"
        )


def check_name(field: str, name: str) -> None:
    names.check_name(name, field)
    check_printable(field, name)


def check_printable(field: str, *texts: str) -> None:
    """Raises ConfigError for unprintable characters, because terminals that show the texts would obey escapes."""
    for text in texts:
        if not text.isprintable():
            raise ConfigError(f"{field} has characters that cannot be printed: {text[:80]!a}")


def check_opaque(field: str, *blobs: bytes | str) -> None:
    if (longest := max(map(len, blobs), default=0)) > limits.MAX_OPAQUE_BYTES:
        raise ConfigError(f"{field} has {longest} bytes, and at most {limits.MAX_OPAQUE_BYTES} are accepted")


def check_within(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # also refuses NaN
        raise ConfigError(f"{field} is {value:g}, and must be {least:g} to {most:g}")


class Memoized(Generic[T, R]):
    """Calls `make` once per value. Values are compared by identity, because comparing large ones is expensive.

    Keeps the last `most` values and their results. Callers must not change a result.
    """

    def __init__(self, make: Callable[[T], R], most: int) -> None:
        self._make = make
        self._most = most
        self._made: dict[int, tuple[T, R]] = {}

    def __call__(self, value: T) -> R:
        """Returns the result for `value`. An exception of `make` is raised again at every call."""
        known = self._made.get(id(value))
        if known is None:
            known = value, self._make(value)
            if len(self._made) >= self._most:
                self._made.pop(next(iter(self._made)), None)
            self._made[id(value)] = known
        return known[1]
