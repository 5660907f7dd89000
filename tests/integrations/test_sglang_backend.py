# SPDX-License-Identifier: Apache-2.0
"""Senders and receivers as SGLang's schedulers use them: what the router does with rooms is not in their hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from making import making
from sglang_servers import ROW_BYTES, SERVER_ARGS, Scheduler, deliver_all, failure_of, make_backend
from sglang_stand_in import DisaggregationMode, KVPoll, KVTransferError, ZMQError, network
from waiting import eventually

from kvlink.errors import ConfigError
from kvlink.integrations.sglang.messages import WANT

ROOM = 77
PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return make_backend(monkeypatch)


@pytest.fixture
def start(backend: ModuleType) -> Iterator[Callable[..., Scheduler]]:
    with making(partial(Scheduler, backend)) as start:
        yield start


@pytest.fixture
def prefill(start: Callable[..., Scheduler]) -> Scheduler:
    return start(PREFILL)


@pytest.fixture
def decode(start: Callable[..., Scheduler]) -> Scheduler:
    return start(DECODE)


def ask(receiver: Any, pages: list[int], row: int = 3, slot: int = 0, **more: Any) -> None:
    receiver.send_metadata(np.array(pages, np.int32), row, [np.array([slot])], **more)


def send(prefill: Scheduler, sender: Any, pages: list[int], row: int = 1, slot: int = 2) -> None:
    """Sends all pages as the last chunk, as the scheduler does once the decode ranks have asked."""
    assert sender.poll() == KVPoll.WaitingForInput
    prefill.rows[row] = np.frombuffer(b"first token".ljust(ROW_BYTES), np.uint8)
    sender.pop_decode_prefix_len()
    sender.init(len(pages), row)
    sender.send(np.array(pages, np.int32), [np.array([slot])])


def arrives(
    prefill: Scheduler, decode: Scheduler, sender: Any, receiver: Any, theirs: list[int], ours: list[int]
) -> None:
    """Hands the request off, and compares what has arrived."""
    send(prefill, sender, theirs)
    deliver_all(prefill, decode)
    eventually(lambda: receiver.poll() == KVPoll.Success)
    eventually(lambda: sender.poll() == KVPoll.Success)
    assert all((a[ours] == b[theirs]).all() for a, b in zip(decode.kv, prefill.kv, strict=True))
    assert bytes(decode.rows[3]).startswith(b"first token")
    receiver.clear()
    sender.clear()
    assert is_empty(prefill, decode)


def is_empty(*schedulers: Scheduler) -> bool:
    """Returns whether nothing is left of any request."""
    tables = ("request_status", "failure_records", "transfer_infos", "req_to_decode_prefix_len")
    return all(
        not any(getattr(one.manager, name, {}) for name in tables)
        and not one.manager.outgoing._rooms
        and not one.manager.outgoing._room_of
        and not one.manager.incoming.num_rooms()
        and (one.mode is DECODE or one.manager.wants.sizes() == (0, 0))
        for one in schedulers
    )


def test_the_decode_rank_may_ask_before_prefills_request_is_there(
    prefill: Scheduler, decode: Scheduler
) -> None:
    receiver = decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    deliver_all(prefill, decode)
    assert ROOM not in prefill.manager.request_status
    arrives(prefill, decode, prefill.sender(ROOM), receiver, [10, 11], [4, 5])


def end_at_prefill(prefill: Scheduler, decode: Scheduler, sender: Any, receiver: Any) -> None:
    sender.abort()
    deliver_all(prefill, decode)
    assert "aborted on prefill" in failure_of(receiver)
    assert "aborted on prefill" in failure_of(sender)


def end_at_prefill_without_a_last_call(
    prefill: Scheduler, decode: Scheduler, sender: Any, receiver: Any
) -> None:
    sender.abort()
    deliver_all(prefill, decode)
    failure_of(receiver)


def end_at_decode(prefill: Scheduler, decode: Scheduler, sender: Any, receiver: Any) -> None:
    receiver.abort()
    failure_of(receiver)
    deliver_all(prefill, decode)
    assert "decode aborted" in failure_of(sender)


def end_at_decode_unseen(prefill: Scheduler, decode: Scheduler, sender: Any, receiver: Any) -> None:
    """The next attempt begins before SGLang has checked the end of this one."""
    receiver.abort()
    deliver_all(prefill, decode)


def end_of_prefill_alone(prefill: Scheduler, decode: Scheduler, sender: Any, receiver: Any) -> None:
    network.sent.clear()  # decode's request never got as far as asking
    sender.abort()
    failure_of(sender)
    receiver.abort()
    failure_of(receiver)
    network.sent.clear()


ENDS = [
    end_at_prefill, end_at_prefill_without_a_last_call, end_at_decode, end_at_decode_unseen, end_of_prefill_alone,
]  # fmt: skip


@pytest.mark.parametrize("prefill_first", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_a_room_whose_attempt_has_failed_is_right_again(
    prefill: Scheduler, decode: Scheduler, end: Callable[..., None], prefill_first: bool
) -> None:
    for _ in range(2):
        sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
        ask(receiver, [1, 2])
        if end is not end_of_prefill_alone:
            deliver_all(prefill, decode)
        end(prefill, decode, sender, receiver)
    if prefill_first:
        sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
        ask(receiver, [4, 5])
        deliver_all(prefill, decode)
    else:
        receiver = decode.receiver(ROOM, prefill)
        ask(receiver, [4, 5])
        deliver_all(prefill, decode)
        sender = prefill.sender(ROOM)
    arrives(prefill, decode, sender, receiver, [10, 11], [4, 5])


def test_messages_of_an_earlier_attempt_do_not_touch_the_next(prefill: Scheduler, decode: Scheduler) -> None:
    """The abort of the first attempt, its want and its failure arrive during the second one."""
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [1, 2])
    network.deliver(keep=True)
    prefill.listen()
    [want] = network.sent
    receiver.abort()
    failure_of(receiver)
    sender.abort()
    late = [want, *network.sent[1:]]
    assert len(late) == 3
    network.sent.clear()
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    deliver_all(prefill, decode)
    network.sent[:] = late
    deliver_all(prefill, decode)
    arrives(prefill, decode, sender, receiver, [10, 11], [4, 5])


def test_prefill_computes_a_retracted_request_again_in_its_room(
    prefill: Scheduler, decode: Scheduler
) -> None:
    """SGLang's true retraction: decode asks again in the same room, and then posts the prompt to prefill."""
    for pages in ([1, 2], [6, 7]):
        receiver = decode.receiver(ROOM, prefill)
        ask(receiver, pages)
        deliver_all(prefill, decode)
        arrives(prefill, decode, prefill.sender(ROOM), receiver, [10, 11], pages)


