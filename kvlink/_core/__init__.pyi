# SPDX-License-Identifier: Apache-2.0
"""The C++ data plane. Its users: `kvlink.transfer`, benchmarks and tests."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

NIC_SLICE_BYTES: Final[int]
"""NICs register memory in slices of so many bytes. Every slice of GPU memory has a dma-buf of its own."""

def probe(transport: str) -> tuple[str, str]:
    """Why this machine cannot use a transport, and the fix; also of those that `transports` does not have."""

def fabric_providers(host: str) -> list[tuple[str, str, str]]:
    """Name, facts and why not of each provider of libfabric here. Raises TransportUnavailable without libfabric."""

def transports() -> list[tuple[str, str, int, str, str]]:
    """(name, summary, default lanes, why not here or "", fix) of every transport built in, best first."""

def prior_cost(transport: str) -> tuple[float, float, float]:
    """Returns the assumed cost of pulls over "verbs" or "cuda": start-up in us, ns of an operation, GiB/s."""

_Ticket: TypeAlias = tuple[
    str, str, str, int, Sequence[tuple[int, int, int]], bytes, bytes, int, int, int, int, int, int, bytes, bytes, int,
    bytes, int,
]  # fmt: skip
"""request_id, worker_id, agent, epoch, seats, block ids and (blocks, tokens) of groups as u32, num_tokens, ready,
ready_unit, rank, num_ranks, milliseconds to live, signature, trace, bytes of a digest, digests, model."""

def read_ticket(blob: bytes) -> _Ticket:
    """Raises ConfigError for bytes that `write_ticket` cannot have written."""

def write_ticket(*fields: object) -> bytes:
    """Takes what `read_ticket` returns. Raises ConfigError if a field exceeds its bound, TypeError beyond its type."""

class HostMemory:
    """A zeroed, mapped memfd. Raises ConfigError when there is no memory."""

    def __init__(self, bytes: int, huge_pages: bool = True) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class CudaMemory:
    """Zeroed memory of a GPU that other processes and NICs may map. Raises ConfigError when there is none left, and
    TransportUnavailable without a GPU."""

    def __init__(self, bytes: int, gpu: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class RelaxedCapture:
    """While it is entered, calls of this thread to CUDA break no capture of a graph. Without CUDA it does nothing."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

class CudaKernel:
    """kvlink/hardware/kernels/gather.cu on a GPU, from a cubin or PTX. Raises TransportUnavailable if it is refused."""

    def __init__(self, image: bytes, gpu: int) -> None: ...

def kernel_target(gpu: int) -> tuple[int, int, int]:
    """The compute capability of a GPU, two numbers, and the driver's newest CUDA (12080: 12.8).

    Raises TransportUnavailable without a driver.
    """

class Layout:
    """csrc/plan/planner.h Layout; planes are (region, layer, offset in bytes), tokens (rank, size, interleave)."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        first_head: int,
        num_heads: int,
        row_bytes: int,
        block_stride: int,
        token_stride: int,
        head_stride: int,
        planes: Sequence[tuple[int, int, int]],
        tokens: tuple[int, int, int] = (0, 1, 1),
    ) -> None: ...

class Plan:
    """Packed operations."""

    @property
    def num_ops(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def ops(self) -> Any:
        """A copy, as a structured array: offset, bytes, region, first_segment, num_segments."""
    def segments(self) -> Any:
        """A copy, as a structured array: local (address), bytes, region."""

class Planner:
    """csrc/plan/planner.h Planner. Local regions are (address, bytes). Raises LayoutMismatch or ConfigError."""

    def __init__(
        self,
        reader: Layout,
        owner: Layout,
        local_regions: Sequence[tuple[int, int]],
        remote_region_bytes: Sequence[int],
        remote_region_index: Sequence[int],
        heads: tuple[int, int] = ...,
    ) -> None: ...
    @property
    def num_layers(self) -> int:
        """One more than the highest layer of the planes."""

    def plan(
        self,
        owner_blocks: Any,
        reader_blocks: Any,
        tokens: tuple[int, int],
        layers: tuple[int, int] = ...,
        into: Plan | None = None,
    ) -> Plan:
        """Block lists are contiguous uint32 buffers. Fills `into` when given. Raises ConfigError."""

class CompletionQueue:
    """An eventfd and a list of tokens; any thread pushes, one drains."""

    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def drain(self) -> list[int]: ...
    def close(self) -> None: ...

Failure = tuple[str, str, str, int]
"""The exception's name, what failed, the fix, and the reason of StaleBlocks."""

