# SPDX-License-Identifier: Apache-2.0
"""Orders between SGLang's ranks: their messages, and what is done on each."""

from __future__ import annotations

import os
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_servers import PAGES, ROW_BYTES, SLOTS, Scheduler, make_backend
from sglang_stand_in import DisaggregationMode, KVPoll, KVTransferError, network
from test_sglang_handoff import PAGE
from waiting import eventually

from kvlink.errors import ConfigError
from kvlink.integrations.sglang.messages import CHUNK, FAILED, WANT, Chunk, Failed, Malformed, Want
from kvlink.ticket import LeaseSeat, Ticket

GATE_ORDERS = 1000
LANE_ORDERS = int(os.environ.get("KVLINK_TEST_ORDERS", "100000"))
SEED = int(os.environ.get("KVLINK_TEST_SEED") or 0)
FREE = 0xEE
"""Fills free pages of decode: whatever else is found there was written after its request had ended."""


@dataclass
class Request:
    """One part of a request at one server, and what its scheduler does with it next."""

    world: World
    server: Scheduler
    room: int
    object: Any
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    is_open: bool = False
    num_sent: int = 0
    outcome: str = ""
    """ "success", or why it failed."""

    def fail(self) -> None:
        assert self.object.poll() == KVPoll.Failed
        try:
            self.object.failure_exception()
        except KVTransferError as error:
            self.end(str(error) or "no reason")
        self.object.clear()

    def end(self, outcome: str) -> None:
        assert not self.outcome
        self.outcome = outcome
        self.world.release(self)

    def abort(self) -> None:
        self.object.abort()


class Sent(Request):
    """A request at prefill."""

    def step(self) -> None:
        poll = self.object.poll()
        if poll == KVPoll.Failed:
            self.fail()
        elif not self.is_open:
            assert poll in (KVPoll.Bootstrapping, KVPoll.WaitingForInput), "SGLang's scheduler ends"
            if poll == KVPoll.WaitingForInput:
                self.num_sent = self.object.pop_decode_prefix_len() // PAGE
                self.object.init(len(self.pages) - self.num_sent, self.slot)
                self.is_open = True
        elif self.num_sent < len(self.pages) or not self.num_sent:
            self.send()
        else:
            assert poll != KVPoll.Bootstrapping, "SGLang's scheduler ends"
            if poll == KVPoll.Success:
                self.object.clear()
                self.end("success")

    def send(self) -> None:
        end = min(len(self.pages), self.num_sent + self.world.rng.randint(1, 4))
        is_last = end == len(self.pages)
        pages = np.array(self.pages[self.num_sent : end], np.int32)
        self.object.send(pages, [np.array([self.slot])] if is_last else None)
        self.num_sent = end

    def abort(self) -> None:
        """SGLang checks an aborted request once more, or never again."""
        self.object.abort()
        if self.world.rng.random() < 0.5:
            self.end("aborted without a last call")


class Received(Request):
    """A request at decode."""

    def step(self) -> None:
        poll = self.object.poll()
        if poll == KVPoll.Failed:
            self.fail()
        elif not self.is_open:
            assert poll in (KVPoll.Bootstrapping, KVPoll.WaitingForInput), "SGLang's scheduler ends"
            if poll == KVPoll.WaitingForInput:
                self.pages = self.world.take(self.server, self.world.num_pages(self.room))
                pages = np.array(self.pages, np.int32)
                self.object.send_metadata(pages, self.slot, [np.array([self.slot])])
                self.is_open = True
        elif poll == KVPoll.Success:
            self.world.check_bytes(self)
            self.object.clear()
            self.end("success")


