# SPDX-License-Identifier: Apache-2.0
"""Pulls from the cache of another model are refused before the first byte, also when a model changes while both run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from worker.soft_server import LAYOUT

from kvlink import BlockPool, Ticket, Worker, WorkerConfig
from kvlink.errors import ConfigError, LayoutMismatch
from kvlink.layout.model_identity import identity_text
from kvlink.layout.scope import cache_scope
from kvlink.monitoring.metrics.worker import WorkerCollector

A = identity_text("a" * 16, {"weights": "1111", "rope": '{"rope_theta":10000}', "name": "llama"})
B = identity_text("b" * 16, {"weights": "2222", "rope": '{"rope_theta":10000}', "name": "llama"})
A_ELSEWHERE = identity_text(
    "a" * 16, {"weights": "1111", "rope": '{"rope_theta":10000}', "name": "/mnt/llama"}
)
BLOCKS, HERE = [9, 3, 30], [1, 8, 2]

Start = Callable[[str], Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as opened:

        def one(model: str) -> Worker:
            layout = dataclasses.replace(LAYOUT, model=model)
            pool, config = BlockPool.allocate(layout), WorkerConfig(transports="loopback")
            name = f"worker-{len(workers)}"
            workers.append(opened.enter_context(Worker(pool, name, config=config)))
            return workers[-1]

        workers: list[Worker] = []
        yield one


def offered(owner: Worker, name: str = "r", content: int = 7) -> Ticket:
    owner.pool.numpy()[:] = content
    return Ticket.from_text(owner.offer(name, BLOCKS, readers=1).to_text())


def content(reader: Worker) -> set[int]:
    return set(reader.pool.numpy().tolist())


TAKEN = {
    "same": (A, A),
    "elsewhere": (A, A_ELSEWHERE),
    "a-reader-of-the-library": (A, ""),
    "neither": ("", ""),
}
REFUSED = {
    "other-weights": (B, A, "weights is 1111 here, and 2222 there"),
    "an-owner-without-an-identity": ("", A, "model-id is aaaaaaaaaaaaaaaa here, and absent there"),
    "an-owner-with-free-text": ("llama", A, "there 'llama'"),
    "a-reader-with-free-text": (A, "llama", "model differs: 'llama' here"),
}


@pytest.mark.parametrize(("theirs", "ours"), TAKEN.values(), ids=TAKEN)
def test_taken(start: Start, theirs: str, ours: str) -> None:
    owner, reader = start(theirs), start(ours)
    reader.pull(offered(owner), into=HERE).wait()
    assert 7 in content(reader)


@pytest.mark.parametrize(("theirs", "ours", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_at_the_first_contact_and_later(start: Start, theirs: str, ours: str, words: str) -> None:
    owner, reader = start(theirs), start(ours)
    for name in ("first", "later"):
        ticket = offered(owner, name)
        with pytest.raises(LayoutMismatch) as refused:
            reader.pull(ticket, into=HERE).wait()
        assert words in str(refused.value)
        assert content(reader) == {0}
        reader.release(ticket)


def pulled(reader: Worker, ticket: Ticket) -> None:
    reader.pull(ticket, into=HERE).wait()


def pulled_in_a_list(reader: Worker, ticket: Ticket) -> None:
    reader.pull([ticket], into=HERE).wait()


def relayed(reader: Worker, ticket: Ticket) -> None:
    reader.relay(ticket, HERE).wait()


def prepared(reader: Worker, ticket: Ticket) -> None:
    reader.prepare(ticket, HERE).pull(ticket).wait()


WAYS = [pulled, pulled_in_a_list, relayed, prepared]


@pytest.mark.parametrize("read", WAYS)
def test_weights_that_change_while_the_card_is_known(
    start: Start, read: Callable[[Worker, Ticket], None]
) -> None:
    owner, reader = start(A), start(A)
    read(reader, offered(owner, "before"))
    old = offered(owner, "old")
    owner.pool.model.change(B)
    for ticket in (offered(owner, "new", 8),):
        with pytest.raises(LayoutMismatch, match="weights were changed after it joined"):
            read(reader, ticket)
        assert 8 not in content(reader)
    reader.pool.model.change(B)
    with pytest.raises(LayoutMismatch, match="weights is 2222 here, and 1111 there"):
        read(reader, old)
    read(reader, offered(owner, "both", 9))
    assert 9 in content(reader)


def test_a_model_changes_to_an_identity_only(start: Start) -> None:
    for before, after in ((A, "llama"), ("llama", A)):
        with pytest.raises(ConfigError, match="identity"):
            start(before).pool.model.change(after)


def test_prefixes_are_shared_by_the_same_identity(start: Start) -> None:
    scopes = [cache_scope(one.pool.groups, one.pool.model) for one in map(start, (A, A_ELSEWHERE, B))]
    assert scopes[0] == scopes[1] != scopes[2]
    changed = start(A)
    changed.pool.model.change(B)
    assert cache_scope(changed.pool.groups, changed.pool.model) == scopes[2]


def test_metrics_show_the_models_of_both_ends(start: Start) -> None:
    owner, reader = start(B), start(A)
    with pytest.raises(LayoutMismatch):
        pulled(reader, offered(owner))
    registry = CollectorRegistry()
    registry.register(WorkerCollector([reader]))
    lines = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("kvlink_model_info{")
    ]
    assert [("a" * 16 in line, 'peer=""' in line) for line in lines] == [(True, True), (False, False)]
    assert 'peer="worker-0"' in lines[1]
    assert "b" * 16 in lines[1]
