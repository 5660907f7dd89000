# SPDX-License-Identifier: Apache-2.0
"""One port of an RDMA device, memory that it knows, and reliable connected queue pairs on it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR
from softroce.pyverbs_peer.formats import Port, QueuePair

__all__ = [
    "PEERS_READ",
    "PEERS_WRITE",
    "Connection",
    "Memory",
    "Nic",
    "Read",
    "WorkRefused",
    "get_device_list",
]

PEERS_READ = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
PEERS_WRITE = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE

_DEPTH = 64  # work requests under way on one queue pair
_STATUS = {
    int(getattr(e, name)): name for name in dir(e) if name.startswith("IBV_WC_") and name.endswith("_ERR")
}


class WorkRefused(Exception):
    """A work request ended badly. `status` is the name of an ibv_wc_status."""

    def __init__(self, status: int) -> None:
        self.status = _STATUS.get(status, str(status))
        super().__init__(self.status)


class Nic:
    """The first port of `device`, which may pretend to be weaker than it is: `mtu` as in QueuePair."""

    def __init__(self, device: str, mtu: int = 5, most_reads: int = 16) -> None:
        self.device = device
        self.context = Context(name=device)
        self.pd = PD(self.context)
        port = self.context.query_port(1)
        limits = self.context.query_device()
        self.is_ethernet = port.link_layer == e.IBV_LINK_LAYER_ETHERNET
        self.lid = port.lid
        self.mtu = min(port.active_mtu, mtu)
        self.reads_out = min(limits.max_qp_init_rd_atom, most_reads)
        self.reads_in = min(limits.max_qp_rd_atom, most_reads)
        self.gid_index, self.gid = self._choose_gid(port.gid_tbl_len)

    def _choose_gid(self, count: int) -> tuple[int, bytes]:
        """The last RoCE v2 one: link-local addresses come first."""
        chosen = 0, bytes(16)
        for index in range(count):
            gid = bytes.fromhex(self.context.query_gid(1, index).gid.replace(":", ""))
            if any(gid) and self.context.query_gid_type(1, index) == e.IBV_GID_TYPE_SYSFS_ROCE_V2:
                chosen = index, gid
        return chosen

    def port(self) -> Port:
        return Port(f"{self.device}:1", int(self.is_ethernet), self.lid, 2500, self.gid)

    def close(self) -> None:
        """With all that was made on it."""
        self.context.close()


class Memory:
    """Zeroed bytes, registered in slices of `slice_bytes` (one, when not given)."""

    def __init__(self, nic: Nic, num_bytes: int, access: int, slice_bytes: int | None = None) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self.address = self.bytes.ctypes.data
        self.slice_bytes = slice_bytes or num_bytes
        self.regions = [
            MR(nic.pd, min(self.slice_bytes, num_bytes - at), access, address=self.address + at)
            for at in range(0, num_bytes, self.slice_bytes)
        ]
        self.rkeys = tuple(region.rkey for region in self.regions)
        self.lkey = self.regions[0].lkey

    def words(self) -> np.ndarray:
        """The same memory as u64."""
        return self.bytes.view(np.uint64)


class Read(NamedTuple):
    """`num_bytes` from `remote` to `local`, both as the keys name them."""

    local: int
    lkey: int
    remote: int
    rkey: int
    num_bytes: int

    def request(self) -> SendWR:
        request = SendWR(
            opcode=e.IBV_WR_RDMA_READ, num_sge=1, sg=[SGE(self.local, self.num_bytes, self.lkey)]
        )
        request.set_wr_rdma(self.rkey, self.remote)
        return request


class Connection:
    """A queue pair."""

    def __init__(self, nic: Nic) -> None:
        self._nic = nic
        self._cq = CQ(nic.context, 2 * _DEPTH)
        cap = QPCap(max_send_wr=_DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=8)
        attributes = QPAttr(port_num=1)
        # Peers make sure that we live by empty writes.
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0)
        self._qp = QP(nic.pd, init, attributes)
        self._psn = secrets.randbits(24)

    def address(self) -> QueuePair:
        nic = self._nic
        return QueuePair(self._qp.qp_num, self._psn, nic.lid, nic.mtu, nic.reads_out, nic.reads_in, nic.gid)

    def connect(self, peer: QueuePair) -> None:
        nic = self._nic
        attributes = QPAttr(port_num=1)
        attributes.dest_qp_num = peer.number
        attributes.rq_psn = peer.psn
        attributes.sq_psn = self._psn
        attributes.path_mtu = min(nic.mtu, peer.mtu)
        attributes.max_dest_rd_atomic = min(nic.reads_in, peer.reads_out)
        attributes.max_rd_atomic = min(nic.reads_out, peer.reads_in)
        attributes.min_rnr_timer = 12
        attributes.timeout = 14
        attributes.retry_cnt = 7
        attributes.rnr_retry = 7
        gid = peer.gid.hex()
        route = GlobalRoute(
            dgid=GID(":".join(gid[i : i + 4] for i in range(0, 32, 4))),
            sgid_index=nic.gid_index,
            hop_limit=64,
        )
        attributes.ah_attr = AHAttr(
            dlid=peer.lid, port_num=1, is_global=int(nic.is_ethernet), gr=route if nic.is_ethernet else None
        )
        self._qp.to_rts(attributes)

    def read(self, reads: Sequence[Read]) -> None:
        """Returns when all bytes are there. Raises WorkRefused."""
        for first in range(0, len(reads), _DEPTH):
            batch = reads[first : first + _DEPTH]
            for read in batch:
                self._qp.post_send(read.request())
            self._finish(len(batch))

    def post(self, requests: Sequence[SendWR]) -> None:
        """One chain behind one doorbell, at most _DEPTH long; used up. Returns when the last is done. WorkRefused."""
        for request, following in itertools.pairwise(requests):
            request.next_wr = following
            request.send_flags = 0
        self._qp.post_send(requests[0])
        self._finish(1)

    def write(self, remote: int, rkey: int, value: int, source: Memory) -> None:
        """Stores 8 bytes, which pass through the first word of `source`. Raises WorkRefused."""
        source.words()[0] = value
        self._post(e.IBV_WR_RDMA_WRITE, [SGE(source.address, 8, source.lkey)], remote, rkey)
        self._finish(1)

    def cut(self) -> None:
        """Makes the other end fail by a write that nobody may do. Returns when it has, or is not there."""
        nothing = np.zeros(1, np.uint64)
        pieces = [SGE(nothing.ctypes.data, 8, 0)]
        self._post(e.IBV_WR_RDMA_WRITE, pieces, 0, 0, e.IBV_SEND_INLINE)
        with contextlib.suppress(WorkRefused):
            self._finish(1)

    def close(self) -> None:
        """From now on the other end gets nothing."""
        self._qp.close()
        self._cq.close()

    def _post(self, opcode: int, pieces: list[SGE], remote: int, rkey: int, flags: int = 0) -> None:
        flags |= e.IBV_SEND_SIGNALED
        request = SendWR(opcode=opcode, num_sge=len(pieces), sg=pieces, send_flags=flags)
        request.set_wr_rdma(rkey, remote)
        self._qp.post_send(request)

    def _finish(self, count: int) -> None:
        deadline = time.monotonic() + 60
        statuses: list[int] = []
        while len(statuses) < count:
            assert time.monotonic() < deadline, "the NIC does not answer"
            statuses += [completion.status for completion in self._cq.poll(count)[1]]
        for status in statuses:
            if status != e.IBV_WC_SUCCESS:
                raise WorkRefused(status)