class Transfer:
    """What a pull reads from one owner."""

    @property
    def state(self) -> int:
        """0 running, 1 failed, 2 valid, 3 valid and settled."""
    @property
    def started_ns(self) -> int:
        """By `time.monotonic_ns()`."""
    @property
    def proven_units(self) -> int:
        """Of a streaming pull: so many units have landed and validated, also if it failed later."""
    def failure(self) -> Failure | None:
        """Returns why it has failed; None when it went well."""
    def stats(self) -> TransferStats: ...

class Pull:
    """csrc/engine/pull.h Pull: one pull from its call to its end. Any thread."""

    @staticmethod
    def empty() -> Pull:
        """Returns a pull that reads nothing and has ended."""
    @property
    def state(self) -> int:
        """0 waits for its owners, 1 starting, 2 reading, 3 failed, 4 valid, 5 valid and settled."""
    @property
    def proven_tokens(self) -> int:
        """Of a relay: so many tokens have landed and validated, also if it failed later."""
    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool:
        """Releases the GIL. False: it has not ended. A negative timeout waits for ever."""
    def cancel(self) -> None:
        """On return no byte of it lands any more, and nothing of it starts."""
    def request_cancel(self) -> None:
        """Like `cancel`, and returns before the pull has ended."""
    def close(self) -> None:
        """Ends a pull that waits, because the worker closes, and prevents another attempt."""
    def notify(self, queue: CompletionQueue, token: int) -> bool:
        """Pushes `token` to `queue` when the pull ends. False: it has ended already and nothing is pushed."""
    def failure(self) -> Failure | None:
        """Returns why the pull ended while it waited for its owners. None: see the failures of its transfers."""
    def kept_blocks(self) -> bytes:
        """Returns the reader's block ids as uint32, of a pull that `Connection.pull` started and that `is_open`."""
    def transfer(self, part: int) -> Transfer | None:
        """Returns the last transfer of a part. None: its connection was broken when it should start."""
    def cut(self, part: int) -> Transfer | None:
        """Returns the transfer that was cut before the part was read again."""
    @property
    def token(self) -> int:
        """What is pushed to the control queue when `take_actions` has something."""
    def begin(self) -> None:
        """To be called when the control thread knows the token of a pull that `is_open`."""
    @property
    def is_open(self) -> bool:
        """Whether the control thread has to know this pull."""
    def take_actions(self) -> list[tuple[int, int, float]]:
        """(kind, number, until by `time.monotonic()`), see PullAction of csrc/engine/pull.h."""
    def wanted(self) -> list[int]:
        """Returns the parts of an attempt; none at the first one, which decides how many there are."""
    def connected(self, attempt: int, parts: Sequence[PartRow]) -> bool:
        """Starts the parts of an attempt. False: it is no longer wanted, and nothing has started."""
    def connected_relay(
        self, attempt: int, part: PartRow, batch_units: int, scale: int, engine: Engine, lease: int
    ) -> bool:
        """As `connected`, for a relay. At most `batch_units` units are read before the owner's slot is looked at again,
        and the `ready` of the lease of this worker becomes `scale` for each unit that has validated; lease 0: none."""
    def refused(self, attempt: int, why: str, another: bool) -> None:
        """An owner cannot be reached. `another`: the next source of a relay may work."""

def waiting_pull(engine: Engine, timeout_s: float, num_sources: int = 0, lease: int = 0) -> Pull:
    """Returns a pull that waits for its owners. With `num_sources` it is a relay, whose lease ends if it fails."""

