# SPDX-License-Identifier: Apache-2.0
"""Processes of a simulation: all run on one loop of virtual time, and each can be stopped, continued and killed.

Tasks, timers and callbacks carry the process that started them in their context. They are held back while it is
stopped, and for ever when it was killed. Each has a clock of its own, which began at another time than the others' and
runs a little faster or slower.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any

from virtual_time import VirtualLoop

_of: ContextVar[Process | None] = ContextVar("process", default=None)
of_call: ContextVar[Steps | None] = ContextVar("call", default=None)
"""The call that a process serves, and the tasks that it starts."""


class Steps:
    """Counts callbacks."""

    num = 0


class State(Enum):
    """Says whether a process runs."""

    RUNS = "runs"
    STOPPED = "stopped"
    DEAD = "dead"


_SETTLED_S = 3e-9
"""Timers fire so much later that the clock of their process has passed their time in spite of rounding."""
_MOST_AT_ONCE = 200_000
"""So many callbacks run at one time of the clock only if a timer is always due again at once."""


class _Deferrable:
    """A callback that asks its process whether it may run."""

    __slots__ = ("args", "callback", "context", "handle", "process")

    def __init__(
        self, process: Process, callback: Callable[..., object], args: Any, context: Context
    ) -> None:
        self.process, self.callback, self.args, self.context = process, callback, args, context
        self.handle: asyncio.Handle

    def __call__(self) -> None:
        if self.process.state is State.RUNS:
            self.process.num_steps += 1
            if (steps := self.context.get(of_call)) is not None:
                steps.num += 1
            self.callback(*self.args)
        else:
            self.process.deferred.append(self)


class SimulatedLoop(VirtualLoop):
    """A VirtualLoop that knows processes."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Process] = []
        self._at_once = [0.0, 0]

    def time(self) -> float:
        """Returns the time by the clock of the process that asks."""
        process, true_s = _of.get(), super().time()
        return true_s if process is None else process.began_s + process.pace * true_s

    def true_time(self) -> float:
        """Returns the time of the simulation."""
        return super().time()

    def at(self, true_s: float, callback: Any, *args: Any, context: Context) -> asyncio.TimerHandle:
        """As `call_at`, by the time of the simulation."""
        process, callback_of = context.get(_of), callback
        if process is not None:
            callback_of = _Deferrable(process, callback, args, context)
            args = ()
        timer = super().call_at(true_s, callback_of, *args, context=context)
        if process is not None:
            callback_of.handle = timer
        return timer

    def check_time_passes(self) -> None:
        """Raises RuntimeError if it does not."""
        if self._at_once[0] != (true_s := super().time()):
            self._at_once = [true_s, 0]
        self._at_once[1] += 1
        if self._at_once[1] > _MOST_AT_ONCE:
            raise RuntimeError("a timer is always due again at once: the clock stands still")

    def end_processes(self) -> None:
        """When the simulation is over: what is left of them runs, to be cancelled."""
        for process in self.processes:
            process.release(self)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        context = copy_context() if context is None else context
        process = context.get(_of)
        self.check_time_passes()
        if process is None:
            return super().call_soon(callback, *args, context=context)
        call = _Deferrable(process, callback, args, context)
        call.handle = super().call_soon(call, context=context)
        return call.handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        asking = _of.get()
        true_s = when if asking is None else (when - asking.began_s) / asking.pace + _SETTLED_S
        return self.at(true_s, callback, *args, context=copy_context() if context is None else context)


def _loop() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


def true_time() -> float:
    """Returns the time of the simulation, which no process knows."""
    return _loop().true_time()


class Process:
    """One of `host`, which others know it by."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.began_s, self.pace = random.uniform(0.0, 10_000.0), random.uniform(0.995, 1.005)
        """Its clock shows began_s + pace * t at the time t of the simulation."""
        self.says_more = b"\xc0\x3e\x01" if random.random() < 0.3 else b""
        """A newer release writes a field that this one does not know behind each message."""
        self.num_steps = 0
        """Counts the callbacks that it ran."""
        self.host = host
        self.state = State.RUNS
        self.deferred: list[_Deferrable] = []
        self._context = copy_context()
        self._context.run(_of.set, self)
        _loop().processes.append(self)

    def __repr__(self) -> str:
        return f"{self.name} ({self.state.value})"

    @property
    def runs(self) -> bool:
        return self.state is State.RUNS

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `work` as a part of this process."""
        return self._context.copy().run(asyncio.get_running_loop().create_task, work)

    def call_at(self, true_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """As of loops, for what comes in from outside, by the time of the simulation."""
        return _loop().at(true_s, callback, *args, context=self._context.copy())

    def stop(self) -> None:
        if self.state is State.RUNS:
            self.state = State.STOPPED

    def go_on(self) -> None:
        if self.state is State.STOPPED:
            self.release(asyncio.get_running_loop())

    def kill(self) -> None:
        self.state = State.DEAD

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets run what was held back."""
        self.state = State.RUNS
        waiting, self.deferred = self.deferred, []
        for call in waiting:
            if not call.handle.cancelled():
                call.handle = loop.call_soon(call, context=call.context)