@pytest.mark.parametrize("status", ["waiting", "transferring", "delivered"])
def test_a_want_that_comes_late_is_answered(
    prefill: Scheduler, decode: Scheduler, start: Callable[..., Scheduler], status: str
) -> None:
    """Another decode server asks for a room that is being handed off. It waited for its timeout."""
    other = start(DECODE)
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    deliver_all(prefill, decode)
    if status != "waiting":
        send(prefill, sender, [10, 11])
    if status == "delivered":
        deliver_all(prefill, decode)
        eventually(lambda: receiver.poll() == KVPoll.Success)
        eventually(lambda: sender.poll() == KVPoll.Success)
    late = other.receiver(ROOM, prefill)
    ask(late, [8])
    port, want = network.sent.pop()
    prefill.manager.server_socket.deliver(want)
    prefill.listen()
    to, _ = network.sent[-1]
    assert (port, to) == (prefill.manager.rank_port, other.manager.rank_port)
    deliver_all(prefill, decode, other)
    assert "already handed off to the decode server" in failure_of(late)
    deliver_all(prefill, decode, other)  # the abort of the late one
    eventually(lambda: receiver.poll() == KVPoll.Success) if status != "waiting" else None
    assert sender.poll() != KVPoll.Failed


@pytest.mark.parametrize("asked", [True, False])
def test_an_abort_before_prefills_request_is_there_ends_it_soon(
    prefill: Scheduler, decode: Scheduler, asked: bool
) -> None:
    """Unless decode asks again: then it is another attempt."""
    now = [0.0]
    prefill.manager.wants._clock = lambda: now[0]
    for again in (False, True):
        receiver = decode.receiver(ROOM, prefill)
        if asked:
            ask(receiver, [4, 5])
        receiver.abort()
        failure_of(receiver)
        deliver_all(prefill, decode)
        sender = prefill.sender(ROOM)
        assert sender.poll() == KVPoll.Bootstrapping
        if again:
            receiver = decode.receiver(ROOM, prefill)
            ask(receiver, [4, 5])
            deliver_all(prefill, decode)
        now[0] += 5.0
        if not again:
            assert "decode aborted the request" in failure_of(sender)
    arrives(prefill, decode, sender, receiver, [10, 11], [4, 5])


