# SPDX-License-Identifier: Apache-2.0
"""The log: its formats, and what is said only once."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transports.seen import seen

from kvlink.runtime import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leaves the logger "kvlink" as it was."""
    logger = logging.getLogger("kvlink")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("kvlink.worker", logging.INFO, __file__, 1, message, arguments, None)
    vars(made).update(fields)
    return made


def test_key_value_quotes_what_would_not_read_back() -> None:
    line = log.KeyValueFormatter().format(
        record("pulled %d blocks", 3, request_id="r 1", bytes=5, path="", a="x=y")
    )
    stamp, level, rest = line.split(maxsplit=2)
    assert stamp.endswith("Z")
    assert level == "info"
    assert rest == 'kvlink.worker: pulled 3 blocks request_id="r 1" bytes=5 path="" a="x=y"'


@pytest.mark.parametrize("formatter", [log.KeyValueFormatter(), log.JsonFormatter()])
def test_nothing_foreign_breaks_the_line(formatter: logging.Formatter) -> None:
    line = formatter.format(record("joined %s", "w\nforged", request_id="r\r\nforged line"))
    assert not {"\n", "\r"} & set(line)


def test_json_keeps_types_and_names_the_error() -> None:
    made = record("lost", bytes=5, peer=object)
    try:
        raise OSError("gone")
    except OSError:
        made.exc_info = sys.exc_info()
    found = json.loads(log.JsonFormatter().format(made))
    assert (found["event"], found["bytes"], found["level"]) == ("lost", 5, "info")
    assert found["error"] == "OSError: gone"


def test_pairs_at_the_end_of_a_message_become_fields() -> None:
    made = record("%s failed request=%s error=%s tries=%d", "publish", "r 1", OSError("gone away"), 3)
    line = log.KeyValueFormatter().format(made)
    assert line.endswith('kvlink.worker: publish failed request="r 1" error="gone away" tries=3')
    found = json.loads(log.JsonFormatter().format(made))
    assert (found["event"], found["request"], found["error"]) == ("publish failed", "r 1", "gone away")
    assert found["tries"] == 3, "numbers stay numbers"


def test_pairs_within_a_message_are_not_repeated() -> None:
    made = record("reads from owner=%s transport=%s%s", "w 1", "cma", "; not shm: owner=x")
    line = log.KeyValueFormatter().format(made)
    assert line.endswith("kvlink.worker: reads from owner=w 1 transport=cma; not shm: owner=x")
    assert json.loads(log.JsonFormatter().format(made))["transport"] == "cma"


def test_a_request_in_a_sentence_is_a_field_too() -> None:
    made = record("request %s: nobody fetched it in %.1f s (100%%)", "r1", 2.0)
    found = json.loads(log.JsonFormatter().format(made))
    assert found["event"] == "request r1: nobody fetched it in 2.0 s (100%)"
    assert found["request"] == "r1"
    middle = record("KV cache of request=%s came from %s", "r1", "tcp")
    assert json.loads(log.JsonFormatter().format(middle))["request"] == "r1"


def test_what_a_name_contains_makes_no_fields() -> None:
    made = record("joined worker=%s", "w request=forged level=%s")
    found = json.loads(log.JsonFormatter().format(made))
    assert (found["worker"], "request" in found) == ("w request=forged level=%s", False)
    assert 'worker="w request=forged level=%s"' in log.KeyValueFormatter().format(made)


@pytest.mark.parametrize("arguments", [(), ({"a": 1},), ("one", "two")])
def test_templates_that_do_not_fit_stay_whole(arguments: tuple[object, ...]) -> None:
    made = record(
        "100% sure" if not arguments else "%(a)s" if len(arguments) == 1 else "%s and %s", *arguments
    )
    assert json.loads(log.JsonFormatter().format(made))["event"] in ("100% sure", "1", "one and two")


def test_setup_twice_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info")
    log.setup("warning", as_json=True)
    logger = logging.getLogger("kvlink.worker")
    logger.info("quiet")
    logger.warning("heard", extra={"request_id": "r1"})
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["request_id"] == "r1"


torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")

_BYTES = 4096


def _memory() -> tuple[np.ndarray[Any, Any], Any]:
    """Returns memory of the device, and the tests' view of it."""
    tensor = torch.arange(_BYTES).to(torch.uint8)
    return tensor.numpy(), seen(tensor)


@pytest.mark.parametrize("key", [slice(None), slice(5, 700), 7, [3, 1000, 4], np.arange(_BYTES) % 3 == 0])
def test_what_is_written_is_sent(key: Any) -> None:
    device, view = _memory()
    wanted = device.copy()
    wanted[key] = view[key] = 0xA5
    assert np.array_equal(device, wanted)


def test_views_of_it_send_and_fetch_too() -> None:
    device, view = _memory()
    blocks, words = view.reshape(16, -1), view.view(np.uint64).reshape(16, -1)
    blocks[[2, 9]] = 1
    words[4, 3] = 0x0102030405060708
    assert (device.reshape(16, -1)[[2, 9]] == 1).all()
    assert device.view(np.uint64)[4 * 32 + 3] == 0x0102030405060708
    device[:] = 9
    assert (blocks[:] == 9).all()
    assert words[15, 0] == 0x0909090909090909


def test_what_was_looked_at_stays_as_it_was() -> None:
    device, view = _memory()
    looked_at = view[:100]
    device[:] = 9
    assert np.array_equal(looked_at, np.arange(100))
    looked_at[:] = 0
    assert (device == 9).all()


def test_pages_that_nobody_wrote_are_not_sent() -> None:
    """They may be landing meanwhile."""
    device, view = _memory()
    copy = view.copy_of
    before = copy.bytes.copy()
    copy.bytes[300] ^= 0xFF
    device[1000:] = 9
    copy.send(before)
    assert (device[1000:] == 9).all()
    assert device[300] == 300 % 256 ^ 0xFF
