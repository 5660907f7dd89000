# SPDX-License-Identifier: Apache-2.0
"""Two processes' worth of continuous batching, on which a test makes what clients, routers and operators can do.

`World` makes events in any order and remembers what each must lead to. `settled` runs both loops until nothing is left
to do, and checks it.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from stepped_batching import Stepped, expected

from kvlink import Ticket
from kvlink.errors import KVLinkError, TransferError
from kvlink.integrations.transformers import Handoff, Prefix
from kvlink.integrations.transformers.handoff_message import fingerprint

PROMPTS = [
    (5,),
    (1, 2, 3),
    tuple(range(8)),
    (*range(8), 40, 41, 42, 43, 44),
    tuple(range(10, 30)),
    (*range(8), *range(20, 42)),
]


@dataclass
class Side:
    """A peer, and what clients of it were promised."""

    peer: Stepped
    accepted: Counter[str] = field(default_factory=Counter)
    """How often each id was accepted, and so how many answers there must be."""
    limits: set[tuple[str, tuple[int, ...], int]] = field(default_factory=set)
    may_be_lost: Counter[str] = field(default_factory=Counter)
    """How many of them may get no answer: a hard stop of transformers drops those in its input queue without one."""
    cancelled: set[str] = field(default_factory=set)
    lied_to: set[str] = field(default_factory=set)
    """Ids of requests whose peer lied about which tokens were generated. Their own tokens are the liar's."""


_CACHES = {"a": {"page_size": 4, "num_blocks": 24}, "b": {"page_size": 8, "num_blocks": 10}}


def _peer(name: str) -> Stepped:
    return Stepped(name, **_CACHES[name])