def test_a_want_that_comes_twice_is_one(prefill: Scheduler, decode: Scheduler) -> None:
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    again = list(network.sent)
    deliver_all(prefill, decode)
    network.sent[:] = again
    deliver_all(prefill, decode)
    arrives(prefill, decode, sender, receiver, [10, 11], [4, 5])
    network.sent[:] = again
    deliver_all(prefill, decode)
    assert is_empty(prefill, decode)


def test_chunks_that_come_twice_are_read_once(prefill: Scheduler, decode: Scheduler) -> None:
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    deliver_all(prefill, decode)
    send(prefill, sender, [10, 11])
    for _ in range(2):
        network.deliver(keep=True)
    network.sent.clear()
    decode.listen()
    eventually(lambda: receiver.poll() == KVPoll.Success)
    eventually(lambda: sender.poll() == KVPoll.Success)


def test_wants_without_a_request_end(prefill: Scheduler, decode: Scheduler) -> None:
    now = [0.0]
    prefill.manager.wants._clock = lambda: now[0]
    receiver = decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    deliver_all(prefill, decode)
    now[0] = prefill.manager.bootstrap_timeout - 1
    prefill.listen()
    assert receiver.poll() == KVPoll.WaitingForInput
    now[0] += 1
    prefill.listen()
    deliver_all(prefill, decode)
    assert f"no request with bootstrap_room {ROOM} came to this prefill server" in failure_of(receiver)
    deliver_all(prefill, decode)
    assert is_empty(prefill, decode)


def test_one_room_for_two_requests(prefill: Scheduler, decode: Scheduler) -> None:
    """As the samples of a request with n of 2 have. The later ones fail, and the first goes on."""
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    deliver_all(prefill, decode)
    later = [prefill.sender(ROOM), decode.receiver(ROOM, prefill)]
    ask(later[1], [8, 9])
    for request in later:
        assert "n above 1" in failure_of(request)
        request.abort()
        request.clear()
    deliver_all(prefill, decode)
    assert decode.manager.addr_to_rooms_tracker == {prefill.address: {ROOM}}
    arrives(prefill, decode, sender, receiver, [10, 11], [4, 5])


def test_a_receiver_that_went_without_a_word_leaves_its_room_and_its_pages(
    prefill: Scheduler, decode: Scheduler
) -> None:
    for room in (ROOM, ROOM + 1):
        ask(decode.receiver(room, prefill), [1, 2])
    network.sent.clear()
    receiver, sender = decode.receiver(ROOM, prefill), prefill.sender(ROOM)
    ask(receiver, [4, 5])
    assert decode.manager.incoming.num_rooms() == 1
    decode.manager.forget(ROOM + 1)
    deliver_all(prefill, decode)
    arrives(prefill, decode, sender, receiver, [10, 11], [4, 5])


@pytest.mark.parametrize("room", [0, -1, 2**63, 2**64, "7", [7], None, True, 1.5])
def test_rooms_that_no_message_can_have_are_refused(prefill: Scheduler, decode: Scheduler, room: Any) -> None:
    for request in (prefill.sender(room), decode.receiver(room, prefill)):
        assert "bootstrap_room must be an integer from 1" in failure_of(request)
        request.abort()
        request.clear()
    assert is_empty(prefill, decode)


def test_a_prefill_server_that_does_not_fit_fails_its_own_requests(
    prefill: Scheduler, decode: Scheduler, start: Callable[..., Scheduler]
) -> None:
    """SGLang's error would end the scheduler, and with it the decode server."""
    other = start(PREFILL)
    decode.manager.misfits = {other.address}
    fits, misfit = (decode.receiver(ROOM + number, to) for number, to in enumerate((prefill, other)))
    assert decode.manager.try_ensure_parallel_info(prefill.address) is True
    assert decode.manager.try_ensure_parallel_info(other.address) is False
    assert fits.poll() == KVPoll.WaitingForInput
    assert f"{other.address} does not fit this decode server: Page size mismatch" in failure_of(misfit)


