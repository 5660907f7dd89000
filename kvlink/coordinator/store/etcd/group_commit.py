# SPDX-License-Identifier: Apache-2.0
"""Implements group commit: small transactions are batched while others run, and sent to etcd as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvlink.coordinator.store.etcd.api import Etcd, StoreFull, nested, writes
from kvlink.errors import CoordinatorError, CoordinatorUnavailable
from kvlink.runtime.supervised import guarded, start_job, survived
from kvlink.v1 import etcd_pb2 as pb

_MOST_OPS = 64
"""Transactions in one batch. Their operations count too: etcd accepts 128 in all (--max-txn-ops) at each nesting."""
_MOST_BYTES = 512 << 10
"""etcd accepts 1.5 MiB (--max-request-bytes)."""
_MAX_RUNNING = 8


class _Waiting(NamedTuple):
    txn: pb.TxnRequest
    keys: tuple[bytes, ...]
    size: int
    done: asyncio.Future[pb.TxnResponse]


class GroupCommit:
    """Batches transactions. Those that share a key never go in one batch, because etcd compares before it writes.

    A write is done when `written(revision)` returns, because then this coordinator's mirror has it too.
    """

    def __init__(self, etcd: Etcd, written: Callable[[int], Awaitable[None]]) -> None:
        self._etcd = etcd
        self._written = written
        self._waiting: deque[_Waiting] = deque()
        self._running: set[asyncio.Task[None]] = set()

    def submit(self, txn: pb.TxnRequest, *keys: bytes) -> asyncio.Future[pb.TxnResponse]:
        """Executes `txn`, which depends on `keys` only. Raises like Etcd.commit."""
        done: asyncio.Future[pb.TxnResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(txn, keys, txn.ByteSize(), done))
        if len(self._running) < _MAX_RUNNING:
            asyncio.get_running_loop().call_soon(guarded("group commit", self._send))
        return done

    async def close(self) -> None:
        """Cancels waiting transactions. Closing again has no effect."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for waiting in self._waiting:
            waiting.done.cancel()
        self._waiting.clear()

    def _send(self) -> None:
        while self._waiting and len(self._running) < _MAX_RUNNING:
            task = start_job("commit", self._commit(self._batch()))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            task.add_done_callback(guarded("commit ended", self._sent))

    def _sent(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._send()

    def _batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        later: list[_Waiting] = []
        used: set[bytes] = set()
        size = 0
        while self._waiting and len(batch) < _MOST_OPS and size < _MOST_BYTES:
            waiting = self._waiting.popleft()
            if not used.isdisjoint(waiting.keys) or (batch and _is_large(waiting)):
                later.append(waiting)
                if len(later) > _MOST_OPS:
                    break
                used.update(waiting.keys)  # keeps later transactions of the same keys behind this one
                continue
            batch.append(waiting)
            used.update(waiting.keys)
            size += waiting.size
            if _is_large(waiting):
                break
        self._waiting.extendleft(reversed(later))
        return batch

    async def _commit(self, batch: list[_Waiting]) -> None:
        try:
            if len(batch) == 1:
                reply = await self._etcd.commit(batch[0].txn)
                replies = [reply]
            else:
                reply = await self._etcd.commit(pb.TxnRequest(success=[nested(each.txn) for each in batch]))
                replies = [response.response_txn for response in reply.responses]
            if any(answer.succeeded for answer in replies):
                await self._written(reply.header.revision)
            for waiting, answer in zip(batch, replies, strict=True):
                if not waiting.done.done():
                    waiting.done.set_result(answer)
        except CoordinatorUnavailable as error:
            _fail(batch, error)
        except StoreFull as error:
            _fail([waiting for waiting in batch if writes(waiting.txn)], error)
            rest = [waiting for waiting in batch if not writes(waiting.txn)]
            if len(rest) == len(batch):
                _fail(batch, error)
            elif rest:
                await self._commit(rest)
        except CoordinatorError as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # finds the transaction that etcd refuses
                for waiting in batch:
                    await self._commit([waiting])
        except asyncio.CancelledError:
            for waiting in batch:
                waiting.done.cancel()
            raise
        except Exception as error:
            survived("commit", error)
            _fail(batch, error)


def _is_large(waiting: _Waiting) -> bool:
    txn = waiting.txn
    return max(len(txn.compare), len(txn.success), len(txn.failure)) > _MOST_OPS // 2


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.done.done():
            waiting.done.set_exception(error)
