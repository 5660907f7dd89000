# SPDX-License-Identifier: Apache-2.0
"""Decides how a process authenticates itself and its peers: with mutual TLS, or in plaintext where that is allowed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from kvlink.config import WorkerConfig
from kvlink.config.addresses import is_loopback, plain_host
from kvlink.control.security.callers import Gate, coordinator_gate
from kvlink.control.security.host_tokens import HostTokens, Prover, Verifier, host_tokens
from kvlink.control.security.keys import (
    COORDINATOR,
    Keyring,
    Keys,
    TlsFiles,
    expiry,
    keyring,
    listed,
    tenant_name,
    tenants_in,
)
from kvlink.control.security.reloading_channel import Options, ProvingChannel, ReloadingChannel
from kvlink.control.security.tenants import TenantsFile
from kvlink.control.security.tokens import TokenFile, token_file
from kvlink.errors import ConfigError

_HOW = (
    "set KVLINK_TLS_CA, KVLINK_TLS_CERT and KVLINK_TLS_KEY (`kvlink certs` makes them for development), or "
    "KVLINK_INSECURE=1 if everybody on this network may read and write every request's blocks"
)


@dataclass(frozen=True, slots=True)
class Security:
    """Holds the security settings of all servers and clients of a process. Without a keyring they speak plaintext."""

    keyring: Keyring | None = None
    insecure: bool = False
    """Plaintext is allowed beyond loopback too."""
    check_hosts: bool = True
    """A server's certificate must have the host name of its address, beside its role or tenant."""
    token_file: str = ""
    """The token in it identifies this process to the coordinator. Without TLS, callers on this host show it."""

    @classmethod
    def of(cls, config: WorkerConfig) -> Security:
        """Makes the settings from a config. Raises ConfigError if files are missing, expired or do not fit together."""
        given = (config.tls_ca, config.tls_cert, config.tls_key)
        if any(given) and not all(given):
            raise ConfigError(
                "KVLINK_TLS_CA, KVLINK_TLS_CERT and KVLINK_TLS_KEY belong together: set all of them or none"
            )
        ring = keyring(TlsFiles(*map(Path, given))) if all(given) else None
        security = cls(ring, config.insecure, config.tls_hosts, config.token_file)
        if config.token_file:
            security.host_tokens()
        return security

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Security:
        """Makes the settings from the KVLINK_ variables. Raises ConfigError."""
        return cls.of(WorkerConfig.from_env(os.environ if env is None else env))

    def tenant(self) -> str:
        """Returns the one tenant in this process's certificate, or "" without TLS. Raises ConfigError."""
        if self.keyring is None:
            return ""
        names = self.keyring.current().names
        tenants = tenants_in(names)
        if len(tenants) != 1:
            raise ConfigError(
                f"a worker's certificate must have the DNS name {tenant_name('tenant')} of exactly one tenant; "
                f"KVLINK_TLS_CERT has {listed(names)} (for development: `kvlink certs worker --tenant NAME`)"
            )
        return tenants[0]

    def check_coordinator(self) -> None:
        """Raises ConfigError if this process's certificate is not a coordinator's."""
        names = self.keyring.current().names if self.keyring else (COORDINATOR,)
        if COORDINATOR not in names:
            raise ConfigError(
                f"a coordinator's certificate must have the DNS name {COORDINATOR}; KVLINK_TLS_CERT has "
                f"{listed(names)} (for development: `kvlink certs coordinator --host HOST`)"
            )

    def coordinator_gate(self, tenants: str) -> Gate:
        """Returns the gate of a coordinator, by the rules in the file `tenants` if it is given.

        Raises ConfigError like TenantsFile, and for a file without TLS.
        """
        if not tenants:
            return coordinator_gate
        if self.keyring is None:
            raise ConfigError(
                f"--tenants {tenants} has no effect without TLS, because callers cannot be identified; {_HOW}"
            )
        return TenantsFile(Path(tenants))

    def server_credentials(self, host: str) -> grpc.ServerCredentials | None:
        """Returns credentials for listening on `host`, or None for plaintext.

        Raises ConfigError where plaintext must be allowed explicitly.
        """
        ring = self.keyring
        if ring is None:
            self.allow_plaintext(host, f"listening on {host}")
            return None
        served = ring.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Returns changed certificates or None. gRPC calls it before every handshake, on its own threads."""
            nonlocal served
            now = ring.current()
            if now is served:
                return None
            served = now
            return _certificates(now.ca, now.cert, now.key)

        first = _certificates(served.ca, served.cert, served.key)
        return grpc.dynamic_ssl_server_credentials(
            first, cast(Any, changed), require_client_authentication=True
        )

    def host_tokens(self) -> HostTokens | None:
        """Returns the tokens that processes of this host show each other, or None under TLS.

        Raises ConfigError for a file without a token.
        """
        return None if self.keyring else host_tokens(self.token_file)

    def verifier(self, host: str) -> Verifier | None:
        """Returns the verifier of a server on `host`, or None under TLS.

        Off loopback it admits everybody, and proves the server to callers on this host. Raises ConfigError.
        """
        tokens = self.host_tokens()
        if tokens is None:
            return None
        admits_all = not is_loopback(host)
        with suppress(ConfigError) if admits_all else nullcontext():
            tokens.prepare()
        return Verifier(tokens, admits_all=admits_all)

    def coordinators(self) -> Trust:
        """Returns the trust of clients of coordinators."""
        tokens = token_file(Path(self.token_file)) if self.keyring and self.token_file else None
        return Trust(self, COORDINATOR, tokens, self.host_tokens())

    def workers(self, tenant: str | None = None) -> Trust:
        """Returns the trust of clients of worker agents of a tenant, the own one by default. Raises ConfigError."""
        if self.keyring is None:
            return Trust(self, "", None, self.host_tokens())
        return Trust(self, tenant_name(self.tenant() if tenant is None else tenant))

    def services(self) -> Trust:
        """Returns the trust of clients of other services such as etcd. On loopback they use plaintext."""
        return Trust(self, "")

    def server(self, options: Options, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> Any:
        """Makes a grpc.aio.Server, or a substitute for it."""
        return grpc.aio.server(options=options, interceptors=interceptors)

    def channel(self, address: str, options: Options) -> Any:
        """Makes a plaintext grpc.aio.Channel, or a substitute for it. `Trust.dial` decides when."""
        return grpc.aio.insecure_channel(address, options=options)

    def allow_plaintext(self, host: str, what: str) -> None:
        """Raises ConfigError where plaintext must be allowed explicitly."""
        if is_loopback(host):
            return
        if not self.insecure:
            raise ConfigError(f"{what} without TLS must be allowed explicitly: {_HOW}")
        if self.token_file:
            raise ConfigError(
                f"{what}: KVLINK_TOKEN_FILE without TLS is for loopback only; unset it, or {_HOW}"
            )


@dataclass(frozen=True, slots=True)
class Trust:
    """Says how a client authenticates a server and itself."""

    security: Security
    wanted: str
    """The DNS name of the server's role or tenant, or "" if its host name is enough."""
    tokens: TokenFile | None = None
    host_tokens: HostTokens | None = None
    """The tokens to show to a server on this host without TLS."""

    def dial(self, address: str, options: Options) -> Any:
        """Makes a grpc.aio.Channel, or a substitute. Raises ConfigError where plaintext must be allowed explicitly."""
        ring, tokens = self.security.keyring, self.tokens
        host = plain_host(address.rpartition(":")[0])
        if ring is None or (not self.wanted and is_loopback(host)):
            self.security.allow_plaintext(host, f"calling {address}")
            if self.host_tokens is None or not is_loopback(host):
                return self.security.channel(address, options)
            port = int(address.rpartition(":")[2])
            # By name it could be ::1, where another user's program may listen on the same port and pass calls on.
            dialled = f"127.0.0.1:{port}" if host.lower() == "localhost" else address
            plain, prover = self.security.channel(dialled, options), Prover(self.host_tokens, port)
            return ProvingChannel(plain, prover, address, believes_all=self.security.insecure)
        checks: list[tuple[str, Any]] = []
        if self.wanted:
            checks.append(("grpc.ssl_target_name_override", self.wanted))
            if self.security.check_hosts:  # gRPC compares it to the certificate for every call
                checks.append(("grpc.default_authority", address))

        def version() -> tuple[Keys, str]:
            return ring.current(), tokens.current() if tokens else ""

        def connect() -> grpc.aio.Channel:
            keys, token = version()
            trusted = grpc.ssl_channel_credentials(keys.ca, keys.key, keys.cert)
            if token:
                call = grpc.access_token_call_credentials(token)
                trusted = grpc.composite_channel_credentials(trusted, call)
            return grpc.aio.secure_channel(address, trusted, options=[*options, *checks])

        return ReloadingChannel(version, connect)

    def advice(self, sentence: str) -> str:
        """Returns advice for a call that failed with gRPC's `sentence`, or "" if it does not point at trust."""
        ring = self.security.keyring
        if ring is None:
            return _for_plaintext(sentence)
        return _for_tls(sentence, ring.current(), self.wanted)


