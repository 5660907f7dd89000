# SPDX-License-Identifier: Apache-2.0
"""Measures the first token of messages with images: encoder outputs pulled from an encoder server, beside computed.

    python tests/engines/encoder_times.py [--rounds 9] [--images 1,2,4] [--models idefics3,…] [--json]

There are three servers of one model with random weights: the encoder server, one that pulls its outputs, and one
without a connector, which encodes the images itself. The last two get the same messages in alternation, and their
tokens are compared. Every image is new to all three. Times are medians with quartiles in milliseconds: `encoder` is
that of the encoder server's answer, `pulled` and `computed` are those to the first token at the other two. A message
whose images were not encoded before takes `encoder` and `pulled` together.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from encoders import encode, items, launch
from first_token import PAUSE_S, Timed, show, spread, timed
from images import Parts, messages
from pair import prompt
from servers import ENGINES, MODELS, Server, running

PIXELS = {"idefics3": 112, "idefics3-12x512": 224, "idefics3-12x768": 512}
_NUM_TEXT = 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", default="1,2,4", help="numbers of images of a message")
    parser.add_argument("--models", default=",".join(PIXELS))
    parser.add_argument("--json", action="store_true", help="JSON lines")
    options = parser.parse_args()
    for model in options.models.split(","):
        make(model)
        launches = [launch(role, model=model) for role in ("ec_producer", "ec_consumer", "")]
        with running(launches) as servers:
            for row in rows(
                servers, model, options.rounds, [int(each) for each in options.images.split(",")]
            ):
                show(row, as_json=options.json)
    return 0


def make(model: str) -> None:
    """Makes the model if it is not there."""
    script = Path(__file__).with_name("variants.py")
    subprocess.run([str(ENGINES / "vllm" / "bin" / "python"), str(script), str(MODELS), model], check=True)


def rows(servers: list[Server], model: str, rounds: int, counts: list[int]) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of images."""
    _, reader, _ = servers
    for turn in range(2):
        sample(servers, model, ["warm up", f"{turn}"], turn)
    for count in counts:
        pulled, here = items(reader, "pulled"), items(reader, "encoded_here")
        names = [[f"{model} {count} {turn} {number}" for number in range(count)] for turn in range(rounds)]
        taken = [sample(servers, model, each, turn) for turn, each in enumerate(names)]
        time.sleep(PAUSE_S)  # vLLM counts after the answer
        assert items(reader, "pulled") - pulled == count * rounds
        assert items(reader, "encoded_here") == here
        assert len({tuple(each.tokens) for _, each, _ in taken}) > 1, "the tokens do not depend on the images"
        yield {
            "model": model,
            "images": count,
            "rounds": rounds,
            "encoder": spread([each for each, _, _ in taken]),
            "pulled": spread([each.first_ms for _, each, _ in taken]),
            "computed": spread([each.first_ms for _, _, each in taken]),
        }


def sample(servers: list[Server], model: str, names: list[str], turn: int) -> tuple[float, Timed, Timed]:
    """Returns the milliseconds of the encoder server, and the answers with pulled and with computed outputs."""
    encoder, reader, plain = servers
    parts: Parts = [prompt("before", _NUM_TEXT), *names, prompt("after", _NUM_TEXT)]
    content = {"messages": messages(parts, PIXELS[model])}
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    params = encode(encoder, parts, model, pixels=PIXELS[model])
    encoder_ms = (time.perf_counter() - began) * 1e3
    answers: dict[Server, Timed] = {}
    for server in (reader, plain) if turn % 2 else (plain, reader):
        time.sleep(PAUSE_S)
        more = {"ec_transfer_params": params} if server is reader else {}
        answers[server] = timed(server, model, content, **more)
    assert answers[reader].tokens == answers[plain].tokens, names
    return encoder_ms, answers[reader], answers[plain]


if __name__ == "__main__":
    sys.exit(main())