class World:
    """One order. The servers stay for the next one, and keep nothing of this one."""

    def __init__(self, servers: list[Scheduler], seed: int, injection: Injection) -> None:
        self.rng = random.Random(seed)
        self.seed, self.injection = seed, injection
        self.prefill, *self.decodes = self.servers = servers
        self.rooms = [self.rng.randint(1, 2**63 - 1) for _ in range(3)]
        self.requests: list[Request] = []
        self.history: list[tuple[int, list[bytes]]] = []
        self.attempts: Counter[tuple[int, bool]] = Counter()
        self.disturbed: set[int] = set()
        """Rooms in which something other than one undisturbed request happened."""
        self.free = {id(server): list(range(PAGES)) for server in servers}
        for decode in self.decodes:
            for plane in decode.kv:
                plane[:] = FREE

    def num_pages(self, room: int) -> int:
        return 1 + room % 7

    def content(self, room: int, page: int, plane: int) -> int:
        return (self.seed * 31 + room % 10007 * 7 + page * 13 + plane * 3) % 200

    def take(self, server: Scheduler, count: int) -> list[int]:
        free = self.free[id(server)]
        self.rng.shuffle(free)
        taken = [free.pop() for _ in range(count)]
        if server is not self.prefill:
            assert all((plane[taken] == FREE).all() for plane in server.kv), (
                "written after its request had ended"
            )
        return taken

    def release(self, request: Request) -> None:
        """Another request of the server writes the pages at once."""
        for plane in request.server.kv:
            plane[request.pages] = FREE
        self.free[id(request.server)] += request.pages

    def check_bytes(self, request: Request) -> None:
        for number, plane in enumerate(request.server.kv):
            for index, page in enumerate(request.pages):
                assert (plane[page] == self.content(request.room, index, number)).all(), "wrong bytes"

    # What may happen.

    def begin_at_prefill(self) -> None:
        room = self.rng.choice(self.rooms)
        if len(self.free[id(self.prefill)]) < 8:
            return
        pages = self.take(self.prefill, self.num_pages(room))
        for number, plane in enumerate(self.prefill.kv):
            for index, page in enumerate(pages):
                plane[page] = self.content(room, index, number)
        slot = self.rng.randrange(SLOTS)
        self.prefill.rows[slot] = np.frombuffer(b"row".ljust(ROW_BYTES), np.uint8)
        self.begin(Sent(self, self.prefill, room, self.prefill.sender(room), pages, slot))

    def begin_at_decode(self) -> None:
        room, decode = self.rng.choice(self.rooms), self.rng.choice(self.decodes)
        if len(self.free[id(decode)]) >= 8:
            receiver = decode.receiver(room, self.prefill)
            self.begin(Received(self, decode, room, receiver, slot=self.rng.randrange(SLOTS)))

    def begin(self, request: Request) -> None:
        self.requests.append(request)
        part = (request.room, isinstance(request, Sent))
        self.attempts[part] += 1
        if self.attempts[part] > 1:
            self.disturbed.add(request.room)

    def step(self) -> None:
        if running := self.running():
            self.rng.choice(running).step()

    def abort(self) -> None:
        if (running := self.running()) and self.rng.random() < 0.3:
            request = self.rng.choice(running)
            self.disturbed.add(request.room)
            request.abort()

    def deliver(self) -> None:
        """Messages between two servers keep their order; those of different servers need not."""
        if network.sent:
            ports = [port for port, _ in network.sent]
            port = self.rng.choice(ports)
            self.history.append(network.sent[ports.index(port)])
            network.deliver(ports.index(port))
            self.listen()

    def repeat(self) -> None:
        """A message of this order comes once more, as it was or changed."""
        if self.history and self.rng.random() < 0.3:
            port, parts = self.rng.choice(self.history)
            self.disturbed.update(self.rooms)
            if self.rng.random() < 0.6:
                parts = self.changed(parts)
            network.sockets[port].deliver(parts)
            self.listen()

    def changed(self, parts: list[bytes]) -> list[bytes]:
        parts, kind = list(parts), self.rng.randrange(5)
        place = self.rng.randrange(1, len(parts))
        if kind == 0:
            del parts[place]
        elif kind == 1:
            parts.append(self.rng.randbytes(8))
        elif kind == 2:
            parts[place] = parts[place][: self.rng.randrange(len(parts[place]) + 1)]
        else:  # most often in the header
            place = min(place, self.rng.randint(1, 2))
            data = bytearray(parts[place] or b"\0")
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            parts[place] = bytes(data)
        return parts

    def stranger(self) -> None:
        """A message of someone else, of any form, to any server."""
        if self.rng.random() > 0.3:
            return
        self.disturbed.update(self.rooms)
        tag = self.rng.choice([WANT, CHUNK, FAILED, b"ABORT", b"KVLINK_STATUS", b"?"])
        room = self.rng.choice([*self.rooms, 0, 2**64 - 1])
        parts = [
            tag,
            *(self.rng.randbytes(self.rng.choice([0, 2, 18, 39])) for _ in range(self.rng.randint(0, 4))),
        ]
        if tag in (b"ABORT", b"KVLINK_STATUS"):
            parts = [tag, str(room).encode(), b"127.0.0.1", b"0", str(self.rng.randbytes(2)).encode()]
        elif self.rng.random() < 0.7:
            parts = self.strange_want(room)
        network.sockets[self.rng.choice(self.servers).manager.rank_port].deliver(parts)
        self.listen()

    def strange_want(self, room: int) -> list[bytes]:
        rng = self.rng
        port = rng.choice([1, *(server.manager.rank_port for server in self.servers)])
        tp_size = rng.choice([1, 2, 3, 8, 65535])
        fields = (rng.choice([4, 1, 3, 65535]), rng.randrange(tp_size), tp_size, rng.choice([1, tp_size]))
        want = Want(
            room,
            rng.getrandbits(63),
            "127.0.0.1",
            port,
            *fields,
            rng.choice([0, 7, 16, 4096, 2**32 - 16]),
            False,
        )
        return want.to_frames()

    # Running an order.

    def listen(self) -> None:
        for server in self.servers:
            server.listen()

    def running(self) -> list[Request]:
        return [request for request in self.requests if not request.outcome]

    def run(self) -> None:
        steps = [
            (self.begin_at_prefill, 3), (self.begin_at_decode, 3), (self.step, 14), (self.deliver, 10),
            (self.abort, 2), (self.repeat, 1), (self.stranger, 1),
        ]  # fmt: skip
        calm = self.rng.random() < 0.3
        acts = [act for act, weight in (steps[:4] if calm else steps) for _ in range(weight)]
        for _ in range(self.rng.randint(10, 60)):
            self.rng.choice(acts)()
        self.settle()

    def settle(self) -> None:
        """Goes on until each request has ended; at last, as time and clients end those that nothing else ends."""
        for endings in (self.nothing_more, self.time_passes, self.clients_leave):
            endings()
            for _ in range(1000):
                before = len(self.running())
                self.settle_once()
                if not self.running() or (before == len(self.running()) and self.is_quiet()):
                    break

    def settle_once(self) -> None:
        while network.sent:
            self.deliver()
        for request in self.running():
            request.step()

    def is_quiet(self) -> bool:
        """Returns whether only time can end what still runs: no message is on its way, and no read either."""
        for decode in self.decodes:
            for room in decode.manager.incoming._rooms.values():
                eventually(lambda room=room: all(pull.done() for pull in room.pulls))
        before = len(self.running())
        for _ in range(12):
            self.settle_once()
        return before == len(self.running()) and not network.sent

    def nothing_more(self) -> None:
        pass

    def time_passes(self) -> None:
        self.prefill.manager.wants._clock = lambda: 1e9
        self.listen()
        self.prefill.manager.bootstrap_timeout = -1

    def clients_leave(self) -> None:
        for request in self.running():
            request.abort()


