# SPDX-License-Identifier: Apache-2.0
"""Lists requests that no honest client sends, and handoffs of peers that do not fit, for servers of the OpenAI API.

Nothing here does I/O or needs kvlink: a lane sends `Hostile.wire` over a socket of its own. Whatever the answer is, the
server lives, and everybody else's tokens are right. For servers without vLLM's handoffs, use `WITHOUT_HANDOFF`.
"""

from __future__ import annotations

import base64
import copy
import enum
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Body: TypeAlias = dict[str, Any]
Params: TypeAlias = dict[str, Any]
"""The value of `kv_transfer_params`."""

PARAMS, KEY, ID = "kv_transfer_params", "kvlink", "X-Request-Id"
ASK_FOR_A_HANDOFF: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NUM_NEW = 8
TICKET_TEXT = "S1ZUM" + "A" * 95
"""Looks like the text of a ticket, which is a secret."""
SURROGATE = "\ud800"
_DEEP = 10_000
_NESTED = "@nested"
_BEYOND_FLOAT = "@1e999"


class At(enum.Enum):
    """The server that is asked."""

    PREFILL = "prefill, directly, for a handoff"
    DECODE = "decode, directly, with a handoff"
    ROUTER = "the router, or the server itself where there is none"


class Given(enum.Enum):
    """The state of the honest handoff that `Hostile.change` makes a hostile one from."""

    NOTHING = "no handoff"
    FRESH = "its blocks wait at prefill"
    USED = "another request has loaded it and has ended"
    EXPIRED = "its lease has ended by itself"
    OF_ANOTHER_PROMPT = "it belongs to another prompt of the same length"
    SHARED = "`copies` requests come with it at once"


class Allowed(enum.Enum):
    """The answers that a client may get. The server lives in any case."""

    ANYTHING = "any status, and no answer"
    RIGHT = "200, with the tokens of a plain server"
    RIGHT_OR_REFUSED = "200 with the tokens of a plain server, or a status of 400 and above"


class Manner(enum.Enum):
    """How the client reads the answer."""

    WHOLE = "to its end"
    CUT = "it closes the connection after the answer's first byte"
    GONE = "it closes the connection before the answer's first byte"


@dataclass(frozen=True)
class Hostile:
    """One request. `change` makes the hostile body from an honest one, in which `kv_transfer_params` are honest too."""

    name: str
    at: At
    change: Callable[[Body], object] = lambda body: body
    given: Given = Given.NOTHING
    allowed: Allowed = Allowed.RIGHT_OR_REFUSED
    headers: Mapping[str, bytes] = field(default_factory=dict)
    path: str = "/v1/completions"
    manner: Manner = Manner.WHOLE
    copies: int = 1
    """The number of clients that send it at the same time."""

    def wire(self, host: str, model: str, tokens: Sequence[int], handoff: Params | None = None) -> bytes:
        """Returns the HTTP request. `handoff`: the honest one, unless `given` is NOTHING."""
        body: Body = {"model": model, "prompt": list(tokens), "max_tokens": NUM_NEW, "temperature": 0}
        body["return_token_ids"] = True
        if handoff is not None:
            body[PARAMS] = copy.deepcopy(handoff)
        elif self.at is At.PREFILL:
            body |= {PARAMS: dict(ASK_FOR_A_HANDOFF), "max_tokens": 1}
        content = _json(self.change(body))
        fixed = {"Host": host.encode(), "Content-Type": b"application/json", "Connection": b"close"}
        headers = {**fixed, **self.headers, "Content-Length": str(len(content)).encode()}
        head = b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in headers.items())
        return f"POST {self.path} HTTP/1.1\r\n".encode() + head + b"\r\n" + content


def _json(value: object) -> bytes:
    """Returns JSON as Python's parser takes it, with NaN, surrogates, numbers beyond a float and deep lists."""
    if isinstance(value, bytes):
        return value
    text = json.dumps(value).replace(f'"{_NESTED}"', "[" * _DEEP + "]" * _DEEP)
    return text.replace(f'"{_BEYOND_FLOAT}"', "1e999").encode()


# Changes of a body.


def _with(**values: Any) -> Callable[[Body], Body]:
    return lambda body: body | values


def _params(**values: Any) -> Callable[[Body], Body]:
    """Adds values to the honest parameters."""
    return lambda body: body | {PARAMS: body.get(PARAMS, {}) | values}