def test_a_prefill_server_with_other_caches_is_refused_before_a_byte_is_taken_for_valid(
    decode: Scheduler, start: Callable[..., Scheduler]
) -> None:
    """Without the comparison decode would go on with a state that nobody wrote."""
    other = start(PREFILL, has_states=False)
    sender, receiver = other.sender(ROOM), decode.receiver(ROOM, other)
    ask(receiver, [4, 5])
    deliver_all(other, decode)
    send(other, sender, [10, 11])
    deliver_all(other, decode)
    assert "prefill has 1 groups of caches and decode has 2" in failure_of(receiver)
    deliver_all(other, decode)
    assert "decode aborted" in failure_of(sender)
    assert is_empty(other, decode)


@pytest.mark.parametrize(("prefix", "pages"), [(160, -8), (16, 0)])
def test_a_prefix_beyond_the_prompt_ends_the_request(
    prefill: Scheduler, decode: Scheduler, prefix: int, pages: int
) -> None:
    """SGLang would skip every chunk of it, and wait for ever."""
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5], decode_prefix_len=prefix)
    deliver_all(prefill, decode)
    assert sender.poll() == KVPoll.WaitingForInput
    assert sender.pop_decode_prefix_len() == prefix
    sender.init(pages, 1)
    prefill.manager.bootstrap_timeout = -1
    assert f"{prefix} tokens of the prompt" in failure_of(sender)
    deliver_all(prefill, decode)
    assert f"{prefix} tokens of the prompt" in failure_of(receiver)


def test_host_memory_is_refused_before_prefill_is_asked(prefill: Scheduler, decode: Scheduler) -> None:
    receiver = decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5], destination="host")
    assert not [parts for _, parts in network.sent if parts[0] == WANT]
    assert "host memory" in failure_of(receiver)


@pytest.mark.parametrize(
    ("side", "name"),
    [(PREFILL, "poll"), (PREFILL, "init"), (PREFILL, "send"), (PREFILL, "clear"), (DECODE, "poll"),
     (DECODE, "send_metadata"), (DECODE, "clear")],
)  # fmt: skip
def test_an_error_on_one_rank_fails_its_request_on_all_and_no_other(
    start: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch, side: DisaggregationMode, name: str
) -> None:
    """Ranks agree as in SGLang: a request is in the least state that any of them has it in."""
    prefills, decodes = ([start(mode, rank=rank, ranks=2) for rank in range(2)] for mode in (PREFILL, DECODE))
    pairs = list(zip(prefills, decodes, strict=True))
    requests: dict[tuple[int, DisaggregationMode], list[Any]] = {}
    for room in (ROOM, ROOM + 1):
        requests[room, PREFILL] = [prefill.sender(room) for prefill, _ in pairs]
        requests[room, DECODE] = [decode.receiver(room, prefill) for prefill, decode in pairs]
    broken = requests[ROOM, side][1]
    base = type(broken).__mro__[2]
    original = getattr(base, name)

    def fails(request: Any, *args: Any, **options: Any) -> Any:
        if request is broken:
            raise LookupError("nobody expects this")
        return original(request, *args, **options)

    monkeypatch.setattr(base, name, fails)
    outcomes = hand_off(requests, [*prefills, *decodes])
    assert outcomes[ROOM + 1, PREFILL] == outcomes[ROOM + 1, DECODE] == "success"
    for prefill, decode in pairs:
        assert all((a[[6, 7]] == b[[12, 13]]).all() for a, b in zip(decode.kv, prefill.kv, strict=True))
    if name == "clear":  # all has arrived, and its end is left to the next request of the room
        assert outcomes[ROOM, side] == "success"
        return
    assert "nobody expects this" in outcomes[ROOM, side]
    assert "success" not in (outcomes[ROOM, PREFILL], outcomes[ROOM, DECODE])
    assert is_empty(*prefills, *decodes)


