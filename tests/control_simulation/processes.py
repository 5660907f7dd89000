# SPDX-License-Identifier: Apache-2.0
"""Processes of a simulation: all run on one loop of virtual time, and each can be stopped, continued and killed.

Tasks, timers and callbacks carry the process that started them in their context. They are held back while it is
stopped, and for ever when it was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any

from virtual_time import VirtualLoop

_of: ContextVar[Process | None] = ContextVar("process", default=None)


class State(Enum):
    """Says whether a process runs."""

    RUNS = "runs"
    STOPPED = "stopped"
    DEAD = "dead"


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
            self.callback(*self.args)
        else:
            self.process.deferred.append(self)


class SimulatedLoop(VirtualLoop):
    """A VirtualLoop that knows processes."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Process] = []

    def end_processes(self) -> None:
        """When the simulation is over: what is left of them runs, to be cancelled."""
        for process in self.processes:
            process.release(self)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        context = copy_context() if context is None else context
        process = context.get(_of)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        call = _Deferrable(process, callback, args, context)
        call.handle = super().call_soon(call, context=context)
        return call.handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        context = copy_context() if context is None else context
        process = context.get(_of)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        call = _Deferrable(process, callback, args, context)
        call.handle = timer = super().call_at(when, call, context=context)
        return timer


class Process:
    """One of `host`, which others know it by."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.state = State.RUNS
        self.deferred: list[_Deferrable] = []
        self._context = copy_context()
        self._context.run(_of.set, self)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        loop.processes.append(self)

    def __repr__(self) -> str:
        return f"{self.name} ({self.state.value})"

    @property
    def runs(self) -> bool:
        return self.state is State.RUNS

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `work` as a part of this process."""
        return self._context.copy().run(asyncio.get_running_loop().create_task, work)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """As of loops, for what comes in from outside."""
        return asyncio.get_running_loop().call_at(when, callback, *args, context=self._context.copy())

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