def _handoff(change: Callable[[Params], Any]) -> Callable[[Body], Body]:
    """Changes kvlink's part of the parameters. What `change` returns replaces it, unless it returns None."""

    def changed(body: Body) -> Body:
        params = body[PARAMS]
        made = change(params[KEY])
        return body if made is None else body | {PARAMS: params | {KEY: made}}

    return changed


def _owners(change: Callable[[list[Any]], Any]) -> Callable[[Body], Body]:
    """Changes the first owner in place: its worker id, epoch and agent. What `change` returns replaces all owners."""

    def changed(given: Params) -> Params | None:
        made = change(given["owners"][0])
        return None if made is None else given | {"owners": made}

    return _handoff(changed)


def _owner(place: int, value: Any) -> Callable[[Body], Body]:
    def changed(owner: list[Any]) -> None:
        owner[place] = value

    return _owners(changed)


_WORKER, _EPOCH, _AGENT = range(3)

# The ticket: a prefix with the checksum of everything after it, a header, seats, names and block ids.
_PREFIX_BYTES, _CHECKSUM_AT, _VERSION_AT, _SEATS_AFTER = 12, 8, 6, 4
NUM_TOKENS, TTL_MS = (8, "<I"), (32, "<I")
_SEAT_BYTES = 20
Field: TypeAlias = tuple[int, str]
"""The offset of a field after the prefix, and its format."""


def ticket_with(text: str, at: Field, value: int) -> str:
    """Returns the text of a ticket with another value in a field, and a valid checksum."""
    blob = bytearray(base64.urlsafe_b64decode(text))
    struct.pack_into(at[1], blob, _PREFIX_BYTES + at[0], value)
    return _sealed(blob)


def forged(text: str) -> str:
    """Returns the text of a ticket whose every seat has other nonces, which are possible ones."""
    blob = bytearray(base64.urlsafe_b64decode(text))
    header_bytes = struct.unpack_from("<H", blob, _SEATS_AFTER)[0]
    for seat in range(blob[_PREFIX_BYTES + 21]):
        first = _PREFIX_BYTES + header_bytes + seat * _SEAT_BYTES + 4
        for at in (first, first + 8):
            nonce = struct.unpack_from("<Q", blob, at)[0]
            struct.pack_into("<Q", blob, at, (nonce ^ 0x5A5A_5A5A_0000_0000) | 1 << 20)
    return _sealed(blob)


def of_version(text: str, version: int) -> str:
    """Returns the text of a ticket of another protocol version."""
    blob = bytearray(base64.urlsafe_b64decode(text))
    struct.pack_into("<H", blob, _VERSION_AT, version)
    return _sealed(blob)


def _sealed(blob: bytearray) -> str:
    struct.pack_into("<I", blob, _CHECKSUM_AT, zlib.crc32(blob[_PREFIX_BYTES:]))
    return base64.urlsafe_b64encode(blob).decode()


def _ticket(at: Field, value: int) -> Callable[[Body], Body]:
    return _handoff(lambda given: given | {"ticket": ticket_with(given["ticket"], at, value)})


def _another_group(given: Params) -> Params:
    blocks = base64.b64encode(struct.pack("<2I", 1, 2)).decode()
    sizes = given["block_tokens"] + "," + given["block_tokens"].split(",")[0]
    return given | {"groups": [*given["groups"], blocks], "block_tokens": sizes}


def _one_group_fewer(given: Params) -> Params:
    return given | {"groups": given["groups"][:-1], "block_tokens": given["block_tokens"].rpartition(",")[0]}


def _block_tokens(size: int) -> Callable[[Body], Body]:
    def changed(given: Params) -> Params:
        return given | {"block_tokens": ",".join(str(size) for _ in given["block_tokens"].split(","))}

    return _handoff(changed)


def _id(name: str, value: bytes, at: At = At.PREFILL, **more: Any) -> Hostile:
    return Hostile(f"X-Request-Id {name}", at, headers={ID: value}, **more)


def _to_decode(name: str, change: Callable[[Body], Body], **more: Any) -> Hostile:
    return Hostile(name, At.DECODE, change, given=more.pop("given", Given.FRESH), **more)