def hand_off(
    requests: dict[tuple[int, DisaggregationMode], list[Any]], everybody: list[Scheduler]
) -> dict[tuple[int, DisaggregationMode], str]:
    """Takes the steps of all ranks until each request has ended. Returns how."""
    for (room, mode), ranks in requests.items():
        number = room - ROOM
        for receiver in ranks if mode is DECODE else ():
            ask(receiver, [4 + 2 * number, 5 + 2 * number], row=3 + number, slot=number)
    deliver_all(*everybody)
    for (room, mode), ranks in requests.items():
        if mode is PREFILL and min(one.poll() for one in ranks) == KVPoll.WaitingForInput:
            for sender in ranks:
                sender.init(2, 1)
                first = 10 + 2 * (room - ROOM)
                sender.send(np.array([first, first + 1], np.int32), [np.array([2])])
    outcomes: dict[tuple[int, DisaggregationMode], str] = {}
    while len(outcomes) < len(requests):
        deliver_all(*everybody)
        for key, ranks in requests.items():
            if key not in outcomes and (state := min(one.poll() for one in ranks)) in (0, 4):
                outcomes[key] = conclude(ranks, state)
    deliver_all(*everybody)
    return outcomes


def conclude(ranks: list[Any], state: int) -> str:
    """Ends a request on all ranks as SGLang does. Returns their reasons, or "success"."""
    reasons = []
    for one in ranks:
        if state == KVPoll.Failed:
            with pytest.raises(KVTransferError) as raised:
                one.failure_exception()
            reasons.append(str(raised.value))
        one.clear()
    return "; ".join(reasons) or "success"


def test_a_prefill_server_that_never_says_which_rank_has_the_room_fails_the_request(
    prefill: Scheduler, decode: Scheduler
) -> None:
    """SGLang asks its bootstrap server again and again."""
    receiver = decode.backend.KVLinkReceiver(decode.manager, prefill.address, ROOM)
    assert receiver.poll() == KVPoll.Bootstrapping
    decode.manager.waiting_timeout = -1
    assert "which of its data-parallel ranks has" in failure_of(receiver)


def test_sockets_to_idle_peers_are_closed(
    prefill: Scheduler, decode: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlink.integrations.sglang import manager

    monkeypatch.setattr(manager, "_MAX_PEERS", 2)
    for port in (decode.manager.rank_port, 1, decode.manager.rank_port, 2):
        with suppress(ZMQError):
            prefill.manager._send_multipart_locked(f"tcp://127.0.0.1:{port}", [b""])
    assert list(prefill.manager._socket_cache) == [f"tcp://{decode.address}", "tcp://127.0.0.1:2"]


def test_a_message_of_another_version_fails_its_room(prefill: Scheduler, decode: Scheduler) -> None:
    sender, receiver = prefill.sender(ROOM), decode.receiver(ROOM, prefill)
    ask(receiver, [4, 5])
    deliver_all(prefill, decode)
    send(prefill, sender, [10, 11])
    [(port, [tag, header, *rest])] = network.sent
    network.sent[:] = [(port, [tag, b"\x09\x00" + header[2:], *rest])]
    deliver_all(prefill, decode)
    assert "uses version 9 of its messages" in failure_of(receiver)
    again = decode.receiver(ROOM, prefill)
    ask(again, [4, 5])
    want = network.sent.pop()[1]
    network.sent[:] = [(prefill.manager.rank_port, [want[0], b"\x09\x00" + want[1][2:], want[2]])]
    deliver_all(prefill, decode)
    assert "uses version 9 of its messages" in failure_of(again)


@pytest.mark.parametrize("mode", [PREFILL, DECODE])
def test_what_is_not_supported_is_refused_at_start(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: DisaggregationMode
) -> None:
    from kvlink.integrations.sglang import rank

    context, server = rank.get_disagg(), SERVER_ARGS
    for where, name, value, what in (
        (context, "disaggregation_decode_host_receive_threshold", 0.5, "host memory"),
        (context, "pp_size", 2, "pipeline"),
        (server, "enable_memory_saver", True, "memory saver .--enable-memory-saver"),
    ):
        monkeypatch.setattr(where, name, value)
        with pytest.raises(ConfigError, match=f"does not support .*{what}"):
            Scheduler(backend, mode)
        monkeypatch.undo()