class World:
    """Peers "a" and "b" with different page sizes, and the messages that a router has of them."""

    def __init__(self) -> None:
        self.sides = {name: Side(_peer(name)) for name in _CACHES}
        self.messages: list[tuple[str, Handoff | Prefix]] = []
        self.futures: list[tuple[str, Future[Any]]] = []
        self._aborted: set[str] = set()

    def close(self) -> None:
        for side in self.sides.values():
            side.peer.close()

    def forget(self) -> None:
        """Makes the world ready for another history. What was ended is made again."""
        self.messages, self.futures = [], []
        for name, side in self.sides.items():
            peer = side.peer
            if peer.handoff._closed or not peer.manager.is_running():
                peer.close()
                peer = _peer(name)
            peer.outputs, peer.fails_next = [], False
            self.sides[name] = Side(peer)

    # What clients, routers and operators do. Nothing here may raise anything but KVLinkError with a reason.

    def own(self, at: str, request_id: str, prompt: tuple[int, ...], num_new: int) -> None:
        side = self.sides[at]
        if side.peer.handoff._closed and request_id in side.accepted:
            return  # without a handoff, transformers mixes two requests of one id up
        if side.peer.manager.add_request(list(prompt), request_id, max_new_tokens=num_new) is not None:
            self._promise(side, request_id, prompt, num_new)

    def prefill(self, at: str, request_id: str | None, prompt: tuple[int, ...]) -> None:
        with Refused():
            self._remember(at, self.sides[at].peer.handoff.prefill(prompt, request_id))

    def submit(
        self, at: str, request_id: str | None, number: int, num_new: int, change: dict[str, Any]
    ) -> None:
        message = self._message(number, Handoff)
        if message is None:
            return
        side = self.sides[at]
        with Refused():
            handoff = forged(message, **change) if change else message
            name = side.peer.handoff.submit(handoff, request_id, max_new_tokens=num_new)
            self._promise(side, name, handoff.prompt[: handoff.num_prompt], num_new)
            if handoff.num_generated != message.num_generated:
                side.lied_to.add(name)

    def share(self, at: str, source: Any) -> None:
        with Refused():
            self._remember(at, self.sides[at].peer.handoff.share(source))

    def fetch(self, at: str, number: int) -> None:
        message = self._message(number, Prefix)
        if message is not None:
            with Refused():
                self._remember(at, self.sides[at].peer.handoff.fetch(message))

    def move(self, at: str, request_id: str) -> None:
        with Refused():
            self._remember(at, self.sides[at].peer.handoff.move(request_id))

    def cancel(self, at: str, request_id: str) -> None:
        self.sides[at].cancelled.add(request_id)
        self.sides[at].peer.manager.cancel_request(request_id)

    def abort(self, number: int) -> None:
        if self.messages:
            self._abort(*self.messages[number % len(self.messages)])

    def step(self, at: str, rounds: int) -> None:
        for _ in range(rounds):
            self.sides[at].peer.step()
        self._collect()

    def end(self, at: str, how: str) -> None:
        peer = self.sides[at].peer
        if how == "close":
            peer.during(peer.handoff.close)
        elif how == "fail":
            peer.fails_next = True
        else:
            if how == "hard stop":
                queued = peer.manager.input_queue.queue
                self.sides[at].may_be_lost += Counter(state.request_id for state in queued)
            peer.stop(hard_stop=how == "hard stop", keep_for_next_session=how == "pause")
            if how == "pause":
                peer.manager.start()
        self._collect()

    # What must hold.

    def settled(self) -> None:
        """Runs both loops until nothing is left to do, ends all leases, and checks every promise."""
        while not all(map(self._is_quiet, self.sides.values())):
            for side in self.sides.values():
                side.peer.step()
            self._collect()
            for message in self.messages:
                self._abort(*message)
        for at, side in self.sides.items():
            self._check(at, side)

    def _is_quiet(self, side: Side) -> bool:
        handoff, manager = side.peer.handoff, side.peer.manager
        if not manager.is_running():
            return True
        parts = handoff._batching
        return not (
            manager.input_queue.qsize()
            or manager.cancel_queue.qsize()
            or len(parts.jobs)
            or parts.scheduler.has_pending_requests()
            or handoff._fetching.num_running
            or handoff.stats().held_tables
        )

    def _check(self, at: str, side: Side) -> None:
        peer = side.peer
        for what, future in self.futures:
            assert what.partition(":")[0] != at or future.done(), f"{what} never ends"
        self._check_answers(side)
        if not peer.manager.is_running():
            error = peer.manager.background_thread_status.fatal_error
            assert error is None or type(error).__name__ == "ModelFailed", repr(error)
            peer.close()  # frees what waited for the next start
        stats = peer.handoff.stats()
        assert stats.guarded == 0, "an error that kvlink did not expect; see the log"
        assert stats.held_tables == 0
        assert peer.used() == 0
        handoff = peer.handoff
        left = (
            handoff._outgoing._prefills,
            handoff._outgoing._offered,
            handoff._incoming._arrivals,
            handoff._incoming._adopted,
            handoff._incoming._pulling,
            handoff._fetching._running,
            handoff._batching.request_ids._taken,
        )
        assert not any(left), left
        assert all(not cache.allocator.block_table for cache in handoff._batching.attention)

    def _check_answers(self, side: Side) -> None:
        answers = Counter(output.request_id for output in side.peer.outputs)
        for request_id, count in side.accepted.items():
            if request_id in side.cancelled:
                assert answers[request_id] <= count, request_id
            else:
                least = count - side.may_be_lost[request_id]
                assert least <= answers[request_id] <= count, (request_id, count, answers[request_id])
        assert set(answers) <= set(side.accepted)
        for output in side.peer.outputs:
            if output.error is not None or output.request_id in side.lied_to:
                assert output.error != ""
                continue
            prompt, tokens = tuple(output.prompt_ids), list(output.generated_tokens)
            assert tokens == expected(prompt)[: len(tokens)], (output.request_id, prompt, tokens)
            assert (output.request_id, prompt, len(tokens)) in side.limits

    def _promise(self, side: Side, request_id: str, prompt: tuple[int, ...], num_new: int) -> None:
        side.accepted[request_id] += 1
        side.limits.add((request_id, tuple(prompt), num_new))

    def _remember(self, at: str, future: Future[Any]) -> None:
        self.futures.append((f"{at}:{len(self.futures)}", future))

    def _collect(self) -> None:
        """Takes what the futures have given since."""
        for index, (what, future) in enumerate(self.futures):
            if not future.done() or what.endswith("collected"):
                continue
            self.futures[index] = (f"{what} collected", future)
            error = future.exception()
            if error is not None:
                assert isinstance(error, KVLinkError), repr(error)
                assert str(error)
            elif isinstance(message := future.result(), (Handoff, Prefix)):
                kind = type(message)
                assert kind.from_json(message.to_json()) == message
                self.messages.append((what.partition(":")[0], message))

    def _message(self, number: int, kind: type[Any]) -> Any:
        messages = [message for _, message in self.messages if isinstance(message, kind)]
        return messages[number % len(messages)] if messages else None

    def _abort(self, at: str, message: Handoff | Prefix) -> None:
        if message.ticket not in self._aborted:
            self._aborted.add(message.ticket)
            with suppress(KVLinkError):
                self.sides[at].peer.handoff.abort(message)


class Refused(suppress):
    """Accepts errors of kvlink only, and only with a reason."""

    def __init__(self) -> None:
        super().__init__(KVLinkError)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert error is None or not isinstance(error, KVLinkError) or str(error)
        return bool(super().__exit__(kind, error, trace))


def forged(handoff: Handoff, ticket: dict[str, Any] | None = None, **fields: Any) -> Handoff:
    """Returns a handoff of a peer that lies: other fields in the message and in a ticket that fits the message."""
    changed = replace(handoff, **fields)
    original = Ticket.from_text(handoff.ticket)
    mark = fingerprint(changed.prompt, changed.first_token, changed.num_generated)
    name = original.request_id.rpartition("@")[0] + mark
    try:
        lie = replace(original, **{"request_id": name, **(ticket or {})})
        return changed.with_ticket(lie.to_text())
    except (ValueError, OverflowError) as error:
        raise TransferError(f"no peer can write this: {error}") from None
