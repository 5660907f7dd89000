# SPDX-License-Identifier: Apache-2.0
"""The loops of integrations/vllm that run in the scheduler's process."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from loops.loops_of_worker import coordinator, status
from loops.rows import failing, scene
from waiting import eventually

from kvlink.control import CoordinatorClient, Offer
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.coordinator import Coordinator
from kvlink.integrations.vllm.chats.peer_prefixes import PeerPrefixes
from kvlink.integrations.vllm.prefill.announcements import Announcements
from kvlink.integrations.vllm.wire.handoff import Handoff, Owner
from kvlink.runtime.background import ControlThread
from kvlink.ticket import SHARED_SEAT, LeaseSeat
from kvlink.ticket.prefix_digests import PrefixDigests


def handoff(name: str) -> Handoff:
    owners, seats = (Owner("prefill", 1, "127.0.0.1:1"),), (LeaseSeat(1, 0x0123456789ABCDEF, SHARED_SEAT),)
    digests = PrefixDigests.of([name.encode() * 16])
    return Handoff(name, owners, seats, (array("I", [1]),), (16,), 16, "", 60.0, digests=digests)


@contextmanager
def with_prefill() -> Iterator[tuple[Coordinator, CoordinatorClient]]:
    """A coordinator that a worker has joined."""
    from control.cards import make_card

    async def join() -> CoordinatorClient:
        client = CoordinatorClient(serving.address)
        await client.join(make_card())
        return client

    with coordinator() as serving:
        client = ControlThread.shared().run(join())
        yield serving, client
        ControlThread.shared().run(client.close())


@scene("server prefix publisher")
def a_publisher_of_a_servers_prefixes() -> None:
    with with_prefill() as (serving, _), failing(PrefixPublisher, "step"):
        prefixes = PeerPrefixes(serving.address, 8)
        prefixes.publish(handoff("a"), bytes(16))
        eventually(lambda: status(serving).prefixes == 1)
        prefixes.close()


@scene("prefix of a server")
def a_prefix_of_a_server() -> None:
    with with_prefill() as (serving, _), failing(PeerPrefixes, "_publish"):
        prefixes = PeerPrefixes(serving.address, 8)
        prefixes.publish(handoff("a"), bytes(16))
        prefixes.publish(handoff("b"), bytes(16))
        eventually(lambda: status(serving).prefixes == 1)
        prefixes.close()


@scene("parts of a handoff")
def parts_of_a_handoff() -> None:
    with with_prefill() as (serving, client), failing(Announcements, "_claim"):
        announcements = Announcements(serving.address, 5.0)
        first = announcements.follow("a", None)
        eventually(lambda: first.why_ended == "its follower has stopped")
        second = announcements.follow("b", None)
        ControlThread.shared().run(client.offer(Offer("b/0", "prefill", 1, 30.0, 0, 1, 1, b"no part")))
        eventually(lambda: second.why_ended not in ("", "its follower has stopped"))
        announcements.close()
