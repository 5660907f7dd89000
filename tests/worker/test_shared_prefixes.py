# SPDX-License-Identifier: Apache-2.0
"""Prefixes that workers find in each other's caches: bytes are equal, and what was evicted or differs is not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from waiting import closed_port, eventually
from worker.soft_server import LAYOUT, blocks_of

from kvlink import BlockPool, Ticket, Worker, WorkerConfig
from kvlink.control import CoordinatorClient
from kvlink.control.values import Prefix, PrefixChanges
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorUnavailable, PeerUnreachable, StaleBlocks, StaleReason
from kvlink.layout import KVLayout
from kvlink.layout.scope import cache_scope
from kvlink.runtime.background import ControlThread
from kvlink.worker.prefixes import SharedPrefix

NAMED = dataclasses.replace(LAYOUT, model="llama at 1a2b")
BLOCKS, HERE = [9, 3, 30, 4], [1, 8, 2, 40]
PROMPT = [bytes([number]) * 16 for number in range(4)]
OTHER = [bytes([number]) * 16 for number in range(4, 8)]
ALIKE = [digest[:8] + b"differs!" for digest in PROMPT]


class Fleet:
    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self.store = MemoryStore()
        self.coordinator = self.start()

    def start(self, port: int = 0) -> Coordinator:
        control = ControlThread.shared()

        async def start() -> Coordinator:
            coordinator = Coordinator(self.store)
            await coordinator.start(port=port)
            return coordinator

        coordinator = control.run(start())
        self._opened.callback(lambda: control.run(coordinator.close()))
        return coordinator

    def worker(self, name: str, layout: KVLayout = NAMED, **options: object) -> Worker:
        options = {"coordinator": self.coordinator.address, **options}
        config = WorkerConfig(transports="loopback", **options)  # type: ignore[arg-type]
        return self._opened.enter_context(Worker(BlockPool.allocate(layout), name, config=config))

    def find(self, reader: Worker, digests: list[bytes], **options: object) -> list[SharedPrefix]:
        return reader.find_prefix(digests, tokens_per_digest=4, **options).result(20)  # type: ignore[arg-type]

    def found(self, reader: Worker, digests: list[bytes], **options: object) -> list[SharedPrefix]:
        """Waits until it is found: publishing does not block."""
        return eventually(lambda: self.find(reader, digests, **options))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def peers(opened: ExitStack) -> Fleet:
    return Fleet(opened)


def test_a_peer_pulls_the_prefix_that_it_has_in_common(peers: Fleet) -> None:
    owner, reader = peers.worker("owner"), peers.worker("reader")
    for at, block in enumerate(BLOCKS):
        blocks_of(owner)[:, block] = at + 1
    blocks_of(reader)[:] = 0xEE
    owner.publish_prefix(owner.offer_soft("system prompt", BLOCKS, digests=PROMPT))
    (found,) = peers.found(reader, [*PROMPT[:3], b"another question", b"and more of it.."], own_tokens=4)
    assert found.num_tokens == 12
    assert "seat" not in repr(found)
    assert str(found) == "SharedPrefix(12 tokens on owner)"
    reader.pull(list(found.tickets), HERE[:3], tokens=(4, found.num_tokens)).wait()
    assert [int(blocks_of(reader)[0, block].max()) for block in HERE] == [0xEE, 2, 3, 0xEE]
    assert peers.find(reader, PROMPT, own_tokens=16) == []
    assert peers.find(reader, OTHER) == []
    stats = reader.stats()
    assert stats.prefix_lookups["found"] == 1
    assert stats.prefix_lookups["none"] >= 1
    assert owner.stats().prefixes == 1


def test_what_was_evicted_is_withdrawn_and_until_then_stale(peers: Fleet) -> None:
    owner, reader = peers.worker("owner"), peers.worker("reader")
    owner.publish_prefix(owner.offer_soft("turn", BLOCKS, digests=PROMPT))
    (found,) = peers.found(reader, PROMPT)
    owner.revoke([30])
    with pytest.raises(StaleBlocks) as stale:
        reader.pull(list(found.tickets), HERE, tokens=(0, 16)).wait()
    assert stale.value.why is StaleReason.EVICTED
    owner.publish_prefix(owner.offer_soft("other", [50], digests=OTHER[:1]))  # wakes the publisher
    eventually(lambda: not peers.find(reader, PROMPT))
    assert peers.found(reader, OTHER)


class Liar:
    """Publishes in the name of a worker whatever it likes."""

    def __init__(self, peers: Fleet, name: str) -> None:
        self.worker = peers.worker(name)
        self._coordinator = peers.coordinator.address

    def publish(self, ticket: Ticket, digests: list[bytes] = PROMPT) -> None:
        card = self.worker.card
        keys = b"".join(digest[:8] for digest in digests)
        scope = cache_scope(self.worker.pool.groups)
        prefix = Prefix("of a liar", 60.0, 0, 1, scope, 4, keys, ticket.to_bytes())

        async def publish() -> None:
            async with CoordinatorClient(self._coordinator) as client:
                client.act_as(self.worker.secret)
                await client.publish_prefixes(PrefixChanges(card.worker_id, card.epoch, (prefix,)))

        ControlThread.shared().run(publish())


def evicted(liar: Worker, _: Ticket) -> Ticket:
    ticket = liar.offer_soft("evicted", BLOCKS, digests=PROMPT)
    liar.revoke(BLOCKS)
    return ticket


def unreachable(liar: Worker, _: Ticket) -> Ticket:
    with closed_port() as nobody:
        gone = dataclasses.replace(liar.offer_soft("gone", BLOCKS, digests=PROMPT), agent=nobody)
        return liar.offers.sign(gone)


LIES: dict[str, tuple[Callable[[Worker, Ticket], Ticket], int]] = {
    "it has evicted the blocks": (evicted, 1),
    "nobody listens there": (unreachable, 1),
    "the ticket is of another prompt": (
        lambda liar, _: liar.offer_soft("other", BLOCKS, digests=[PROMPT[0], *OTHER[:3]]),
        1,
    ),
    "the ticket has another prompt": (lambda liar, _: liar.offer_soft("other", BLOCKS, digests=OTHER), 0),
    "the ticket is another's": (lambda liar, ticket: ticket, 0),
    "the ticket is not signed": (
        lambda liar, _: dataclasses.replace(evicted(liar, _), signature=b""),
        0,
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_claims_the_longest_prefix_and_fails_is_asked_last(peers: Fleet, lie: str) -> None:
    owner, reader, liar = peers.worker("owner"), peers.worker("reader"), Liar(peers, "liar")
    blocks_of(owner)[:, BLOCKS] = 7
    honest = owner.offer_soft("honest", BLOCKS[:3], digests=PROMPT[:3])
    owner.publish_prefix(honest)
    peers.found(reader, PROMPT)
    make, num_found = LIES[lie]
    liar.publish(make(liar.worker, honest))
    for found in (first := peers.find(reader, PROMPT)):
        assert found.tickets[0].worker_id == "liar"
        with suppress(StaleBlocks, PeerUnreachable):
            reader.pull(
                list(found.tickets), HERE[: found.num_tokens // 4], tokens=(0, found.num_tokens)
            ).wait()
    assert len(first) == num_found
    for _ in range(2):
        [found] = peers.find(reader, PROMPT)
        assert (found.tickets[0].worker_id, found.num_tokens) == ("owner", 12)
        reader.pull(list(found.tickets), HERE[:3], tokens=(0, 12)).wait()
    assert (blocks_of(reader)[0, HERE[:3]] == 7).all()


def test_a_directory_that_names_another_prompt_is_not_believed(peers: Fleet) -> None:
    """Digests that agree in their first 8 bytes only, as those of a faulty directory would."""
    owner, reader = peers.worker("owner"), peers.worker("reader")
    owner.publish_prefix(owner.offer_soft("prompt", BLOCKS, digests=PROMPT))
    (found,) = peers.found(reader, [PROMPT[0], *ALIKE[1:]])
    assert found.num_tokens == 4
    assert peers.find(reader, ALIKE) == []


@pytest.mark.parametrize("field", ["model", "dtype"])
def test_caches_of_other_models_are_not_found(peers: Fleet, field: str) -> None:
    owner, reader = (
        peers.worker("owner"),
        peers.worker("reader", dataclasses.replace(NAMED, **{field: "other"})),
    )
    same = peers.worker("same")
    owner.publish_prefix(owner.offer_soft("prompt", BLOCKS, digests=PROMPT))
    assert peers.found(same, PROMPT)
    assert peers.find(reader, PROMPT) == []


def test_the_scope_is_that_of_the_model_and_not_of_the_server() -> None:
    scope = cache_scope([NAMED])
    fewer = dataclasses.replace(NAMED, num_blocks=32)
    assert cache_scope([fewer]) == scope
    half = dataclasses.replace(NAMED, num_heads=1, tp_size=2, tp_rank=1, first_head=1)
    assert cache_scope([half]) == scope
    for other in (
        dataclasses.replace(NAMED, model="another"),
        dataclasses.replace(NAMED, dtype="float8"),
        dataclasses.replace(NAMED, row_bytes=8),
        dataclasses.replace(NAMED, planes=NAMED.planes[:2]),
    ):
        assert cache_scope([other]) != scope
    assert cache_scope([NAMED, NAMED]) != scope
    with pytest.raises(ConfigError, match="names no model"):
        cache_scope([LAYOUT])


def test_a_ticket_of_another_tenant_is_not_used(peers: Fleet, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 32)
    owner = peers.worker("owner", ticket_keys=str(tmp_path / "a"))
    friend = peers.worker("friend", ticket_keys=str(tmp_path / "a"))
    stranger = peers.worker("stranger", ticket_keys=str(tmp_path / "b"))
    owner.publish_prefix(owner.offer_soft("prompt", BLOCKS, digests=PROMPT))
    assert peers.found(friend, PROMPT)
    assert peers.find(stranger, PROMPT) == []


def test_a_withdrawn_prefix_is_not_found_and_its_offer_goes_on(peers: Fleet) -> None:
    owner, reader = peers.worker("owner"), peers.worker("reader")
    ticket = owner.offer_soft("prompt", BLOCKS, digests=PROMPT)
    owner.publish_prefix(ticket)
    assert peers.found(reader, PROMPT)
    owner.withdraw_prefix("prompt")
    eventually(lambda: not peers.find(reader, PROMPT))
    reader.pull(ticket, HERE).wait()
    owner.withdraw_prefix("prompt")


def test_a_prefix_ends_with_its_worker(peers: Fleet) -> None:
    owner, reader = peers.worker("owner"), peers.worker("reader")
    owner.publish_prefix(owner.offer_soft("prompt", BLOCKS, digests=PROMPT))
    assert peers.found(reader, PROMPT)
    owner.close()
    eventually(lambda: not peers.find(reader, PROMPT))


def test_each_of_several_coordinators_knows_the_prefix(peers: Fleet) -> None:
    """They share a store, as they do on etcd, and each has a directory of its own."""
    other = peers.start()
    owner = peers.worker("owner", coordinator=f"{peers.coordinator.address},{other.address}")
    owner.publish_prefix(owner.offer_soft("prompt", BLOCKS, digests=PROMPT))
    for coordinator in (peers.coordinator, other):
        reader = peers.worker(f"reader at {coordinator.address}", coordinator=coordinator.address)
        assert peers.found(reader, PROMPT)
    assert owner.stats().prefixes == 1


@pytest.mark.verify
def test_a_coordinator_that_restarts_gets_all_prefixes_again(peers: Fleet) -> None:
    owner, reader = peers.worker("owner"), peers.worker("reader")
    owner.publish_prefix(owner.offer_soft("prompt", BLOCKS, digests=PROMPT))
    assert peers.found(reader, PROMPT)
    port = int(peers.coordinator.address.rpartition(":")[2])
    ControlThread.shared().run(peers.coordinator.close())
    with pytest.raises(CoordinatorUnavailable):
        peers.find(reader, PROMPT)
    peers.store = MemoryStore()
    peers.start(port)

    def found() -> bool:
        try:
            return bool(peers.find(reader, PROMPT))
        except CoordinatorUnavailable:
            return False

    assert eventually(found)


def test_what_cannot_be_published_is_refused(peers: Fleet) -> None:
    owner, other = peers.worker("owner"), peers.worker("other")
    soft = owner.offer_soft("prompt", BLOCKS, digests=PROMPT)
    alone = Worker(BlockPool.allocate(NAMED), "alone", config=WorkerConfig(transports="loopback"))
    nameless = peers.worker("nameless", LAYOUT)
    for worker, ticket, says in (
        (owner, owner.offer("pinned", [50]), "needs a ticket of offer_soft with digests"),
        (owner, owner.offer_soft("plain", [51]), "needs a ticket of offer_soft with digests"),
        (other, soft, "the ticket is of owner"),
        (alone, soft, "needs a coordinator"),
        (nameless, nameless.offer_soft("prompt", BLOCKS, digests=PROMPT), "names no model"),
    ):
        with pytest.raises(ConfigError, match=says):
            worker.publish_prefix(ticket)
    with pytest.raises(ConfigError, match="ttl_s must be in"):
        owner.publish_prefix(soft, ttl_s=0.0)
    with pytest.raises(ConfigError, match="needs a coordinator"):
        alone.find_prefix(PROMPT, tokens_per_digest=4)
    with pytest.raises(ConfigError, match="names no model"):
        nameless.find_prefix(PROMPT, tokens_per_digest=4)
    with pytest.raises(ConfigError, match="8 bytes or more"):
        owner.find_prefix([b"short"], tokens_per_digest=4)
    for wrong in ({"tokens_per_digest": 0}, {"own_tokens": -1}, {"most": 17}):
        with pytest.raises(ConfigError, match="finding a prefix"):
            owner.find_prefix(PROMPT, **{"tokens_per_digest": 4, **wrong})
    alone.close()
