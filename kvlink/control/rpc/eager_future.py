# SPDX-License-Identifier: Apache-2.0
"""Futures that notify at once: with very many operations, one turn of the event loop each would dominate the cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvlink.runtime.supervised import guarded, start_awaited, survived

T = TypeVar("T")


class EagerFuture(asyncio.Future[T]):
    """Adds one hook for each side to a future. A hook is called at once and before any callback.

    An exception of a hook does not reach the code that answers or cancels.
    """

    on_answer: Callable[[EagerFuture[T]], None] | None = None
    """Called on the waiting side when a result or an exception is set."""
    on_cancel: Callable[[EagerFuture[T]], object] | None = None
    """Called on the answering side when the future is cancelled."""

    def set_result(self, result: T) -> None:
        """Sets the result and calls `on_answer`."""
        asyncio.Future.set_result(self, result)
        if self.on_answer is not None:
            _call(self.on_answer, self)

    def set_exception(self, exception: type | BaseException) -> None:
        """Sets the exception and calls `on_answer`."""
        super().set_exception(exception)
        if self.on_answer is not None:
            _call(self.on_answer, self)

    def cancel(self, msg: Any = None) -> bool:
        """Cancels the future and calls `on_cancel` if it was pending."""
        cancelled = super().cancel(msg)
        if cancelled and self.on_cancel is not None:
            _call(self.on_cancel, self)
        return cancelled


def _call(hook: Callable[[EagerFuture[T]], object], future: EagerFuture[T]) -> None:
    try:
        hook(future)
    except Exception as error:
        survived("eager future", error)


def eagerly(work: Coroutine[Any, Any, T]) -> EagerFuture[T]:
    """Runs `work` as a task and returns a future of its outcome. Cancelling the future cancels `work`."""
    answer: EagerFuture[T] = EagerFuture()
    working = start_awaited(work)

    def give_up(_: EagerFuture[T]) -> None:
        working.cancel()

    def pass_on(_: asyncio.Future[T]) -> None:
        if answer.done() or working.cancelled():
            answer.cancel()
        elif error := working.exception():
            answer.set_exception(error)
        else:
            answer.set_result(working.result())

    answer.on_cancel = give_up
    working.add_done_callback(guarded("eager future", pass_on))
    return answer
