# SPDX-License-Identifier: Apache-2.0
"""A worker of the tenant publishes a false card. An honest reader must neither read nor write anything for it.

The cells of the table in docs/operate/security.md that need more than one process.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hostile_peers.actors import SECRET, Actor, Known, end_leases, layout, lie, victim, victim_memory

import kvlink
from kvlink.errors import AccessDenied, KVLinkError, PeerUnreachable, TransportUnavailable

SIZE = 1024


class Scene:
    """A reader here, a victim and a liar."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.victim, self.liar = Actor(), Actor()
        self.known: Known = self.victim.do(victim, transport)
        self.pool = kvlink.BlockPool.allocate(layout(), huge_pages=False)
        self.pool.numpy()[:] = ord(".")
        self.reader = kvlink.Worker(self.pool, "reader", transports=transport)

    def pull(self, ticket: kvlink.Ticket, timeout_s: float = 20) -> KVLinkError | None:
        """Pulls into block 5."""
        try:
            self.reader.pull(ticket, [5], timeout_s=timeout_s).wait()
        except KVLinkError as error:
            return error
        return None

    def block(self) -> bytes:
        """Returns what has landed."""
        return bytes(self.pool.numpy()[5 * SIZE : 6 * SIZE])

    def close(self) -> None:
        self.reader.close()
        self.victim.close()
        self.liar.close()


@pytest.fixture
def scene(transport: str) -> Iterator[Scene]:
    made = Scene(transport)
    try:
        yield made
    finally:
        made.close()


REFUSED = (AccessDenied, PeerUnreachable, TransportUnavailable)


@pytest.mark.parametrize(
    ("transport", "made_up", "passed_on", "name", "what"),
    [
        pytest.param("cma", True, False, "liar", "is not worker 'liar'", id="cma-made-up-regions"),
        pytest.param("cma", True, True, "liar", "is not worker 'liar'", id="cma-hello-passed-on"),
        pytest.param("cma", False, True, "liar", "is not worker 'liar'", id="cma-regions-of-the-victim"),
        pytest.param("cma", True, False, "victim", "did not consent", id="cma-name-of-the-victim"),
        pytest.param("cma", True, True, "victim", "does not export", id="cma-all-but-the-regions"),
        pytest.param("shm", True, True, "liar", "did not export", id="shm-made-up-regions"),
        pytest.param("tcp", True, True, "liar", "outside the region", id="tcp-made-up-regions"),
    ],
)
def test_a_false_card_gives_the_reader_no_memory_of_a_third_process(
    scene: Scene, transport: str, made_up: bool, passed_on: bool, name: str, what: str
) -> None:
    ticket = scene.liar.do(lie, transport, scene.known, made_up, passed_on, name)
    error = scene.pull(ticket)
    assert isinstance(error, REFUSED), error
    assert what in str(error)
    assert not any(stolen in scene.block() for stolen in (SECRET, b"vvvv"))
    assert scene.victim.do(victim_memory) == ([1, 2, 3, 4], 1)


@pytest.mark.parametrize("transport", ["cma", "shm", "tcp"])
def test_a_liar_that_leads_to_the_victim_itself_gets_its_offered_memory_and_no_more(scene: Scene) -> None:
    """The liar could have read the same, since it knows the ticket: the page calls this a limit."""
    ticket = scene.liar.do(lie, scene.transport, scene.known, False, True, "victim")
    assert scene.pull(ticket) is None
    assert scene.block() == b"v" * SIZE
    assert scene.victim.do(victim_memory) == ([1, 2, 3, 4], 1), "the settle nonce is made up: the lease lives"


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_port_of_another_service_hears_nothing(scene: Scene) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as service:

        def serve() -> None:
            while True:
                try:
                    accepted, _ = service.accept()
                except OSError:
                    return  # the test ends it
                with accepted, contextlib.suppress(ConnectionResetError):
                    accepted.sendall(b"220 mail.example ESMTP ready\r\n")
                    while more := accepted.recv(4096):
                        heard.append(more)

        serving = threading.Thread(target=serve)
        serving.start()
        port = service.getsockname()[1]
        error = scene.pull(scene.liar.do(lie, "tcp", scene.known, False, True, "liar", port))
        service.shutdown(socket.SHUT_RDWR)
        serving.join()
    assert isinstance(error, PeerUnreachable), error
    assert "not a kvlink tcp owner" in str(error)
    assert heard == []


@pytest.mark.parametrize("transport", ["cma", "shm", "tcp"])
def test_the_holder_of_a_soft_ticket_ends_no_lease(scene: Scene) -> None:
    assert not any(scene.liar.do(end_leases, scene.transport, scene.known))
    assert scene.pull(scene.known.soft) is None
    assert scene.block() == b"v" * SIZE
    assert scene.victim.do(victim_memory) == ([1, 2, 3, 4], 1)
