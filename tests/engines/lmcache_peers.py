# SPDX-License-Identifier: Apache-2.0
"""Peers of LMCache's servers that are not what they should be, but have this host's token, as processes of its user.

Runs in LMCache's environment.

`lmcache_peers.py send HOST:PORT`: sends all messages that no reader sends, in all kinds of sockets.
`lmcache_peers.py ask HOST:PORT`: asks as mismatched readers do, and prints the answers as JSON.
`lmcache_peers.py serve KIND=PORT…`: answers at each port as a mismatched owner of that kind does, until stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from kvlink import Worker, WorkerConfig
from kvlink.control.security.tickets import ticket_keys
from kvlink.integrations.lmcache.messages import Answer, Ask
from kvlink.integrations.lmcache.pages import Pages, Wanted
from kvlink.integrations.lmcache.sockets import Secrets, be_owner, be_reader

PAGE = 4096
SECRET = Secrets(ticket_keys(WorkerConfig.from_env()))()[0]
RIGHT = json.loads(Ask("10.9.9.9:1", PAGE, []).to_bytes())


def body(**changed: Any) -> bytes:
    return json.dumps(RIGHT | changed).encode()


MESSAGES: list[list[bytes]] = [
    [b""], [b"x"], [b"x", b"y"], [b""] * 500, [b"x" * 1000] * 50, [b"\0" * 64], [b"\xff" * 4096],
    [b"[" * 200_000], [b"{" * 200_000], [b'{"a":' * 100_000], [b" " * (8 << 20)], [b"null"], [b"true"], [b"7"],
    [b'"text"'], [b"[]"], [b"{}"], [b"\x80\x04\x95\x00"], [b"GET / HTTP/1.1\r\n\r\n"], [b"9" * 10_000],
    [body(version=1)], [body(version="2")], [body(reader=None)], [body(reader="\ud800")], [body(reader="x" * 10_000)],
    [body(reader="S1ZUM" + "A" * 200)], [body(reader="\n\x1b[31m")], [body(page_bytes=0)], [body(page_bytes=-1)],
    [body(page_bytes=1e400)], [body(page_bytes=10**300)], [body(objects={})], [body(objects=[[]])],
    [body(objects=[[-PAGE, PAGE]])], [body(objects=[[1, PAGE]])], [body(objects=[[0, 1 << 62]] * 4096)],
    [body(objects=[[0, PAGE]] * 5000)], [body(objects=[[0, PAGE, 0, "aa"]])], [body(owners=[[]])],
    [body(owners=[["m", 0, 0, "\ud800"]], objects=[[0, PAGE, 0, "aa"]])],
    [body(owners=[["m@m", 0, -1, "/"]], objects=[[0, PAGE, 0, "aa"]])], [body(later=[[[]]])],
]  # fmt: skip
SOCKETS = ["REQ", "DEALER", "ROUTER", "PUSH", "PUB", "SUB", "PAIR", "REP", "raw"]


def send(address: str) -> None:
    for number, frames in enumerate(MESSAGES):
        for kind in SOCKETS if number % 8 == 0 else ["REQ", "DEALER"]:
            if kind == "raw":
                with socket.create_connection(address.split(":")) as raw, contextlib.suppress(OSError):
                    raw.sendall(b"".join(frames)[:100_000])
                continue
            with zmq.Context() as context, context.socket(getattr(zmq, kind)) as sender:
                sender.setsockopt(zmq.LINGER, 100)
                be_reader(sender, SECRET)
                sender.connect(f"tcp://{address}")
                with contextlib.suppress(zmq.ZMQError):
                    sender.send_multipart(frames, zmq.NOBLOCK)
    print(len(MESSAGES))


def ask(address: str) -> None:
    """Each peer takes its answer and is gone."""
    key = ("00" * 31 + "01", "m", 0, 0, "")
    peers = {
        "other page size": body(page_bytes=2 * PAGE),
        "other version": body(version=1),
        "other model": Ask("r", PAGE, [Wanted(0, 1 << 20, (key[0], "other", *key[2:]))]).to_bytes(),
        "other chunk size": Ask("r", PAGE, [Wanted(0, 2 << 20, key)]).to_bytes(),
        "beyond the memory": Ask("r", PAGE, [Wanted(1 << 50, PAGE, key)]).to_bytes(),
    }
    found = {}
    with zmq.Context() as context:
        for kind, message in peers.items():
            with context.socket(zmq.REQ) as asking:
                asking.setsockopt(zmq.LINGER, 0)
                be_reader(asking, SECRET)
                asking.connect(f"tcp://{address}")
                asking.send(message)
                answer = asking.recv() if asking.poll(20_000) else b"nothing"
                refused = answer[:1] == b"=" and Answer.from_bytes(answer, "owner", 1).ticket is None
                found[kind] = "refused" if refused or answer[:1] == b"!" else repr(answer[:80])
    print(json.dumps(found))


def worker(page_bytes: int) -> Worker:
    room = np.full(page_bytes * 1024, 0xEE, np.uint8)
    pool = Pages(page_bytes, room.nbytes).pool(room.ctypes.data)
    made = Worker(pool, f"other {page_bytes} {os.getpid()}", config=WorkerConfig(host="127.0.0.1"))
    made.room = room  # type: ignore[attr-defined]  # lives as long
    return made


def owners() -> dict[str, Callable[[Ask], bytes | None]]:
    """How owners of each kind answer an ask for objects; they all greet as they should. None: not at all."""
    ours, theirs = worker(PAGE), worker(2 * PAGE)
    numbers = iter(range(10**9))

    def offered(by: Worker, num_pages: int, is_live: bool = True) -> bytes:
        name = f"r{next(numbers)}"
        ticket = by.offer(name, list(range(num_pages)))
        if not is_live:
            by.abort(name)
        return Answer(frozenset(), ticket).to_bytes()

    def pages(asked: Ask) -> int:
        return sum(-(-each.size // PAGE) for each in asked.objects)

    return {
        "garbage": lambda asked: b"\xff" * 3000,
        "silent": lambda asked: None,
        "stale": lambda asked: offered(ours, pages(asked), is_live=False),
        "fewer": lambda asked: offered(ours, pages(asked) - 1),
        "layout": lambda asked: offered(theirs, pages(asked)),
        "huge": lambda asked: b"=" + b"\0" * (16 << 20),
    }


def serve(kinds: dict[str, int]) -> None:
    known = owners()

    def answer(kind: str, port: int) -> None:
        with zmq.Context() as context, context.socket(zmq.REP) as owner:
            be_owner(owner, SECRET)
            owner.bind(f"tcp://127.0.0.1:{port}")
            while True:
                asked = Ask.from_bytes(owner.recv())
                reply = known[kind](asked) if asked.objects else b""
                if reply is None:
                    threading.Event().wait()
                owner.send(reply)

    for each in kinds.items():
        threading.Thread(target=answer, args=each, daemon=True).start()
    print("serving", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    if action == "serve":
        serve({kind: int(port) for kind, port in (each.split("=") for each in arguments)})
    else:
        {"send": send, "ask": ask}[action](*arguments)
