# SPDX-License-Identifier: Apache-2.0
"""An etcd that wants certificates: the store shows the coordinator's own, and says what is wrong with others.

On loopback the store speaks plaintext, so these tests call loopback a host like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.certificates import HOSTS, Pki
from control.etcd_cluster import EtcdCluster, start_etcd

from kvlink.control import Claim
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.security import COORDINATOR, TlsFiles, policy
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.errors import ConfigError

NAMES = [COORDINATOR, *HOSTS]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def etcd(pki: Pki) -> Iterator[EtcdCluster]:
    etcd = start_etcd(tls=pki.files("etcd", HOSTS))
    yield etcd
    etcd.close()


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "is_loopback", lambda host: False)


def show(monkeypatch: pytest.MonkeyPatch, files: TlsFiles) -> None:
    """These are this process's own from now on."""
    for name, path in zip(("CA", "CERT", "KEY"), files, strict=True):
        monkeypatch.setenv(f"KVLINK_TLS_{name}", str(path))


async def test_coordinators_meet_in_it(pki: Pki, etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, pki.files("coordinator", NAMES))
    stores = [EtcdStore(f"etcd://{etcd.addresses}/tls") for _ in range(2)]
    for store in stores:
        await store.start()
    await stores[0].join(make_card(), rejoin=False)
    await stores[0].offer(make_offer("r"))
    assert await stores[1].claim(Claim("r", 20.0)) == [make_offer("r").ticket]
    for store in stores:
        await store.close()


def strangers(folder: Path, believes: bytes) -> TlsFiles:
    """Makes files of another CA, for a process that trusts `believes`."""
    pki = Pki(folder)
    files = pki.files("stranger", NAMES)
    files.ca.write_bytes(believes + pki.authority.pem.cert)
    return files


@pytest.mark.parametrize(
    ("believes", "says"),
    [
        (False, "Its certificate was not issued by a CA in this process's KVLINK_TLS_CA"),
        (True, "does not trust this process's certificate"),
    ],
)
async def test_who_is_not_believed_is_said_in_the_log(
    pki: Pki,
    etcd: EtcdCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    believes: bool,
    says: str,
) -> None:
    show(monkeypatch, strangers(tmp_path, pki.authority.pem.cert if believes else b""))
    store = EtcdStore(f"etcd://{etcd.addresses}/tls")
    await store.start()
    with pytest.raises(RefusedError, match="has not yet read its store") as refused:
        await store.workers()
    assert refused.value.reason is Reason.NOT_READY
    assert says in caplog.text
    await store.close()


async def test_plaintext_to_another_host_is_not_spoken(etcd: EtcdCluster) -> None:
    with pytest.raises(ConfigError, match="without TLS must be allowed explicitly"):
        EtcdStore(f"etcd://{etcd.addresses}/tls")
