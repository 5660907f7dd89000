# SPDX-License-Identifier: Apache-2.0
"""Looks objects up in LMCache's L1, and is notified of each piece of its memory before it is given to another object.

The notification comes from `AddressManager.free` of the memory's own address manager: whatever evicts, clears, deletes,
discards or collects an object, its place can be allocated again only after that call. `L1Memory` refuses to start if
LMCache's classes do not have the parts that this takes for granted, or if a trial object is freed in another way.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.memory_management import AddressManager

from kvlink.errors import ConfigError
from kvlink.runtime.supervised import survived

from .pages import Name, Wanted
from .places import Places

_log = logging.getLogger("kvlink.lmcache")


def name_of_key(key: Any) -> Name | None:
    """Returns the name of an object by LMCache's key, or None for what is no key."""
    if not isinstance(key, ObjectKey):
        return None
    return key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


def manager_of(desc: L1MemoryDesc, is_required: bool) -> L1Manager | None:
    """Returns the L1Manager whose memory `desc` describes, or None for memory without one, as of LMCache's benchmark.

    Raises ConfigError if there is none and `is_required`.
    """
    managers = list(_attribute(L1Manager, "_gauge_targets").values())
    for manager in managers:
        described = manager.get_l1_memory_desc()
        if described is not None and described.ptr == desc.ptr:
            return manager
    if is_required:
        raise _changed(f"none of its {len(managers)} L1 managers has the memory that the channel was given")
    return None


class L1Memory:
    """The objects of one L1Manager. `places` is told of all memory that it frees, until `close`."""

    def __init__(self, manager: L1Manager, places: Places) -> None:
        self._manager = manager
        self._spaces = _address_manager(manager)
        if "free" in vars(self._spaces):
            raise ConfigError(
                "LMCache's memory has a transfer channel of kvlink already; close that one first"
            )
        self._free: Callable[[int, int], None] = self._spaces.free
        self._places = places
        self._spaces.free = self._freed
        try:
            self._check_notified()
        except BaseException:
            self.close()
            raise

    def lookup(self) -> Callable[[Wanted], str]:
        """See `Objects`."""
        at: dict[int, Any] = {}

        def problem(wanted: Wanted) -> str:
            if wanted.name is not None:
                return self._problem(wanted, wanted.name)
            if not at:
                at.update(self._by_offset())
            found = at.get(wanted.offset)
            return "" if found and _is_at(found, wanted) else "no object of this size is at this place"

        return problem

    def _problem(self, wanted: Wanted, name: Name) -> str:
        digest, *owner = name
        try:
            key = ObjectKey(bytes.fromhex(digest), *owner)
        except ValueError as error:
            return f"no key of LMCache: {error}"
        state = self._manager.get_object_state(key)
        if state is None or not _is_at(state.memory_obj, wanted):
            return "the object was evicted or replaced"
        return "" if state.read_lock.is_locked() else "the time of its read lock is over"

    def close(self) -> None:
        """Leaves LMCache's memory as it was."""
        del self._spaces.free

    def _freed(self, address: int, size: int) -> None:
        """Stands for AddressManager.free. Memory in which a read may not have ended is not given to another object."""
        try:
            self._places.freed(address, size)
        except Exception as error:
            _log.error("%d bytes of LMCache's memory at %d stay unused until the restart", size, address)
            survived("lmcache-free", error)
            return
        self._free(address, size)

    def _by_offset(self) -> dict[int, Any]:
        with self._manager._lock:
            states = list(self._manager._objects.values())
        return {state.memory_obj.shm_offset: state.memory_obj for state in states}

    def _check_notified(self) -> None:
        """Allocates and frees a trial object. Raises ConfigError if it is not notified of that."""
        freed: list[int] = []

        def free(address: int, size: int) -> None:
            freed.append(address)
            self._free(address, size)

        self._spaces.free = free
        memory = self._manager._memory_manager
        error, objects = memory.allocate(MemoryLayoutDesc([torch.Size([1])], [torch.uint8]), 1)
        if error == L1Error.SUCCESS:  # else the memory is full, as never at the start
            offset = objects[0].shm_offset
            memory.free(objects)
            if freed != [offset]:
                raise _changed("an object was freed past AddressManager.free")
        self._spaces.free = self._freed


def _address_manager(manager: L1Manager) -> AddressManager:
    """Returns what gives out the manager's memory. Raises ConfigError for other classes than those of LMCache 0.5.6."""
    for owner, method, parameters in [
        (L1Manager, "get_object_state", ["self", "key"]),
        (L1MemoryManager, "allocate", ["self", "layout_desc", "count"]),
        (L1MemoryManager, "free", ["self", "mem_objs"]),
        (AddressManager, "free", ["self", "address", "size"]),
    ]:
        check_parameters(owner, method, parameters)
    memory = _attribute(manager, "_memory_manager")
    if type(memory) is not L1MemoryManager:
        raise ConfigError(
            f"LMCache's L1 is a {type(memory).__name__}; kvlink reads from main memory only: start the server without "
            "Device-DAX and GDS"
        )
    allocator = _attribute(memory, "_allocator")
    allocator = getattr(allocator, "pin_allocator", allocator)
    spaces = allocator.get_address_manager() if hasattr(allocator, "get_address_manager") else None
    spaces = _attribute(allocator, "address_manager") if spaces is None else spaces
    if type(spaces) is not AddressManager:
        raise _changed(f"the memory is given out by a {type(spaces).__name__}")
    _attribute(manager, "_lock")
    _attribute(manager, "_objects")
    return spaces


def check_parameters(owner: type, method: str, parameters: list[str]) -> None:
    """Raises ConfigError unless a class of LMCache has a method with these parameters."""
    found = list(inspect.signature(_attribute(owner, method), follow_wrapped=True).parameters)
    if found not in (parameters, ["self", "args", "kwargs"]):
        raise _changed(f"{owner.__name__}.{method} takes {', '.join(found)}")


def _attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise _changed(f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}")
    return getattr(owner, name)


def _changed(what: str) -> ConfigError:
    return ConfigError(
        f"this version of LMCache is not one that kvlink knows: {what}; install LMCache 0.5.6, or another version of "
        "kvlink"
    )


def _is_at(memory_obj: Any, wanted: Wanted) -> bool:
    return (memory_obj.shm_offset, memory_obj.shm_byte_length) == (wanted.offset, wanted.size)
