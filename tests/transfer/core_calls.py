# SPDX-License-Identifier: Apache-2.0
"""Calls each binding of kvlink._core that may wait, on a thread that stops in its first call that waits.

waiting_calls.c stops it. Only the main thread of this module releases it, which needs the GIL. Run by test_gil.py, with
waiting_calls.c preloaded and the driver of tests/fake_cuda. Prints a JSON object: for each binding, whether it waited,
and what it called with the GIL.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import threading
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from kvlink import _core
from kvlink.hardware.kernels import kernel_for

_WAITS, _HOLDS = 1, 2
_NUM_BLOCKS, _BLOCK_BYTES, _EPOCH = 4096, 256, 7
_ALL = array("I", range(_NUM_BLOCKS))
_SOON_S, _LONG_S = 20.0, 3600.0

_without_gil, _with_gil = ctypes.CDLL(None), ctypes.PyDLL(None)


class Case(NamedTuple):
    """`call` is the binding's call. `holder` is another one that takes the lock which `call` then waits for, after
    `locks_before` others."""

    call: Callable[[], object]
    holder: Callable[[], object] | None = None
    locks_before: int = 0


def engine(transport: str = "tcp", fault: str = "") -> tuple[_core.Engine, _core.HostMemory]:
    """Returns an engine that has not started, and the memory of its pool."""
    made = _core.Engine(_EPOCH, [transport], "127.0.0.1", 0, fault, 64, 1, 500.0, 1, ())
    memory = _core.HostMemory(_NUM_BLOCKS * _BLOCK_BYTES, False)
    made.add_pool_region(memory)
    return made, memory


def started(transport: str = "tcp", fault: str = "") -> tuple[_core.Engine, _core.HostMemory]:
    made, memory = engine(transport, fault)
    made.start()
    return made, memory


def opened(fault: str = "") -> tuple[_core.Engine, _core.Engine, _core.Connection, tuple[Any, ...]]:
    """Returns owner, reader, a connection that is not established, and the arguments that establish it."""
    owner, _ = started()
    reader, _ = started("fault+tcp" if fault else "tcp", fault)
    reader.set_control(_core.CompletionQueue())
    name, address, pool_keys, lease_keys, _, _ = owner.access()[0]
    connection = reader.open("fault+tcp" if fault else "tcp", address, _core.PathStats("tcp"))
    number, replies, _, _ = owner.accept(name, connection.hellos(), True, 0)
    return owner, reader, connection, (number, replies, pool_keys, lease_keys, _EPOCH, _SOON_S)


class Pair:
    """An owner and a reader, connected over tcp. With `fault`, reads of the reader go wrong by that plan."""

    def __init__(self, fault: str = "") -> None:
        self.owner, self.reader, self.connection, how = opened(fault)
        regions = self.connection.establish(*how)
        self.memory = _core.HostMemory(_NUM_BLOCKS * _BLOCK_BYTES, False)
        layout = _core.Layout(
            _NUM_BLOCKS, 1, 0, 1, _BLOCK_BYTES, _BLOCK_BYTES, _BLOCK_BYTES, _BLOCK_BYTES, [(0, 0, 0)]
        )
        local = [(self.memory.address, self.memory.bytes)]
        self.planner = _core.Planner(layout, layout, local, [self.memory.bytes], regions)

    def seat(self) -> tuple[int, int, int]:
        return self.owner.grant(next(_leases), 1, 0, _LONG_S)[0]

    def row(self) -> tuple[Any, ...]:
        """The whole pool, in an order that makes each block a read of its own."""
        return self.planner, _ALL[::-2], _ALL[: _NUM_BLOCKS // 2], (0, _NUM_BLOCKS // 2), (0, 1)

    def pull(self) -> Callable[[], Any]:
        """Returns a function that starts to pull the row, under a lease of its own."""
        seat = self.seat()
        return lambda: self.connection.pull(*self.row(), seat, 0, _LONG_S)


def hanging() -> _core.Pull:
    """Returns a pull that does not end by itself."""
    pair = Pair("hang@2")  # the first read is that of the lease table's header
    _kept.append(pair)
    return pair.pull()()  # type: ignore[no-any-return]


def of_leases(call: Callable[[_core.Engine], object]) -> Callable[[], Case]:
    """Returns the case of a call that uses the lease table while another thread has its lock."""

    def case() -> Case:
        owner, _ = started()
        return Case(lambda: call(owner), owner.lease_counts)

    return case


def of_pull(call: Callable[[_core.Pull], object]) -> Callable[[], Case]:
    """Returns the case of a call that uses a pull while another thread has its lock."""

    def case() -> Case:
        pull = hanging()
        return Case(lambda: call(pull), pull.request_cancel)

    return case


def of_transfer(call: Callable[[_core.Transfer], object]) -> Callable[[], Case]:
    """Returns the case of a call that uses a transfer while another thread has its lock, which comes behind that of the
    pull."""

    def case() -> Case:
        pull = hanging()
        transfer = pull.transfer(0)
        assert transfer is not None
        return Case(lambda: call(transfer), pull.request_cancel, 1)

    return case


def of_pair(call: Callable[[Pair], Callable[[], object]]) -> Callable[[], Case]:
    """Returns the case of a call on a connection. `call` prepares it."""

    def case() -> Case:
        pair = Pair()
        _kept.append(pair)
        return Case(call(pair))

    return case


def of_engine(call: Callable[[_core.Engine], object], ready: bool = True) -> Callable[[], Case]:
    def case() -> Case:
        made, _ = started() if ready else engine()
        return Case(lambda: call(made))

    return case


def of_dropped(make: Callable[[], object]) -> Callable[[], Case]:
    """Returns the case of the destructor of what `make` returns, which nothing else refers to."""

    def case() -> Case:
        box = [make()]
        return Case(box.clear)

    return case


def address_of_an_owner() -> bytes:
    owner, _ = started()
    _kept.append(owner)
    return bytes(owner.access()[0][1])


def accept() -> Case:
    owner, reader, connection, _ = opened()
    hellos = connection.hellos()
    _kept.append(reader)
    return Case(lambda: owner.accept("tcp", hellos, True, 0))


def establish() -> Case:
    owner, reader, connection, how = opened()
    _kept.extend([owner, reader])
    return Case(lambda: connection.establish(*how))


def revoke() -> Case:
    """The blocks of a soft lease, whose guards must be enforced."""
    owner, _ = started()
    owner.grant_soft(_ALL[:1], 1, 0.0)
    return Case(lambda: owner.revoke(_ALL[:1]))


def settle_beside_a_copy() -> Case:
    """The word is queued while another thread has the lane."""
    pair = Pair()
    _kept.append(pair)
    return Case(lambda: pair.connection.settle(1, 1 << 40), lambda: time_read(pair))


def time_read(pair: Pair) -> int:
    return pair.connection.time_read(0, 0, pair.memory.address, _BLOCK_BYTES)


def prepared(pair: Pair) -> Callable[[], object]:
    plan, seat = pair.connection.prepare(*pair.row()), pair.seat()
    return lambda: plan.pull(seat, _SOON_S)


def waiting(pair: Pair, sources: int) -> tuple[_core.Pull, _core.PartRow]:
    """Returns a pull that waits for its owner, and what it reads."""
    part = (pair.connection, [(*pair.row(), False)], pair.seat(), 1 if sources else 0, _NUM_BLOCKS // 2)
    return _core.waiting_pull(pair.reader, _SOON_S, sources), part


def connected(pair: Pair) -> Callable[[], object]:
    pull, part = waiting(pair, 0)
    return lambda: pull.connected(0, [part])


def connected_relay(pair: Pair) -> Callable[[], object]:
    pull, part = waiting(pair, 1)
    return lambda: pull.connected_relay(0, part, 1, 1, pair.reader, 0)


def grouped(pair: Pair) -> Callable[[], object]:
    row, seat = (*pair.row(), False), pair.seat()
    return lambda: pair.connection.pull_groups([row], seat, 0, _NUM_BLOCKS // 2, _SOON_S)


def last_connection() -> _core.PreparedPlan:
    pair = Pair()
    _kept.append((pair.owner, pair.reader))
    return pair.connection.prepare(*pair.row())


def only_connection() -> _core.Connection:
    owner, reader, connection, _ = opened()
    _kept.extend([owner, reader])
    return connection


def dialling() -> tuple[_core.Channel, tuple[Any, ...]]:
    """Returns a channel, and the arguments with which it dials an owner."""
    owner, _ = started()
    serving, reader = _core.Channel(), _core.Channel()
    addresses, instance, secret = serving.listen(owner, "127.0.0.1", 0)
    serving.publish(b"a card")
    _kept.extend([serving, reader])
    return reader, (addresses, instance, secret, 0, _SOON_S)


def of_channel(call: Callable[[_core.Channel], object]) -> Callable[[], Case]:
    def case() -> Case:
        made = _core.Channel()
        return Case(lambda: call(made))

    return case


def admitted() -> _core.ChannelClient:
    reader, to = dialling()
    return reader.dial(*to)


def of_client(call: Callable[[_core.ChannelClient], object]) -> Callable[[], Case]:
    def case() -> Case:
        client = admitted()
        return Case(lambda: call(client))

    return case


CASES: dict[str, Callable[[], Case]] = {
    "kernel_target": lambda: Case(
        lambda: _core.kernel_target(0)
    ),  # these two first: what they load stays loaded
    "transports": lambda: Case(_core.transports),
    "probe": lambda: Case(lambda: _core.probe("cma")),
    "CudaKernel.__init__": lambda: Case(lambda: kernel_for(0)),
    "CudaKernel.__del__": of_dropped(lambda: kernel_for(0)),
    "CudaMemory.__init__": lambda: Case(lambda: _core.CudaMemory(1 << 20, 0)),
    "CudaMemory.__del__": of_dropped(lambda: _core.CudaMemory(1 << 20, 0)),
    "HostMemory.__init__": lambda: Case(lambda: _core.HostMemory(1 << 20, False)),
    "HostMemory.__del__": of_dropped(lambda: _core.HostMemory(1 << 20, False)),
    "Engine.__init__": lambda: Case(engine),
    "Engine.__del__": of_dropped(lambda: started()[0]),
    "Engine.disable": of_engine(lambda made: made.disable("tcp", "why"), ready=False),
    "Engine.start": of_engine(lambda made: made.start(), ready=False),
    "Engine.accept": accept,
    "Engine.open": lambda: (
        lambda address, made: Case(lambda: made.open("tcp", address, _core.PathStats("tcp")))
    )(address_of_an_owner(), started()[0]),
    "Engine.grant": of_leases(lambda owner: owner.grant(1, 1, 0, _LONG_S)),
    "Engine.grant_at": of_leases(lambda owner: owner.grant_at(1, [(5, 1 << 40, 1 << 41)], 0, _LONG_S)),
    "Engine.grant_soft": of_leases(lambda owner: owner.grant_soft(_ALL[:1], 1, 0.0)),
    "Engine.grant_soft_at": of_leases(lambda owner: owner.grant_soft_at((5, 1 << 40, 1), _ALL[:1], 1, 0.0)),
    "Engine.withdraw_soft": of_leases(lambda owner: owner.withdraw_soft(5, 1 << 40)),
    "Engine.revoke": of_leases(lambda owner: owner.revoke(_ALL[:1])),
    "Engine.revoke, of what readers may read": revoke,
    "Engine.soft_lease_counts": of_leases(lambda owner: owner.soft_lease_counts()),
    "Engine.lease_at": of_leases(lambda owner: owner.lease_at(5, 1 << 40)),
    "Engine.set_ready": of_leases(lambda owner: owner.set_ready(1, 1)),
    "Engine.extend": of_leases(lambda owner: owner.extend(1, _LONG_S)),
    "Engine.set_ttl": of_leases(lambda owner: owner.set_ttl(1, _LONG_S)),
    "Engine.renew": of_leases(lambda owner: owner.renew(1, 1 << 40)),
    "Engine.abort": of_leases(lambda owner: owner.abort(1)),
    "Engine.settle_local": of_leases(lambda owner: owner.settle_local(1, 1 << 40)),
    "Engine.lease_counts": of_engine(lambda made: made.lease_counts()),
    "Engine.take_ended": of_engine(lambda made: made.take_ended()),
    "Engine.close": of_engine(lambda made: made.close()),
    "Connection.__del__": of_dropped(only_connection),
    "Connection.establish": establish,
    "Connection.pull": of_pair(Pair.pull),
    "Connection.prepare": of_pair(lambda pair: lambda: pair.connection.prepare(*pair.row())),
    "Connection.pull_groups": of_pair(grouped),
    "Connection.settle": settle_beside_a_copy,
    "Connection.time_read": of_pair(lambda pair: lambda: time_read(pair)),
    "Connection.close": of_pair(lambda pair: pair.connection.close),
    "Channel.__init__": lambda: Case(_core.Channel),
    "Channel.__del__": of_dropped(_core.Channel),
    "Channel.listen": lambda: (lambda channel, owner: Case(lambda: channel.listen(owner, "127.0.0.1", 0)))(
        _core.Channel(), started()[0]
    ),
    "Channel.publish": of_channel(lambda channel: channel.publish(b"a card")),
    "Channel.dial": lambda: (lambda reader, to: Case(lambda: reader.dial(*to)))(*dialling()),
    "Channel.close": of_channel(lambda channel: channel.close()),
    "ChannelClient.__del__": of_dropped(admitted),
    "ChannelClient.card": of_client(lambda client: client.card(_SOON_S)),
    "ChannelClient.connect": of_client(
        lambda client: client.connect("owner", 1, "tcp", [b"a hello"], _SOON_S)
    ),
    "ChannelClient.settle": of_client(lambda client: client.settle(1, 1 << 40, _SOON_S)),
    "ChannelClient.end_with_owner": lambda: (
        lambda client, connection: Case(lambda: client.end_with_owner(connection))
    )(admitted(), only_connection()),
    "ChannelClient.close": of_client(lambda client: client.close()),
    "PreparedPlan.__del__": of_dropped(last_connection),
    "PreparedPlan.pull": of_pair(prepared),
    "Pull.begin": of_pull(lambda pull: pull.begin()),
    "Pull.cancel": of_pull(lambda pull: pull.cancel()),
    "Pull.close": of_pull(lambda pull: pull.close()),
    "Pull.connected": of_pair(connected),
    "Pull.connected_relay": of_pair(connected_relay),
    "Pull.cut": of_pull(lambda pull: pull.cut(0)),
    "Pull.failure": of_pull(lambda pull: pull.failure()),
    "Pull.is_open": of_pull(lambda pull: pull.is_open),
    "Pull.notify": of_pull(lambda pull: pull.notify(_core.CompletionQueue(), 1)),
    "Pull.refused": of_pull(lambda pull: pull.refused(0, "why", False)),
    "Pull.request_cancel": of_pull(lambda pull: pull.request_cancel()),
    "Pull.take_actions": of_pull(lambda pull: pull.take_actions()),
    "Pull.transfer": of_pull(lambda pull: pull.transfer(0)),
    "Pull.wait": of_pull(lambda pull: pull.wait(0.0)),
    "Pull.wanted": of_pull(lambda pull: pull.wanted()),
    "Transfer.failure": of_transfer(lambda transfer: transfer.failure()),
    "Transfer.stats": of_transfer(lambda transfer: transfer.stats()),
}

_leases = itertools.count(1)
_kept: list[Any] = []


def tried(case: Case) -> dict[str, Any]:
    """Runs a case beside this thread, which releases it."""
    stopped: list[bool] = []

    def armed(role: int, call: Callable[[], object]) -> None:
        _with_gil.kvlink_arm(role, case.locks_before)
        try:
            _kept.append(call())  # what it returns is not dropped by an armed thread
        finally:
            stopped.append(bool(_with_gil.kvlink_disarm()) and role == _WAITS)

    threads = []
    _with_gil.kvlink_reset()
    if case.holder is not None:
        threads.append(threading.Thread(target=armed, args=(_HOLDS, case.holder)))
        threads[-1].start()
        _without_gil.kvlink_await_held()
    threads.append(threading.Thread(target=armed, args=(_WAITS, case.call)))
    threads[-1].start()
    _without_gil.kvlink_await_arrival()
    _with_gil.kvlink_release()
    for thread in threads:
        thread.join()
    return {"waited": any(stopped), "with_gil": _with_gil.kvlink_calls_with_gil().decode().split()}


def main() -> None:
    """Prints what each case did. The process then ends without destructors: nothing in it is tested further."""
    _with_gil.kvlink_calls_with_gil.restype = ctypes.c_char_p
    found = {}
    for name, case in CASES.items():
        print(name, file=sys.stderr, flush=True)  # the last one is the one that hangs
        found[name] = tried(case())
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