class TransferStats(NamedTuple):
    """What one transfer moved, and how long each part took."""

    bytes: int
    num_ops: int
    num_segments: int
    plan_ns: int
    post_ns: int
    """Part of `read_ns`."""
    read_ns: int
    validate_ns: int
    settle_ns: int
    total_ns: int
    ran_inline: bool
    staged: bool
    direct_us: float
    """Predicted for the direct way; 0 where there is no staging buffer."""
    staged_us: float
    """Predicted for the staged way."""
    predicted_us: float
    """Predicted by the cost model of the path; 0 for a streaming pull."""

class PathStats:
    """Counts of the transfers over one path; may be given to several connections, one after the other."""

    def __init__(self, transport: str) -> None: ...
    def counts(
        self,
    ) -> tuple[
        int, int, int, int, int, int, int, dict[str, int], dict[tuple[bool, int], int],
        tuple[int, list[int]], tuple[int, list[int]], tuple[int, list[int]], tuple[int, list[int]],
        tuple[int, list[int]],
    ]:  # fmt: skip
        """valid, bytes, ops, segments, unsettled, redone, rails set aside, failed by exception, stale by
        (soft, reason); then (sum in ns, buckets) of plan, read, validate, settle and all."""

class PreparedPlan:
    """The reads of a pull that `Connection.prepare` planned."""

    def pull(self, seat: tuple[int, int, int], timeout_s: float) -> Pull | None:
        """Starts a pull as `Connection.pull` does."""

GroupRow = tuple[Planner, Any, Any, tuple[int, int], tuple[int, int], bool]
"""Planner, owner's and reader's blocks, tokens, layers, and whether a streaming pull reads it once all is ready."""
PartRow = tuple["Connection", Sequence[GroupRow], tuple[int, int, int], int, int]
"""Connection, cache groups, seat, stream and number of tokens, see `Connection.pull_groups`."""

