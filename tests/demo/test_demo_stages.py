# SPDX-License-Identifier: Apache-2.0
"""`kvlink demo --pp`: layers of prefill and of decode in stages of their own, and proof that its verdict can be bad."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvlink.cli.commands import app
from kvlink.demo import run
from kvlink.demo.servers import PROMPTS, Decode, Options, Prefill
from kvlink.errors import ConfigError

PROMPT = PROMPTS["some blocks and a bit"]


@pytest.mark.parametrize("pp", ["2:1", "1:2", "2:2"])
def test_every_pipeline_gives_the_tokens_of_one_process(pp: str) -> None:
    done = CliRunner().invoke(app, ["demo", "--pp", pp, "--transport", "shm", "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["tokens_equal"], row["processes"], row["path"]) == (True, 2, "shm")
    assert f"in {pp[0]} and {pp[2]} stage(s)" in row["engine"]


def test_a_stage_that_is_not_pulled_changes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(stages=(2, 2))
    prefill, decode = Prefill("loopback", "", options), Decode("loopback", "", options)
    try:
        first = prefill.prefill("a", PROMPT)
        right = decode.decode(first["handoff"], 16)
        assert right["digest"] == first["digest"]
        second = prefill.prefill("b", PROMPT)
        monkeypatch.setattr(decode.workers[1], "pull", lambda *given: decode.workers[0].pull(*given))
        wrong = decode.decode(second["handoff"], 16)
        assert wrong["digest"] != second["digest"]
        assert wrong["tokens"] != right["tokens"]
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize("pp", ["2", "5:1", "0:1", "2:1:1"])
def test_stages_that_there_are_not_are_refused(pp: str) -> None:
    with pytest.raises(ConfigError, match="write the stages of prefill and of decode"):
        run(["loopback"], pp=pp)
