# SPDX-License-Identifier: Apache-2.0
"""How one process proves who it is and whom it believes: mutual TLS, or plaintext where that is allowed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from kvlink.addresses import is_loopback, plain_host
from kvlink.config import WorkerConfig
from kvlink.control.security import advice
from kvlink.control.security.callers import Gate, coordinator_gate
from kvlink.control.security.host_tokens import HostTokens, Prover, Verifier, host_tokens
from kvlink.control.security.keys import Keyring, Keys, TlsFiles, keyring
from kvlink.control.security.names import COORDINATOR, listed, tenant_name, tenants_in
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
    """Shared by all servers and clients of a process. Without a keyring they speak plaintext."""

    keyring: Keyring | None = None
    insecure: bool = False
    """Plaintext is allowed off loopback, too."""
    check_hosts: bool = True
    """A server's certificate must name the host that was dialled, beside its role or tenant."""
    token_file: str = ""
    """Its contents tell the coordinator who this is; without TLS, they are what callers on this host show."""

    @classmethod
    def of(cls, config: WorkerConfig) -> Security:
        """Raises ConfigError for files that are missing, expired or do not fit together."""
        given = (config.tls_ca, config.tls_cert, config.tls_key)
        if any(given) and not all(given):
            raise ConfigError(
                "KVLINK_TLS_CA, KVLINK_TLS_CERT and KVLINK_TLS_KEY go together: set all or none"
            )
        ring = keyring(TlsFiles(*map(Path, given))) if all(given) else None
        security = cls(ring, config.insecure, config.tls_hosts, config.token_file)
        if config.token_file:
            security.host_tokens()
        return security

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Security:
        """As the KVLINK_ variables say. Raises ConfigError."""
        return cls.of(WorkerConfig.from_env(os.environ if env is None else env))

    def tenant(self) -> str:
        """The one that this process's certificate names; "" without TLS. Raises ConfigError."""
        if self.keyring is None:
            return ""
        names = self.keyring.current().names
        tenants = tenants_in(names)
        if len(tenants) != 1:
            raise ConfigError(
                f"a worker's certificate has the DNS name {tenant_name('tenant')} of its one tenant; KVLINK_TLS_CERT "
                f"has {listed(names)} (for development: `kvlink certs worker --tenant NAME`)"
            )
        return tenants[0]

    def check_coordinator(self) -> None:
        """Raises ConfigError when this process's certificate is none of a coordinator."""
        names = self.keyring.current().names if self.keyring else (COORDINATOR,)
        if COORDINATOR not in names:
            raise ConfigError(
                f"a coordinator's certificate has the DNS name {COORDINATOR}; KVLINK_TLS_CERT has {listed(names)} "
                "(for development: `kvlink certs coordinator --host HOST`)"
            )

    def coordinator_gate(self, tenants: str) -> Gate:
        """By the rules of a file, if one is given. Raises ConfigError as TenantsFile does, and without TLS."""
        if not tenants:
            return coordinator_gate
        if self.keyring is None:
            raise ConfigError(
                f"--tenants {tenants} means nothing without TLS: nobody can say who calls; {_HOW}"
            )
        return TenantsFile(Path(tenants))

    def server_credentials(self, host: str) -> grpc.ServerCredentials | None:
        """For listening on `host`; None: plaintext. Raises ConfigError where that needs to be asked for."""
        ring = self.keyring
        if ring is None:
            self.allow_plaintext(host, f"listening on {host}")
            return None
        served = ring.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """gRPC asks before every handshake, on threads of its own."""
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
        """What processes of this host show each other; None under TLS. Raises ConfigError for a file without."""
        return None if self.keyring else host_tokens(self.token_file)

    def verifier(self, host: str) -> Verifier | None:
        """For a server on `host`; None: certificates are asked for, or nothing is. Raises ConfigError."""
        tokens = self.host_tokens() if is_loopback(host) else None
        if tokens is None:
            return None
        tokens.prepare()
        return Verifier(tokens)

    def coordinators(self) -> Trust:
        """For clients of coordinators."""
        tokens = token_file(Path(self.token_file)) if self.keyring and self.token_file else None
        return Trust(self, COORDINATOR, tokens, self.host_tokens())

    def workers(self, tenant: str | None = None) -> Trust:
        """For clients of workers' agents, of the own tenant unless another is given. Raises ConfigError as `tenant`."""
        if self.keyring is None:
            return Trust(self, "", None, self.host_tokens())
        return Trust(self, tenant_name(self.tenant() if tenant is None else tenant))

    def services(self) -> Trust:
        """For clients of what is not kvlink's, as etcd: certificates as elsewhere, but plaintext on loopback."""
        return Trust(self, "")

    def server(self, options: Options, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> Any:
        """A grpc.aio.Server, or what serves as one."""
        return grpc.aio.server(options=options, interceptors=interceptors)

    def channel(self, address: str, options: Options) -> Any:
        """A grpc.aio.Channel in plaintext, or what serves as one. `Trust.dial` says when."""
        return grpc.aio.insecure_channel(address, options=options)

    def allow_plaintext(self, host: str, what: str) -> None:
        """Raises ConfigError where plaintext needs to be asked for."""
        if is_loopback(host):
            return
        if not self.insecure:
            raise ConfigError(f"{what} without TLS is not done unless asked for: {_HOW}")
        if self.token_file:
            raise ConfigError(
                f"{what}: KVLINK_TOKEN_FILE without TLS is for loopback alone; unset it, or {_HOW}"
            )


@dataclass(frozen=True, slots=True)
class Trust:
    """What a client asks of the far end, and tells it."""

    security: Security
    wanted: str
    """The DNS name of the far end's role or tenant; "": its host's is enough."""
    tokens: TokenFile | None = None
    host_tokens: HostTokens | None = None
    """Without TLS: what a far end on this host is shown."""

    def dial(self, address: str, options: Options) -> Any:
        """A grpc.aio.Channel, or what serves as one. Raises ConfigError where plaintext needs to be asked for."""
        ring, tokens = self.security.keyring, self.tokens
        host = plain_host(address.rpartition(":")[0])
        if ring is None or (not self.wanted and is_loopback(host)):
            self.security.allow_plaintext(host, f"calling {address}")
            plain = self.security.channel(address, options)
            if self.host_tokens is None or not is_loopback(host):
                return plain
            return ProvingChannel(plain, Prover(self.host_tokens, int(address.rpartition(":")[2])))
        checks: list[tuple[str, Any]] = []
        if self.wanted:
            checks.append(("grpc.ssl_target_name_override", self.wanted))
            if self.security.check_hosts:  # gRPC compares it to the certificate for every call
                checks.append(("grpc.default_authority", address))

        def version() -> tuple[Keys, str]:
            return ring.current(), tokens.current() if tokens else ""

        def credentials() -> grpc.ChannelCredentials:
            keys, token = version()
            tls = grpc.ssl_channel_credentials(keys.ca, keys.key, keys.cert)
            if not token:
                return tls
            return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(token))

        return ReloadingChannel(address, [*options, *checks], version, credentials)

    def advice(self, sentence: str) -> str:
        """What to do about a call that failed with gRPC's `sentence`; "": it does not look like a matter of trust."""
        ring = self.security.keyring
        if ring is None:
            return advice.for_plaintext(sentence)
        return advice.for_tls(sentence, ring.current(), self.wanted)


def _certificates(ca: bytes, cert: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)