IDS: tuple[Hostile, ...] = (
    _id("of 513 bytes", b"x" * 513),
    _id("of 513 bytes, through the router", b"x" * 513, At.ROUTER),
    _id("of 513 bytes, with a handoff", b"x" * 513, At.DECODE, given=Given.FRESH),
    _id("of 60,000 bytes", b"x" * 60_000, At.ROUTER),
    _id("of 100 KB", b"x" * 100_000, At.ROUTER),
    _id("with the text of a ticket", TICKET_TEXT.encode()),
    _id("with the text of a ticket, through the router", b"a" + TICKET_TEXT.encode(), At.ROUTER),
    _id("with a lone surrogate's bytes", b"a\xed\xa0\x80b", At.ROUTER),
    _id("with control characters", b"a\x01\x1b[2J\x7f\tb", At.ROUTER),
    _id("that is blank", b"   ", At.ROUTER),
    _id("that looks like a derived name", b"kvlink-id-" + b"0" * 32, At.ROUTER),
    _id("of a child of another request", b"0_cmpl-another", At.ROUTER),
    _id("that several have at once", b"the same", copies=4),
    _id("that several have at once, through the router", b"the same", At.ROUTER, copies=4),
    Hostile("request_id with a lone surrogate", At.PREFILL, _with(request_id="a" + SURROGATE)),
    Hostile("request_id of 100 KB", At.PREFILL, _with(request_id="x" * 100_000)),
)
"""Ids of requests. Several of these end a server that uses an id as a name of its own."""

PARAMETERS: tuple[Hostile, ...] = (
    Hostile("kv_transfer_params is a list", At.DECODE, _with(**{PARAMS: [1, 2]})),
    Hostile("kv_transfer_params is a text", At.DECODE, _with(**{PARAMS: "kvlink"})),
    Hostile("kv_transfer_params is a number", At.DECODE, _with(**{PARAMS: 2**64})),
    Hostile("kv_transfer_params is 10,000 lists deep", At.DECODE, _with(**{PARAMS: {KEY: _NESTED}})),
    Hostile(
        "a handoff of NaN, numbers of 65 bits and infinities",
        At.DECODE,
        _params(do_remote_prefill=True, remote_port=2**64, **{KEY: float("nan"), "tp_size": _BEYOND_FLOAT}),
    ),
    Hostile("a handoff that is empty", At.DECODE, _params(do_remote_prefill=True, **{KEY: {}})),
    Hostile(
        "do_remote_prefill is an object", At.DECODE, _params(do_remote_prefill={"a": []}, **{KEY: [None]})
    ),
    Hostile(
        "names of streams are numbers and lists",
        At.DECODE,
        _params(do_remote_prefill=True, kvlink_stream=[1], kvlink_answer_of={}, kvlink_answer_as=7),
    ),
    Hostile(
        "a name of a stream of 1 MB with a lone surrogate",
        At.PREFILL,
        _params(
            kvlink_stream=SURROGATE + "x" * 1_000_000,
            kvlink_answer_as=SURROGATE,
            kvlink_traceparent=SURROGATE,
        ),
    ),
    Hostile(
        "do_remote_decode with a handoff that is nonsense",
        At.PREFILL,
        _params(do_remote_prefill=True, **{KEY: {"ticket": TICKET_TEXT, "owners": 1}}),
    ),
    Hostile(
        "everything of a handoff is another type",
        At.PREFILL,
        _params(remote_host=7, remote_port="x", tp_size=[]),
    ),
)
"""Parameters that need no honest handoff."""