class Injection:
    """Makes the call with a number raise an error that nobody expects, among calls of kvlink's and SGLang's parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, servers: list[Scheduler]) -> None:
        self.left, self.num_raised = 0, 0
        for server in servers:
            manager = server.manager
            parts: list[tuple[Any, str]] = [
                (manager, "record_failure"), (manager, "resolve_kv_replica_factor"), (manager, "_connect"),
                (manager, "build_receiver_metadata_message"), (manager.aux, "read"), (manager.aux, "write"),
                (manager.outgoing, "offer"), (manager.outgoing, "delivered"), (manager.outgoing, "ended"),
                (manager.incoming, "expect"), (manager.incoming, "poll"), (manager.incoming, "arrived"),
                (manager.incoming, "is_running"), (manager, "failure_of"), (manager, "_misfit"),
            ]  # fmt: skip
            for owner, name in parts:
                monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.num_raised += 1
                raise ZeroDivisionError("injected")
            return call(*args, **options)

        return run


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return make_backend(monkeypatch)


@pytest.fixture
def servers(backend: ModuleType) -> Iterator[list[Scheduler]]:
    modes = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.DECODE)
    made = [Scheduler(backend, mode) for mode in modes]
    yield made
    for server in made:
        server.close()


def try_orders(servers: list[Scheduler], monkeypatch: pytest.MonkeyPatch, count: int) -> Counter[str]:
    """Runs so many orders. Returns how many requests ended how."""
    injection, outcomes = Injection(monkeypatch, servers), Counter[str]()
    for seed in range(SEED * 1_000_000, SEED * 1_000_000 + count):
        injection.left = random.Random(seed).randint(1, 60) if seed % 3 == 0 else 0
        servers[0].manager.wants._clock = lambda: 0.0
        servers[0].manager.bootstrap_timeout = 300.0
        network.sent.clear()
        world = World(servers, seed, injection)
        raised = injection.num_raised
        try:
            world.run()
            injection.left = 0
            outcomes.update(request.outcome[:60] for request in world.requests)
            check_the_end(world, was_injected=injection.num_raised > raised)
        except BaseException as error:
            error.add_note(f"order {seed}") if hasattr(error, "add_note") else None
            raise
    outcomes["injected"] = injection.num_raised
    return outcomes


def check_the_end(world: World, was_injected: bool) -> None:
    """Asserts that each request has ended with a reason, that undisturbed ones are right, and that nothing is left."""
    assert not world.running()
    assert "no reason" not in [request.outcome for request in world.requests]
    for room in world.rooms:
        ours = [request for request in world.requests if request.room == room]
        if len(ours) == 2 and room not in world.disturbed and not was_injected:
            assert world.attempts[room, True] == 1
            assert [request.outcome for request in ours] == ["success", "success"]
    world.requests.clear()
    while network.sent:
        world.deliver()
    for server in world.servers:
        server.manager.collect()
        assert not server.manager.request_status
        assert not server.manager.outgoing._rooms
        assert not server.manager.outgoing._room_of
        assert not server.manager.incoming.num_rooms()
        assert all(cache.worker.lease_counts().active == 0 for cache in server.manager.caches)
        assert all(not rooms for rooms in getattr(server.manager, "addr_to_rooms_tracker", {}).values())
    assert world.prefill.manager.wants.sizes()[0] == 0


def test_random_orders(servers: list[Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = try_orders(servers, monkeypatch, GATE_ORDERS)
    assert outcomes["success"] > GATE_ORDERS
    assert outcomes["injected"] > GATE_ORDERS // 5


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_more_random_orders(servers: list[Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_orders(servers, monkeypatch, LANE_ORDERS)["success"] > LANE_ORDERS


TICKET = Ticket(
    request_id="7/1",
    worker_id="prefill",
    epoch=3,
    agent="127.0.0.1:1",
    seats=(LeaseSeat(1, 1005, 1006),),
    block_ids=array("I", [4, 2]),
    num_tokens=20,
    ready=2,
)
WANTED = Want(7, 1 << 62, "127.0.0.1", 4000, 8, 1, 2, 2, 32, False)
FAILURE = Failed(7, 1 << 62, 3, "no memory – sorry")
WRITTEN = Chunk(7, 1 << 62, 3, 16, 2, True, 3, ((0, TICKET), (2, TICKET)), (b"first", b"", b"row" * 99))


@pytest.mark.parametrize(
    ("message", "kind"),
    [(WANTED, Want), (WRITTEN, Chunk), (FAILURE, Failed), (Chunk(1, 2, 3, 0, 0, False, 1), Chunk)],
)
def test_a_message_survives_the_wire(
    message: Want | Chunk | Failed, kind: type[Want] | type[Chunk] | type[Failed]
) -> None:
    assert kind.from_frames(message.to_frames()) == message


@given(st.data())
def test_bytes_that_changed_are_refused_or_parsed_but_never_crash(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([WANTED, WRITTEN, FAILURE]))
    frames = message.to_frames()
    place = data.draw(st.integers(1, len(frames) - 1))
    frames[place] = data.draw(st.one_of(st.binary(max_size=64), st.just(frames[place][:-1])))
    try:
        parsed = type(message).from_frames(frames)
    except ConfigError:
        return
    assert type(message).from_frames(parsed.to_frames()) == parsed


@pytest.mark.parametrize("message", [WANTED, WRITTEN, FAILURE])
def test_a_message_with_more_or_fewer_frames_is_refused(message: Want | Chunk | Failed) -> None:
    frames = message.to_frames()
    for wrong in (frames[:-1], [*frames, b""], frames[:1], []):
        with pytest.raises(ConfigError, match=r"malformed|kvlink"):
            type(message).from_frames(wrong)


@pytest.mark.parametrize("message", [WANTED, WRITTEN, FAILURE])
def test_another_version_is_refused_by_its_number(message: Want | Chunk | Failed) -> None:
    tag, header, *rest = message.to_frames()
    with pytest.raises(ConfigError, match="uses version 9"):
        type(message).from_frames([tag, b"\x09\x00" + header[2:], *rest])


def test_rows_beyond_the_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds its bound"):
        Chunk.from_frames(Chunk(1, 2, 3, 0, 0, True, 1, (), (bytes(17 << 20),)).to_frames())


def test_the_tags_differ() -> None:
    assert WANTED.to_frames()[0] == WANT != CHUNK == WRITTEN.to_frames()[0]


def test_a_message_that_cannot_be_read_says_which_attempt_it_is_about() -> None:
    for message in (WANTED, WRITTEN, FAILURE):
        tag, header, *rest = message.to_frames()
        for bad in ([tag, header], [tag, b"\x09\x00" + header[2:], *rest], [tag, header + b"x", *rest]):
            with pytest.raises(Malformed) as raised:
                type(message).from_frames(bad)
            assert (raised.value.room, raised.value.generation) == (7, 1 << 62)
    tag, header, host = WANTED.to_frames()
    with pytest.raises(Malformed) as raised:
        Want.from_frames([tag, b"\x01\x00" + header[2:], host])
    assert raised.value.asker == ("127.0.0.1", 4000)
    with pytest.raises(Malformed) as raised:
        Want.from_frames([tag])
    assert raised.value.asker is None
