# SPDX-License-Identifier: Apache-2.0
"""Converts block ids from the forms that engines use: lists, ranges, arrays, numpy arrays and torch tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from operator import index
from typing import Any, Protocol, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from kvlink.errors import ConfigError

_END = 2**32
_FEW = 128
"""Up to this number of ids, plain Python checks them faster than numpy."""


class SupportsDLPack(Protocol):
    """A tensor of another library, for example of torch."""

    def __dlpack__(self) -> Any:
        """Returns a capsule with the memory."""

    def __dlpack_device__(self) -> Any:
        """Returns the kind and the number of the device."""


BlockIds = Iterable[SupportsIndex] | npt.NDArray[np.integer[Any]] | SupportsDLPack
"""The types that `offer` and `pull` accept: whatever has integers in an order, and is read once.

array("I") and contiguous numpy uint32 are used without conversion.
"""


def as_buffer(given: BlockIds, what: str) -> Any:
    """Returns a contiguous buffer of uint32 with these ids, which is `given` itself if it has that form.

    `what` names the request in errors. Raises ConfigError, naming index and value, if a value is not a block id.
    """
    if type(given) is array and given.typecode == "I":
        return given
    if isinstance(given, np.ndarray):
        if given.dtype == np.uint32 and given.dtype.isnative and given.ndim == 1 and given.flags.c_contiguous:
            return given
        return _of_numpy(given, what)
    if isinstance(given, (array, memoryview)) or hasattr(given, "__dlpack_device__"):
        return _of_numpy(_to_numpy(given, what), what)
    if isinstance(given, (str, bytes, bytearray, Set, Mapping)) or not isinstance(given, Iterable):
        raise ConfigError(f"{what}: block ids must be integers in order, not {type(given).__name__}")
    ids = list(given)  # once: an iterator has nothing left for a second reader
    if bool not in set(map(type, ids)):  # array would take it for a number
        with suppress(OverflowError, TypeError):
            return array("I", cast("list[int]", ids))
    return array("I", [_id(what, at, value) for at, value in enumerate(ids)])


def as_array(given: BlockIds, what: str) -> array[int]:
    """Returns a copy of the ids. Raises ConfigError as `as_buffer` does."""
    if type(given) is array and given.typecode == "I":
        return given[:]
    ids = as_buffer(given, what)
    if ids is not given and type(ids) is array:
        return ids
    return array("I", ids.tobytes() if isinstance(ids, np.ndarray) else ids)


def check_distinct(ids: array[int], num_blocks: int, what: str) -> None:
    """Raises ConfigError, naming index and value, unless the ids are different blocks of a pool of `num_blocks`."""
    if len(ids) <= _FEW:
        if ids and max(ids) < num_blocks and len(set(ids)) == len(ids):
            return
    else:
        values = np.frombuffer(ids, np.uint32)
        if values.max() < num_blocks:
            named = np.zeros(num_blocks, np.bool_)
            named[values] = True
            if np.count_nonzero(named) == len(ids):
                return
    seen: dict[int, int] = {}
    for at, block in enumerate(ids):
        if block >= num_blocks:
            raise ConfigError(
                f"{what}: block id {block} at index {at} is not in 0 to {num_blocks - 1}, the block ids here"
            )
        if block in seen:
            raise ConfigError(f"{what}: block id {block} at index {at} is also at index {seen[block]}")
        seen[block] = at
    raise ConfigError(f"{what}: block ids are empty; pass at least one block id")


def _to_numpy(given: Any, what: str) -> npt.NDArray[Any]:
    try:
        if hasattr(given, "untyped_storage"):
            return np.asarray(given.detach().cpu())
        return np.from_dlpack(given) if hasattr(given, "__dlpack_device__") else np.asarray(given)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{what}: block ids cannot be read from {type(given).__name__}: {error}") from None


def _of_numpy(given: npt.NDArray[Any], what: str) -> npt.NDArray[np.uint32]:
    if given.ndim != 1:
        raise ConfigError(
            f"{what}: block ids must have one dimension, not shape {list(given.shape)}; pass one request's row"
        )
    if given.size == 0:
        return np.zeros(0, np.uint32)
    if given.dtype.kind not in "iu":
        raise ConfigError(_not_an_id(what, 0, given[0].item()))
    wrong = np.flatnonzero((given < 0) | (given >= _END))
    if wrong.size:
        raise ConfigError(_not_an_id(what, int(wrong[0]), given[wrong[0]].item()))
    return np.ascontiguousarray(given, np.uint32)


def _id(what: str, at: int, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        block = index(value)
    except TypeError:
        raise ConfigError(_not_an_id(what, at, value)) from None
    if not 0 <= block < _END:
        raise ConfigError(_not_an_id(what, at, block))
    return block


def _not_an_id(what: str, at: int, value: object) -> str:
    if isinstance(value, bool):
        return f"{what}: block id {value} at index {at} is no integer"
    if isinstance(value, int) and value < 0:
        return f"{what}: block id {value} at index {at} is negative; leave padding out: pass the request's blocks only"
    if isinstance(value, int):
        return f"{what}: block id {value} at index {at} does not fit 32 bits"
    return f"{what}: block id {value!r:.40} at index {at} is no integer"