HANDOFFS: tuple[Hostile, ...] = (
    _to_decode("its agent has a lone surrogate", _owner(_AGENT, SURROGATE + ":1")),
    _to_decode("its agent has a NUL", _owner(_AGENT, "a\0b:1")),
    _to_decode("its agent is a scheme", _owner(_AGENT, "xds:///x")),
    _to_decode("its agent has 1 MB", _owner(_AGENT, "a" * 1_000_000 + ":1")),
    _to_decode("its worker has a lone surrogate", _owner(_WORKER, SURROGATE)),
    _to_decode("its worker has 600 bytes", _owner(_WORKER, "w" * 600)),
    _to_decode("its epoch is -1", _owner(_EPOCH, "-1")),
    _to_decode("its epoch has 65 bits", _owner(_EPOCH, str(2**64))),
    _to_decode("its epoch has 5,000 digits", _owner(_EPOCH, "9" * 5000)),
    _to_decode("its owner is a number", _owners(lambda owner: [7])),
    _to_decode("it has 1,024 owners", _owners(lambda owner: [owner] * 1024)),
    _to_decode("it has no owners", _owners(lambda owner: [])),
    _to_decode("its blocks have 0 tokens", _block_tokens(0)),
    _to_decode("its blocks have 7 tokens", _block_tokens(7)),
    _to_decode("its blocks have 2^32 tokens", _block_tokens(2**32)),
    _to_decode("it has one more cache group", _handoff(_another_group)),
    _to_decode("it has one cache group fewer", _handoff(_one_group_fewer)),
    _to_decode("its seats are forged", _handoff(lambda given: given | {"ticket": forged(given["ticket"])})),
    _to_decode("its ticket is cut", _handoff(lambda given: given | {"ticket": given["ticket"][:-40]})),
    _to_decode("its time to live is 0", _ticket(TTL_MS, 0)),
    _to_decode("its time to live is 49 days", _ticket(TTL_MS, 2**32 - 1)),
    _to_decode("it has 2^32 - 1 tokens", _ticket(NUM_TOKENS, 2**32 - 1)),
    _to_decode(
        "it has 10,000 lists in place of a ticket", _handoff(lambda given: given | {"ticket": _NESTED})
    ),
    _to_decode("it was used already", lambda body: body, given=Given.USED),
    _to_decode("two requests come with it at once", lambda body: body, given=Given.SHARED, copies=2),
    _to_decode("it belongs to another prompt", lambda body: body, given=Given.OF_ANOTHER_PROMPT),
    _to_decode("its lease has ended", lambda body: body, given=Given.EXPIRED),
    _to_decode("do_remote_decode, too", _params(do_remote_decode=True)),
    _to_decode("it comes with n of 2", _with(n=2, temperature=1), allowed=Allowed.ANYTHING),
)
"""Handoffs that were changed on their way, or that are used in another way than they were made for."""

PROMPTS: tuple[Hostile, ...] = (
    Hostile("a prompt of one token", At.ROUTER, _with(prompt=[5]), allowed=Allowed.ANYTHING),
    Hostile("a prompt of a null", At.ROUTER, _with(prompt=[None]), allowed=Allowed.ANYTHING),
    Hostile("a prompt of nothing", At.ROUTER, _with(prompt=[]), allowed=Allowed.ANYTHING),
    Hostile("no prompt, no model", At.ROUTER, lambda body: {}, allowed=Allowed.ANYTHING),
    Hostile("a body that is no object", At.ROUTER, lambda body: [body], allowed=Allowed.ANYTHING),
    Hostile("a body that is no JSON", At.ROUTER, lambda body: b'{"prompt": [', allowed=Allowed.ANYTHING),
    Hostile("n of 2", At.ROUTER, _with(n=2, temperature=1), allowed=Allowed.ANYTHING),
    Hostile("n is a list", At.ROUTER, _with(n=[2], best_of={}), allowed=Allowed.ANYTHING),
    Hostile("best_of 2", At.ROUTER, _with(best_of=2), allowed=Allowed.ANYTHING),
    Hostile("echo", At.ROUTER, _with(echo=True), allowed=Allowed.ANYTHING),
    Hostile("max_tokens of 0", At.ROUTER, _with(max_tokens=0), allowed=Allowed.ANYTHING),
    Hostile(
        "stream_options is a text",
        At.ROUTER,
        _with(stream=True, stream_options="x"),
        allowed=Allowed.ANYTHING,
    ),
)
"""Bodies that a router derives two others from."""

_LONG = {"stream": True, "max_tokens": 500}
HANG_UPS: tuple[Hostile, ...] = (
    Hostile(
        "the client closes a stream after its first byte",
        At.ROUTER,
        _with(**_LONG),
        manner=Manner.CUT,
        allowed=Allowed.ANYTHING,
    ),
    Hostile(
        "the client has gone before the first byte", At.ROUTER, manner=Manner.GONE, allowed=Allowed.ANYTHING
    ),
    Hostile("the client of a prefill has gone", At.PREFILL, manner=Manner.GONE, allowed=Allowed.ANYTHING),
    _to_decode("the client of a load has gone", _with(**_LONG), manner=Manner.GONE, allowed=Allowed.ANYTHING),
    _to_decode(
        "the client of a load closes its stream", _with(**_LONG), manner=Manner.CUT, allowed=Allowed.ANYTHING
    ),
)

REQUESTS: tuple[Hostile, ...] = (*IDS, *PARAMETERS, *HANDOFFS, *PROMPTS, *HANG_UPS)
WITHOUT_HANDOFF: tuple[Hostile, ...] = tuple(one for one in REQUESTS if one.given is Given.NOTHING)


