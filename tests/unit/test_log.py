# SPDX-License-Identifier: Apache-2.0
"""The two forms of a log line: for people and grep, and for machines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

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