def _certificates(ca: bytes, cert: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


_TRY = "(KVLINK_TLS_CA, KVLINK_TLS_CERT, KVLINK_TLS_KEY; `kvlink certs` makes them for development)"

_HUNG_UP = ("ocket closed", "reset", "TSI_DATA_CORRUPTED")
"""gRPC's own servers close the connection silently. Go servers such as etcd send an alert that gRPC cannot read."""


def _for_plaintext(sentence: str) -> str:
    """Returns advice for a client without certificates, or "" if the error does not point at TLS."""
    if "failed to connect" in sentence and "ocket closed" in sentence:
        return f"It closed the connection at once. If it requires TLS, give this process certificates {_TRY}"
    return ""


def _for_tls(sentence: str, keys: Keys, wanted: str) -> str:
    """Returns advice for a client with certificates, or "" if the error does not point at TLS.

    `wanted` is the name that the server's certificate must have.
    """
    own = f"this process's certificate ({listed(keys.names)}; {expiry(keys.expires_at)})"
    if "WRONG_VERSION_NUMBER" in sentence:
        return f"It speaks plaintext and this process TLS: give it certificates {_TRY}, or unset them for this process"
    if "certificate has expired" in sentence:
        return "Its certificate has expired: renew it (for development: `kvlink certs --renew`)"
    if "CERTIFICATE_VERIFY_FAILED" in sentence:
        return "Its certificate was not issued by a CA in this process's KVLINK_TLS_CA: give both the same CA"
    if "Hostname Verification" in sentence or "Peer name" in sentence:  # gRPC 1.85, 1.71
        return f"Its certificate lacks the name {wanted}: check the address, or issue a certificate with that name"
    if "call host does not match" in sentence:
        return (
            "Its certificate does not have the host name of its address: issue one with that name or address, or check "
            "only roles and tenants (KVLINK_TLS_HOSTS=0)"
        )
    if "failed to connect" in sentence and any(sign in sentence for sign in _HUNG_UP):
        if keys.expires_at < time.time():
            return f"It closed the connection: {own} has expired; renew it (for development: `kvlink certs --renew`)"
        return (
            f"It closed the connection during the handshake: it does not trust {own}. Give both the same CA "
            "(KVLINK_TLS_CA)"
        )
    return ""
