# SPDX-License-Identifier: Apache-2.0
"""The server's end of gRPC over the simulated network, as far as kvlink uses that of grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from control_simulation.calls import ClientCall, Metadata, SimulatedChannel
from control_simulation.network import Connection, Network
from control_simulation.processes import Process, Steps, of_call

from kvlink.control.security import Security
from kvlink.control.security.host_tokens import HostTokens
from kvlink.control.security.reloading_channel import Options, ReloadingChannel

_FIRST_PORT = 40_000


class _Aborted(Exception):
    """Ends a handler."""


class ServerCall:
    """One call as its handler sees it: it serves as a grpc.aio.ServicerContext."""

    def __init__(self, connection: Connection, call: ClientCall, handler: Any, network: Network) -> None:
        self._connection = connection
        self._call = call
        self._handler = handler
        self._network = network
        self._is_over = False
        self._status: list[Any] = [grpc.StatusCode.OK, "", ()]
        self._num_messages = 1
        self._steps = Steps()
        context = copy_context()
        context.run(of_call.set, self._steps)
        self.task = context.run(asyncio.get_running_loop().create_task, self._run())

    @property
    def path(self) -> str:
        return self._call.path

    def cancel(self) -> None:
        """The client has gone."""
        self._is_over = True
        self._connection.calls.pop(self._call.number, None)
        self.task.cancel()

    def invocation_metadata(self) -> Metadata:
        return tuple(self._call.metadata)

    def peer(self) -> str:
        return f"ipv4:{self._connection.processes[0].host}:{_FIRST_PORT}"

    def peer_identities(self) -> None:
        return None

    async def write(self, value: Any) -> None:
        self._num_messages += 1
        blob = self._encoded(value)
        await self._call.replies.room(blob)
        self._send(f"reply {len(blob)}", partial(self._call.replies.put, blob))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: Metadata = ()) -> NoReturn:
        self._end(code, details, trailers)
        raise _Aborted

    def set_code(self, code: grpc.StatusCode) -> None:
        self._status[0] = code

    def set_details(self, details: str) -> None:
        self._status[1] = details

    def set_trailing_metadata(self, trailers: Metadata) -> None:
        self._status[2] = trailers

    async def read(self) -> Any:
        blob = await self._call.requests.get()
        return grpc.aio.EOF if blob is None else self._decoded(blob)

    def _send(self, what: str, deliver: Any) -> None:
        if not self._is_over:
            self._connection.down.send(what, deliver)

    def _end(self, code: grpc.StatusCode, details: str = "", trailers: Metadata = ()) -> None:
        self._send(f"end {code.name}", partial(self._call.end, code, details, trailers))
        self._is_over = True
        self._connection.calls.pop(self._call.number, None)

    def _encoded(self, value: Any) -> bytes:
        encode = self._handler.response_serializer
        blob: bytes = encode(value) if encode else value
        return blob + self._connection.processes[1].says_more

    def _decoded(self, blob: bytes) -> Any:
        self._num_messages += 1
        decode = self._handler.request_deserializer
        return decode(blob) if decode else blob

    async def _requests(self) -> AsyncIterator[Any]:
        while (blob := await self._call.requests.get()) is not None:
            yield self._decoded(blob)

    async def _run(self) -> None:
        handler = self._handler
        try:
            if handler.stream_stream is not None:
                await handler.stream_stream(self._requests(), self)
            else:
                request = self._decoded(await self._call.requests.get() or b"")
                if handler.unary_stream is not None:
                    await handler.unary_stream(request, self)
                else:
                    reply = await handler.unary_unary(request, self)
                    if self._status[0] is grpc.StatusCode.OK:
                        await self.write(reply)
            self._end(*self._status)
        except _Aborted:
            pass
        except Exception as error:
            self._end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            self._network.note_steps(self._call.path, self._steps.num / self._num_messages)


class SimulatedServer:
    """Implements the part of grpc.aio.Server that kvlink needs."""

    def __init__(self, network: Network, process: Process, older: bool = False) -> None:
        self.process = process
        self._older = older
        self._network = network
        self._services: list[Any] = []
        self._address = ""
        self._connections: dict[Connection, None] = {}
        self._stopping = False

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._services.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """These have been added as generic ones, too."""

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or next(
            free for free in range(_FIRST_PORT, 1 << 16) if f"{host}:{free}" not in self._network.listeners
        )
        self._address = f"{host}:{number}"
        if self._address in self._network.listeners:
            raise RuntimeError("Address already in use")
        return number

    async def start(self) -> None:
        self._network.listeners[self._address] = self

    async def stop(self, grace: float | None) -> None:
        """New calls are refused; those that run have `grace` seconds."""
        if self._stopping:
            return
        self._stopping = True
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        tasks = [call.task for connection in self._connections for call in connection.calls.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for connection in list(self._connections):
            connection.close(self.process, "server is stopping")

    def accept(self, connection: Connection) -> None:
        """As of `Listener`."""
        self._connections[connection] = None

    def begin(self, connection: Connection, call: ClientCall) -> None:
        """A call has come."""
        if self._stopping:
            end = partial(call.end, grpc.StatusCode.UNAVAILABLE, "GOAWAY received")
            connection.down.send("refused", end)
            return
        details = _Details(call.path, tuple(call.metadata))
        handler = next(filter(None, (service.service(details) for service in self._services)), None)
        if handler is None or (self._older and "Prefix" in call.path):
            connection.down.send(
                "none", partial(call.end, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            )
            return
        connection.calls[call.number] = ServerCall(connection, call, handler, self._network)

    def broken(self, connection: Connection, why: str) -> None:
        """As of `End`."""
        self._connections.pop(connection, None)
        for call in list(connection.calls.values()):
            call.cancel()


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: Metadata


@dataclass(frozen=True)
class SimulatedSecurity(Security):
    """Dials and serves for one process on a simulated network, in plaintext."""

    network: Network | None = None
    process: Process | None = None
    insecure: bool = True
    older: bool = False
    """The server is of a release that had no directory of prefixes."""

    def server(self, options: Options, interceptors: Sequence[Any] = ()) -> Any:
        return SimulatedServer(self._network(), self._process(), self.older)

    def channel(self, address: str, options: Options) -> Any:
        """As under TLS, with certificates that are renewed."""
        network, process = self._network(), self._process()
        return ReloadingChannel(
            lambda: network.certificates, lambda: SimulatedChannel(network, process, address)
        )

    def host_tokens(self) -> HostTokens | None:
        return None

    def _network(self) -> Network:
        assert self.network is not None
        return self.network

    def _process(self) -> Process:
        assert self.process is not None
        return self.process
