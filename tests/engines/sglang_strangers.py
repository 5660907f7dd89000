# SPDX-License-Identifier: Apache-2.0
"""Plays prefill servers that do not fit, in SGLang's environment: `python sglang_strangers.py PREFILL_BOOTSTRAP_PORT`.

It prints a line of JSON with the bootstrap port of each, by name, and then answers until its input ends. A number on a
line of its input sends about as many hostile messages to the socket of the real prefill rank, and prints their number.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import zmq

from kvlink.integrations.sglang.messages import CHUNK, FAILED, WANT, Chunk, Failed, Want

_TIMEOUT_S = 20

Answer = Callable[[Want], list[bytes]]


def _garbled(want: Want) -> list[bytes]:
    return [*Chunk(want.room, want.generation, 0, 0, 1, True, 2).to_frames()[:2], b"\xff" * 7]


def _of_another_version(want: Want) -> list[bytes]:
    tag, header, *rest = Chunk(want.room, want.generation, 0, 0, 1, True, 2).to_frames()
    return [tag, b"\x09\x00" + header[2:], *rest]


_ANSWERS: dict[str, Answer] = {
    "other caches": lambda want: Chunk(want.room, want.generation, 0, 0, 1, True, 7).to_frames(),
    "a last chunk without a ticket": lambda want: Chunk(
        want.room, want.generation, 0, 0, 0, True, 1
    ).to_frames(),
    "chunks of many ranks": lambda want: Chunk(want.room, want.generation, 9, 0, 2**19, False, 1).to_frames(),
    "a chunk that is garbled": _garbled,
    "a chunk of another version": _of_another_version,
    "a refusal of 1 MB": lambda want: [
        *Failed(want.room, want.generation, 0, "no").to_frames()[:2],
        b"\xed" * 10**6,
    ],
}
"""The answers of peers to a want."""

_SERVERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another page size": lambda real: real | {"page_size": 2 * real["page_size"]},
    "another KV dtype": lambda real: real | {"kv_cache_dtype": "int8"},
    "no ranks": lambda real: real | {"attn_tp_size": 0},
    "10^9 ranks": lambda real: real | {"attn_tp_size": 10**9, "attn_cp_size": 10**9},
    "pipeline stages": lambda real: real | {"pp_size": 3},
    "a list of servers": lambda real: [real],
    "data-parallel ranks that it does not know": lambda real: (
        real | {"dp_size": 4, "follow_bootstrap_room": False}
    ),
}
"""Descriptions that bootstrap servers give of their server, made from that of the real one."""

_RANKS: dict[str, Any] = {
    "a rank at a number": {"rank_ip": 7, "rank_port": "x"},
    "a rank at no host": {"rank_ip": "tcp://[", "rank_port": 1},
    "a rank that is a list": [1],
    "a rank at a closed port": {"rank_ip": "127.0.0.1", "rank_port": 1},
}
"""Descriptions that bootstrap servers give of a rank."""


def bootstrap_server(server: Any, rank: Any) -> int:
    """Starts a bootstrap server. Returns its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            about_rank = "target_tp_rank=-1" not in self.path
            self.answer(rank if about_rank and "route" in self.path else server)

        def do_POST(self) -> None:
            self.answer([["no", "ranks"]])

        def answer(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    started = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=started.serve_forever, daemon=True).start()
    return int(started.server_port)


def peer(context: Any, answer: Answer) -> int:
    """Starts a prefill rank that answers each want. Returns its port."""
    socket = context.socket(zmq.PULL)
    port = int(socket.bind_to_random_port("tcp://127.0.0.1"))

    def serve() -> None:
        while True:
            frames = socket.recv_multipart()
            if frames[0] == WANT:
                want = Want.from_frames(frames)
                send(context, want.endpoint, want.dst_port, [answer(want)])

    threading.Thread(target=serve, daemon=True).start()
    return port


def send(context: Any, host: str, port: int, messages: list[list[bytes]]) -> None:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 5000)
    socket.connect(f"tcp://{host}:{port}")
    for frames in messages:
        socket.send_multipart(frames)
    socket.close()


def hostile_messages(count: int) -> list[list[bytes]]:
    """Returns messages of every tag, and of none: garbage, and wants that nobody can serve."""
    rng = random.Random(count)
    tags = [WANT, CHUNK, FAILED, b"ABORT", b"KVLINK_STATUS", b"BOOTSTRAP", b"", b"?" * 1000]
    garbage = [
        [
            rng.choice(tags),
            *(rng.randbytes(rng.choice([0, 1, 18, 33, 39, 5000])) for _ in range(rng.randrange(6))),
        ]
        for _ in range(count)
    ]
    wants = [
        Want(
            rng.getrandbits(63) or 1,
            rng.getrandbits(63),
            "127.0.0.1",
            1,
            rng.randint(1, 9),
            0,
            size,
            1,
            7,
            False,
        )
        for size in (1, 2, 3, 65535)
    ]
    return [*garbage, [CHUNK] * 2000, *(want.to_frames() for want in wants)]


def asked(port: str, rank: int) -> Any:
    """Returns what the real bootstrap server says of its server (-1), or of a rank."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    query = "&".join(f"{name}={rank}" for name in names)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/route?{query}", timeout=_TIMEOUT_S) as answer:
        return json.load(answer)


def main() -> None:
    context = zmq.Context()
    server, real = asked(sys.argv[1], -1), asked(sys.argv[1], 0)
    rank: dict[str, Any] = {"rank_ip": "127.0.0.1", "rank_port": peer(context, _ANSWERS["other caches"])}
    ports = {name: bootstrap_server(change(server), rank) for name, change in _SERVERS.items()}
    ports |= {name: bootstrap_server(server, rank) for name, rank in _RANKS.items()}
    for name, answer in _ANSWERS.items():
        ports[name] = bootstrap_server(server, rank | {"rank_port": peer(context, answer)})
    print(json.dumps(ports), flush=True)
    for line in sys.stdin:
        messages = hostile_messages(int(line))
        send(context, real["rank_ip"], int(real["rank_port"]), messages)
        print(json.dumps(len(messages)), flush=True)


if __name__ == "__main__":
    main()
