# SPDX-License-Identifier: Apache-2.0
"""Block ids, request ids and worker ids, as servers have them and as they must not be."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from waiting import eventually

from kvlink import BlockPool, Ticket, Worker
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.runtime.names import check_name
from kvlink.ticket import LeaseSeat
from kvlink.transfer.block_ids import BlockIds, as_array, as_buffer, check_distinct

NUM_BLOCKS = 512
GOOD: list[BlockIds] = [
    [3, 1],
    (3, 1),
    [np.int64(3), np.uint8(1)],
    range(3, 0, -2),
    array("I", [3, 1]),
    array("q", [3, 1]),
    array("B", [3, 1]),
    np.array([3, 1]),
    np.array([3, 9, 1, 9], np.uint32)[::2],
    np.array([1, 3], np.uint32)[::-1],
    np.array([3, 1], ">i4"),
    *(np.array([3, 1], kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "u8")),
]
BAD: list[tuple[Any, str]] = [
    ([1, -1], "block id -1 at index 1 is negative"),
    (range(1, -1, -1), ""),
    (range(0, -2, -1), "block id -1 at index 1 is negative"),
    (np.array([1, 2, -1]), "block id -1 at index 2 is negative"),
    (array("i", [-7]), "block id -7 at index 0 is negative"),
    ([1, 2**32], "block id 4294967296 at index 1 does not fit"),
    (np.array([1, 2**32]), "block id 4294967296 at index 1 does not fit"),
    ([1, 512], "block id 512 at index 1 is not in 0 to 511"),
    ([1.0, 2], "block id 1.0 at index 0 is no integer"),
    ([1, "2"], "block id '2' at index 1 is no integer"),
    ([[1, 2]], r"block id \[1, 2\] at index 0 is no integer"),
    (np.array([1.5]), "block id 1.5 at index 0 is no integer"),
    (np.array([True]), "block id True at index 0 is no integer"),
    ([1, True], "block id True at index 1 is no integer"),
    (np.array([[1, 2]]), r"one dimension, not shape \[1, 2\]"),
    (np.array(1), r"one dimension, not shape \[\]"),
    ([4, 2, 4], "block id 4 at index 2 is also at index 0"),
    ([*range(300), 7], "block id 7 at index 300 is also at index 7"),
    ([*range(300), 512], "block id 512 at index 300 is not in 0 to 511"),
    ([], "at least one block id"),
    (b"\1\0\0\0", "integers in order, not bytes"),
    ("12", "integers in order, not str"),
    ({1, 2}, "integers in order, not set"),
    ({1: 2}.keys(), "integers in order, not dict_keys"),
    ({1: 2}, "integers in order, not dict"),
    (7, "integers in order, not int"),
    (None, "integers in order, not NoneType"),
]


@pytest.fixture
def worker() -> Iterator[Worker]:
    pool = BlockPool.allocate(dense(Geometry(1, 1, 64, NUM_BLOCKS)), huge_pages=False)
    with Worker(pool, "one", transports="loopback") as made:
        yield made


@pytest.mark.parametrize("given", GOOD, ids=repr)
def test_integers_of_any_container_are_ids(given: BlockIds) -> None:
    assert as_array(given, "r") == array("I", [3, 1])
    assert np.asarray(as_buffer(given, "r")).dtype == np.uint32


@pytest.mark.parametrize("given", [array("I", [3, 1]), np.array([3, 1], np.uint32)], ids=["array", "numpy"])
def test_what_needs_no_conversion_is_handed_on_and_kept_by_copy(given: Any) -> None:
    assert as_buffer(given, "r") is given
    kept = as_array(given, "r")
    given[0] = 9
    assert kept == array("I", [3, 1])


def test_torch_tensors_are_ids() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert as_array(torch.tensor([3, 1], dtype=dtype), "r") == array("I", [3, 1])
    assert as_array(torch.tensor([3, 9, 1, 9])[::2], "r") == array("I", [3, 1])
    for given, sentence in (
        (torch.tensor([1, -1]), "block id -1 at index 1 is negative"),
        (torch.tensor([1.5]), "block id 1.5 at index 0 is no integer"),
        (torch.tensor([1.5], dtype=torch.bfloat16), "cannot be read from Tensor"),
        (torch.tensor([1], device="meta"), "cannot be read from Tensor"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            as_array(given, "r")


@pytest.mark.parametrize(("given", "sentence"), [row for row in BAD if row[1]], ids=repr)
def test_what_is_no_id_is_refused_by_index_and_value(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_distinct(as_array(given, "r"), NUM_BLOCKS, "r")


READERS: dict[str, Callable[[Worker, Any], object]] = {
    "offer": lambda worker, ids: worker.offer("g", ids),
    "offer_soft": lambda worker, ids: worker.offer_soft("g", ids),
    "pull": lambda worker, ids: worker.pull(worker.offer("t", [40, 41, 42]), ids).wait(),
    "prepare": lambda worker, ids: (
        worker.prepare(worker.offer("t", [40, 41, 42]), ids).pull(worker.offer("u", [40, 41, 42])).wait()
    ),
    "relay": lambda worker, ids: worker.relay(worker.offer("t", [40, 41, 42]), ids, readers=0).wait(),
    "revoke": lambda worker, ids: worker.revoke(ids),
}


def _release_sources(worker: Worker) -> None:
    """Ends the offers that `READERS` read from."""

    def left() -> list[Ticket]:
        worker.events()
        return [ticket for ticket in worker.offers.tickets() if ticket.request_id in ("t", "u")]

    for ticket in left():
        worker.release(ticket)
    eventually(lambda: not left())


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_an_iterator_is_read_once_and_whole(worker: Worker, reader: Callable[[Worker, Any], object]) -> None:
    """A second look at an iterator with a bad element would see only what follows it."""
    blocks = worker.pool.numpy().reshape(2, NUM_BLOCKS, -1)
    blocks[:] = np.arange(NUM_BLOCKS)[None, :, None] % 251
    soft = worker.offer_soft("soft", [30, 31, 32])
    reader(worker, iter([1, 2, 3]))
    _release_sources(worker)
    before = blocks.copy()
    for bad in (None, True, 2.0, -1, 2**32, "3"):
        with pytest.raises(ConfigError, match="at index 2"):
            reader(worker, iter([30, 31, bad, 32]))
        _release_sources(worker)

    def broken() -> Iterator[int]:
        yield 30
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="the engine's own"):
        reader(worker, broken())
    assert np.array_equal(blocks, before)
    assert worker.pull(soft, [50, 51, 52]).wait(), "nothing was revoked"


def test_offer_and_pull_take_the_same_ids(worker: Worker) -> None:
    ticket = worker.offer("owner", [5, 6])
    for number, given in enumerate(GOOD):
        worker.offer(f"r{number}", given)
        worker.pull(ticket, given, settle=False).wait()


def test_offer_and_pull_refuse_the_same_ids(worker: Worker) -> None:
    """A list is empty for a pull that wants nothing, and an offer is never empty."""
    ticket = worker.offer("owner", list(range(301)))
    for given, sentence in BAD:
        if not sentence or np.size(given) == 0:
            continue
        with pytest.raises(ConfigError, match=sentence):
            worker.offer("refused", given)
        with pytest.raises(ConfigError):
            worker.pull(ticket, given, tokens=(0, 16 * np.size(given)), settle=False).wait()
    assert worker.lease_counts().active == 1


def test_a_pull_keeps_the_ids_that_it_was_given(worker: Worker) -> None:
    """The first pull connects before it starts."""
    blocks = worker.pool.numpy().reshape(2, NUM_BLOCKS, -1)  # K, then V
    blocks[:] = np.arange(NUM_BLOCKS)[None, :, None] % 251
    into = array("I", [9])
    pull = worker.pull(worker.offer("r", [5]), into)
    into[0] = 7
    pull.wait()
    assert blocks[:, [7, 9], 0].tolist() == [[7, 5], [7, 5]]


NOT_A_NAME: list[tuple[Any, str]] = [
    ("", "has 0 bytes.*; it must have 1 to 512 bytes"),
    ("x" * 513, "has 513 bytes.*; it must have 1 to 512 bytes"),
    ("\u00e9" * 257, "has 514 bytes.*; it must have 1 to 512 bytes"),
    ("ab\ud800", "lone surrogate at index 2"),
    (b"bytes", "must be text, not bytes"),
    (7, "must be text, not int"),
    (None, "must be text, not NoneType"),
    (["r"], "must be text, not list"),
]


@pytest.mark.parametrize(("name", "sentence"), NOT_A_NAME, ids=lambda value: ascii(value)[:20])
def test_every_door_refuses_what_is_no_name(worker: Worker, name: Any, sentence: str) -> None:
    doors: list[Callable[[], Any]] = [
        lambda: check_name(name, "name"),
        lambda: worker.offer(name, [1]),
        lambda: worker.offers.grant_at(name, [], 1.0),
        lambda: worker.set_ready(name, 1),
        lambda: worker.extend(name, 1.0),
        lambda: worker.abort(name),
        lambda: Worker(worker.pool, name, transports="loopback"),
    ]
    if isinstance(name, str):
        doors += [lambda: worker.pull(name, [1]), lambda: worker.release(name)]
    for door in doors:
        with pytest.raises(ConfigError, match=sentence):
            door()
    assert worker.lease_counts().active == 0


def test_names_of_512_bytes_are_taken(worker: Worker) -> None:
    for name in ("x" * 512, "\u00e9" * 256, "\0 \n"):
        assert Ticket.from_text(worker.offer(name, [1]).to_text()).request_id == name


def test_a_made_up_ticket_is_refused_wherever_a_ticket_is_taken(worker: Worker) -> None:
    forged = replace(worker.offer("r", [5]))
    object.__setattr__(forged, "seats", (LeaseSeat(1234, 0, 0),))
    text = forged.to_text()
    doors: list[Callable[[], Any]] = [
        lambda: Ticket.from_text(text),
        lambda: Ticket.from_bytes(forged.to_bytes()),
        lambda: worker.pull(text, [9]),
        lambda: worker.pull([text], [9]),
        lambda: worker.pull(text, []),
        lambda: worker.release(text),
        lambda: worker.release([text]),
        lambda: worker.pull(replace(forged), [9]),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match="the ticket is forged"):
            door()
    assert worker.lease_counts().active == 1


@pytest.mark.parametrize("around", ["{}", " {}\n", '"{}"', "Bearer {}", "id-{}-7", '{{"ticket": "{}"}}'])
def test_no_ticket_goes_for_a_request_id_or_into_an_error(
    worker: Worker, around: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = worker.offer("r", [5]).to_text()
    written = around.format(text)
    assert len(written) < 512
    doors: list[Callable[[], Any]] = [
        lambda: worker.offer(written, [1]),
        lambda: worker.set_ready(written, 1),
        lambda: worker.abort(written),
        lambda: worker.pull(request_id=written, into=[9]),
        lambda: worker.release(request_id=written),
    ]
    alone = written.strip(' \n"') == text
    if not alone:
        doors += [lambda: worker.pull(written, [9]), lambda: worker.release(written)]
    for door in doors:
        with pytest.raises(ConfigError, match="the text is a ticket or contains one") as refused:
            door()
        assert text[10:] not in str(refused.value)
    assert text[10:] not in caplog.text
    if alone:
        assert worker.pull(written, [9]).wait()


def test_a_request_id_can_be_said_outright(worker: Worker) -> None:
    for door in (lambda: worker.pull(request_id="r", into=[9]), lambda: worker.release(request_id="r")):
        with pytest.raises(ConfigError, match="claiming by id needs a coordinator"):
            door()
    ticket = worker.offer("r", [5])
    calls: list[Callable[[], Any]] = [
        lambda: worker.pull(ticket, [9], request_id="r"),
        lambda: worker.release(ticket, request_id="r"),
    ]
    for both in calls:
        with pytest.raises(ConfigError, match="pass either a ticket or request_id=, not both"):
            both()
    with pytest.raises(ConfigError, match="pass either a ticket or request_id="):
        worker.pull(into=[9])
    with pytest.raises(ConfigError, match="into: block ids must be integers in order, not NoneType"):
        worker.pull(ticket)


def test_the_text_of_a_ticket_is_the_ticket(worker: Worker) -> None:
    text = worker.offer("r", [5]).to_text()
    assert worker.pull(text, [9], settle=False).wait()
    assert worker.pull([text], [9], settle=False).wait()
    worker.release(text)
    for cut in (text[:-8], text[:40]):
        with pytest.raises(ConfigError, match="not a ticket of kvlink") as error:
            worker.pull(cut, [9])
        assert cut[5:] not in str(error.value)
    for wrong in (b"", 7, [7], [b"x"]):
        with pytest.raises(ConfigError, match=r"not (bytes|int)"):
            worker.pull(wrong, [9])  # type: ignore[arg-type]