@dataclass(frozen=True)
class Mismatched:
    """A peer that does not fit, by the handoff it sends. `change` gets an honest one's kv_transfer_params.

    `agent` names what stands at the owner's address: "" for the honest agent, "closed" for a port that refuses
    connections, "garbage" for a server that answers with random bytes, "silent" for one that never answers. The lane
    fills in the address.
    """

    name: str
    change: Callable[[Params], Params] = lambda params: params
    agent: str = ""

    def handoff(self, params: Params, agent: str = "") -> Params:
        """Returns the peer's handoff, made from an honest one. `agent`: the address of what `self.agent` names.

        Its workers have other names then, because a reader that is connected to a worker needs no agent.
        """
        changed = self.change(copy.deepcopy(params))
        if agent:
            for owner in changed[KEY]["owners"]:
                owner[_WORKER], owner[_AGENT] = f"{owner[_WORKER]} elsewhere", agent
        return changed


def _peer(change: Callable[[Params], Params | None]) -> Callable[[Params], Params]:
    def changed(params: Params) -> Params:
        made = change(params[KEY])
        return params if made is None else params | {KEY: made}

    return changed


def _twice_the_ranks(given: Params) -> Params:
    """Rank r of twice as many, at workers that do not exist."""
    owners = [[f"{worker}-of-more", epoch, agent] for worker, epoch, agent in given["owners"]]
    return given | {"owners": [*given["owners"], *owners]}


def _more_blocks_smaller(given: Params) -> Params:
    sizes = [max(1, int(size) // 2) for size in given["block_tokens"].split(",")]
    return given | {"block_tokens": ",".join(map(str, sizes))}


def _larger_blocks(given: Params) -> Params:
    return given | {"block_tokens": ",".join(str(2 * int(size)) for size in given["block_tokens"].split(","))}


def _without_window(given: Params) -> Params:
    """A sliding window's blocks where the reader has none, or all gone: block 0 stands for none."""
    blob = bytearray(base64.urlsafe_b64decode(given["ticket"]))
    num_blocks = struct.unpack_from("<I", blob, _PREFIX_BYTES + 12)[0]
    names = sum(struct.unpack_from("<3H", blob, _PREFIX_BYTES + 26))
    header_bytes = struct.unpack_from("<H", blob, _SEATS_AFTER)[0]
    at = _PREFIX_BYTES + header_bytes + blob[_PREFIX_BYTES + 21] * _SEAT_BYTES + names
    gone = num_blocks // 2
    blob[at : at + 4 * gone] = bytes(4 * gone)
    return given | {"ticket": _sealed(blob)}


def _beyond_the_pool(given: Params) -> Params:
    """Block ids of a pool that is larger than the owner's."""
    blob = bytearray(base64.urlsafe_b64decode(given["ticket"]))
    num_blocks = struct.unpack_from("<I", blob, _PREFIX_BYTES + 12)[0]
    end = len(blob) - 4 * num_blocks
    struct.pack_into(f"<{num_blocks}I", blob, end, *([2**31] * num_blocks))
    return given | {"ticket": _sealed(blob)}


def _of_another_version(given: Params) -> Params:
    return given | {"ticket": of_version(given["ticket"], 2**16 - 1)}


def _states(given: Params) -> Params:
    """Groups of states, which have no tokens, in place of attention."""
    return given | {"block_tokens": ",".join("0" for _ in given["block_tokens"].split(","))}


PEERS: tuple[Mismatched, ...] = (
    Mismatched("another number of cache groups", _peer(_another_group)),
    Mismatched("blocks of half the size", _peer(_more_blocks_smaller)),
    Mismatched("blocks of twice the size", _peer(_larger_blocks)),
    Mismatched("twice as many ranks, half of them nowhere", _peer(_twice_the_ranks)),
    Mismatched("another protocol version", _peer(_of_another_version)),
    Mismatched("a sliding window, where the reader has none", _peer(_without_window)),
    Mismatched("a larger pool", _peer(_beyond_the_pool)),
    Mismatched("states in place of attention", _peer(_states)),
    Mismatched("an agent that is dead", agent="closed"),
    Mismatched("an agent that answers garbage", agent="garbage"),
    Mismatched("an agent that never answers", agent="silent"),
)
"""Peers made from one honest server. Other dtypes, head counts, layers and models need a server of their own."""

OTHER_MODELS: tuple[str, ...] = ("qwen3", "gemma3")
"""Models of tests/engines/models.py beside llama, with other layers, head sizes, cache groups and windows."""