class Connection:
    """One reader-side connection to one owner over one transport, with its lanes."""

    def hellos(self) -> list[bytes]: ...
    def predict_us(self, num_ops: int, num_bytes: int) -> float: ...
    def establish(
        self,
        connection_id: int,
        replies: Sequence[bytes],
        pool_keys: Sequence[bytes],
        lease_keys: Sequence[bytes],
        epoch: int,
        timeout_s: float,
    ) -> list[int]:
        """Releases the GIL. Returns the remote region index of each pool key."""
    def prepare(
        self,
        planner: Planner,
        block_ids: Any,
        into: Any,
        tokens: tuple[int, int],
        layers: tuple[int, int],
    ) -> PreparedPlan:
        """Plans a transfer. The arguments and errors are those of `pull`."""

    def pull(
        self,
        planner: Planner,
        block_ids: Any,
        into: Any,
        tokens: tuple[int, int],
        layers: tuple[int, int],
        seat: tuple[int, int, int],
        stream: int,
        timeout_s: float,
    ) -> Pull | None:
        """Starts a pull from one owner. Returns None if the connection is broken.

        `tokens` and `layers` are half-open ranges. `seat` is (slot, nonce, settle nonce); with a settle nonce of 0, or
        1 for a shared seat, the transfer only validates. `stream`: 0 if all is ready, 1 if `ready` counts blocks, 2 if
        it counts layers.
        Arguments go by position: pybind11 needs 1 us more for keywords.
        """
    def pull_groups(
        self,
        groups: Sequence[GroupRow],
        seat: tuple[int, int, int],
        stream: int,
        num_tokens: int,
        timeout_s: float,
    ) -> Pull | None:
        """Starts a pull of several cache groups, as `pull` does for one.

        `stream` may also be 3 if `ready` counts tokens, up to `num_tokens`.
        """
    def settle(self, slot: int, settle_nonce: int) -> bool:
        """One-sided, and never waits: it is queued while the lane copies. False when the connection is broken."""
    def take_lost(self) -> list[tuple[int, int]]:
        """Returns the slots and values of settles that were queued when the connection broke."""
    @property
    def token(self) -> int:
        """What is pushed to the control queue when `take_lost` has something."""
    @property
    def broken(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    @property
    def pending(self) -> int:
        """Transfers queued or under way, one that uses several lanes as often."""
    def time_read(self, region: int, offset: int, local: int, bytes: int) -> int:
        """Nanoseconds of one bare read into this worker's first region; for benchmarks, on an idle connection."""
    @property
    def num_missing(self) -> int:
        """Lanes that should be there and did not connect."""
    @property
    def lost_large(self) -> bool:
        """Whether lanes answered small reads only, when they were connected."""
    def why_broken(self) -> str: ...
    def paths(self) -> list[str]:
        """Of each lane: "mlx5_0:1->mlx5_1:1" (this worker's port and the owner's), "" where there are no ports."""
    def close(self) -> None: ...

class RdmaOptions:
    """csrc/transport_api/options.h RdmaOptions. Attributes are what the engine uses."""

    def __init__(
        self,
        *,
        connect: str,
        gid: str,
        pkey: int,
        service_level: int,
        traffic_class: int,
        timeout: int,
        retries: int,
        silence_s: float,
        qps: int,
    ) -> None: ...
    def __repr__(self) -> str: ...

class Engine:
    """Threads, registered memory, lease table and transports of one worker."""

    def __init__(
        self,
        epoch: int,
        transports: Sequence[str],
        host: str,
        port: int,
        fault: str,
        num_lease_slots: int,
        num_progress_threads: int,
        inline_us: float,
        num_lanes: int,
        nics: Sequence[tuple[str, int]],
        rdma: RdmaOptions = ...,
        bounce_bytes: int = 0,
        cuda_kernel: CudaKernel | None = None,
        gpu_blocks: int = 0,
        advertise: str = "",
        worker: str = "",
        nics_named: bool = False,
        fabric_provider: str = "",
    ) -> None:
        """`bounce_bytes` of host memory may be pinned for GPU memory that a transport does not reach; 0: none.

        `cuda_kernel` is on the GPU of the pool; without it the driver copies.
        `gpu_blocks`: the most thread blocks of a launch of it; 0: what the link needs.
        `nics_named`: a user named the NICs. Others that cannot be opened are left out one by one.
        `advertise`: the number that peers of tcp dial instead of `host`, which may be a wildcard then.
        `worker`: the name of this worker, which readers of cma compare with the one that they mean.
        """
    def add_pool_region(self, memory: HostMemory) -> int: ...
    def disable(self, transport: str, why: str) -> None:
        """Before start: gives one of the transports up; peers and open() are told why."""
    def force_bounce(self, transport: str, why: str) -> None:
        """Before start: stages what it reads into GPU memory, although it may reach devices; peers are told why."""
    def add_foreign_region(
        self,
        address: int,
        bytes: int,
        keeper: object,
        device: bool = False,
        dmabuf_fds: Sequence[int] = (),
        dmabuf_offset: int = 0,
        pcie_dmabuf_fds: Sequence[int] = (),
    ) -> int:
        """`device`: GPU memory, which other transports than NICs reach by copies. All regions are, or none.

        The descriptors, one for each slice of NIC_SLICE_BYTES, are borrowed until start() returns.
        """
    def set_staging(
        self,
        memory: CudaMemory,
        always: bool,
        dmabuf_fds: Sequence[int],
        dmabuf_offset: int,
        pcie_dmabuf_fds: Sequence[int],
    ) -> None:
        """Before start: `memory`, on the pool's GPU, becomes the staging buffer of transports that reach the pool.

        The descriptors are borrowed until start() returns.
        """
    def staging_refused(self) -> str:
        """After start: why not all of them have it; "" when they do."""
    def start(self) -> None: ...
    def access(self) -> list[tuple[str, bytes, list[bytes], list[bytes], str, bool]]:
        """(transport, address, pool keys, lease keys, why refused or "", bounces) of each enabled transport."""
    def left_out(self) -> list[tuple[str, str]]:
        """Ports that could not be opened, or not register the pool, each with the reason."""
    def accept(
        self, transport: str, hellos: Sequence[bytes], takes_keys: bool, caller: int
    ) -> tuple[int, list[bytes], list[bytes], list[bytes]]: ...
    def ports(self) -> list[tuple[str, str, int, bool]]: ...
    def watch_ports(self, queue: CompletionQueue) -> None: ...
    def set_control(self, queue: CompletionQueue) -> None:
        """Sets where pulls push their tokens. To be called before `open`."""
    def open(
        self, transport: str, address: bytes, path_stats: PathStats, worker: str = "", epoch: int = 0
    ) -> Connection:
        """Opens lanes to an owner that must be this worker of this epoch."""
    def grant(self, lease: int, readers: int, ready: int, ttl_s: float) -> list[tuple[int, int, int]]:
        """(slot, nonce, settle nonce) of each reader."""
    def grant_at(self, lease: int, seats: Sequence[tuple[int, int, int]], ready: int, ttl_s: float) -> None:
        """As grant(), at (slot, nonce, settle nonce) that the caller chose."""
    def grant_soft(self, blocks: Any, ready: int, ttl_s: float) -> tuple[int, int, int]:
        """(slot, nonce, 1) for any number of readers; `blocks` is a buffer of uint32. ttl_s 0: it does not expire."""
    def grant_soft_at(self, seat: tuple[int, int, int], blocks: Any, ready: int, ttl_s: float) -> None:
        """As grant_soft(), at a seat (slot, nonce, 1) that the caller chose."""
    def revoke(self, blocks: Any) -> int:
        """Ends the soft leases that cover one of the blocks, and returns their number."""
    def withdraw_soft(self, slot: int, nonce: int) -> bool:
        """Ends the soft lease at the slot, because nobody got a ticket of it. Returns False if there is none."""
    def holds_lease(self, slot: int, nonce: int) -> bool:
        """Whether the lease with this nonce has not ended."""
    def lease_at(self, slot: int, settle_nonce: int) -> int:
        """Returns the lease that the seat belongs to, which may have ended, or 0. A soft lease has none."""
    def soft_lease_counts(self) -> tuple[int, int, int, int, int]:
        """active, granted, evicted, displaced, expired."""
    def set_ready(self, lease: int, ready: int) -> bool: ...
    def set_ttl(self, lease: int, ttl_s: float) -> bool:
        """Counted from now, sooner or later than it was to end."""
    def renew(self, slot: int, settle_nonce: int) -> bool:
        """On behalf of a reader: its lease lasts its time to live from now."""
    def extend(self, lease: int, ttl_s: float) -> bool: ...
    def abort(self, lease: int) -> bool: ...
    def settle_local(self, slot: int, settle_nonce: int) -> bool: ...
    def take_ended(self) -> list[tuple[int, int, float]]:
        """(lease, how: 0 settled 1 expired 2 aborted, held seconds) since the last call; sweeps first."""
    def watch_ended(self, queue: CompletionQueue) -> None:
        """Pushes to `queue` whenever take_ended() has something."""
    def lease_counts(self) -> tuple[int, int, int, int, int, int, float]:
        """active, granted, settled, expired, aborted, fenced readers, seconds of the oldest."""
    def close(self) -> None: ...

class ChannelClient:
    """A reader's end of the native channel to one owner. Each call waits at most `timeout_s` for it."""

    def card(self, timeout_s: float) -> bytes: ...
    def connect(
        self, worker_id: str, epoch: int, transport: str, hellos: Sequence[bytes], timeout_s: float
    ) -> tuple[int, list[bytes], list[bytes], list[bytes]]:
        """As Engine.accept at the owner."""
    def settle(self, slot: int, settle_nonce: int, timeout_s: float) -> bool: ...
    def end_with_owner(self, connection: Connection) -> None:
        """The connection breaks when the owner's end of the channel closes."""
    @property
    def ended(self) -> str:
        """Why the channel has ended, or "" while it works."""
    def close(self) -> None: ...

class Channel:
    """The native channel of a worker: it admits readers, and it dials owners."""

    def __init__(self) -> None: ...
    def listen(
        self, engine: Engine, host: str, port: int, advertise: str = ""
    ) -> tuple[list[str], bytes, bytes]:
        """Returns (addresses, instance, secret) for the card."""
    def publish(self, card: bytes) -> None:
        """Sets the sealed card, and admits readers from then on."""
    def dial(
        self, addresses: Sequence[str], instance: bytes, secret: bytes, flags: int, timeout_s: float
    ) -> ChannelClient: ...
    def close(self) -> None:
        """Idempotent. On return the engine is not called any more."""
