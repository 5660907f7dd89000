# SPDX-License-Identifier: Apache-2.0
"""Records what the peers of another checkout of kvlink say to each other.

    git worktree add /tmp/older COMMIT
    cd /tmp/older && python -m grpc_tools.protoc -Iprotos --python_out=. protos/kvlink/v1/*.proto
    python tests/control/older/record.py /tmp/older tests/control/older/peer_protocolN.json

The checkout needs no extension built: the control plane does without.
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

HERE = Path(__file__).resolve().parent


def use(checkout: Path) -> None:
    """Imports kvlink from there, whatever is installed."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "kvlink" not in type(finder).__module__]
    sys.path[:0] = [str(checkout), str(HERE.parents[1])]
    import kvlink

    if Path(str(kvlink.__file__)).parent != checkout / "kvlink":
        sys.exit(f"{kvlink.__file__} was imported instead of {checkout}/kvlink")


def described(checkout: Path) -> bytes:
    """The messages as that checkout knows them: a FileDescriptorSet."""
    with tempfile.NamedTemporaryFile() as out:
        protos = sorted(map(str, (checkout / "protos").rglob("*.proto")))
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{checkout / 'protos'}"]
        subprocess.run([*command, f"--descriptor_set_out={out.name}", *protos], check=True)
        return Path(out.name).read_bytes()


async def recorded() -> dict[str, object]:
    from control.older import scenario
    from control.older.tape import Recorder, serving

    from kvlink.control import Security, WorkerAgent
    from kvlink.coordinator import Coordinator

    coordinator, agent = (
        Coordinator(),
        WorkerAgent(scenario.accept, scenario.settle, lambda slot, nonce: False),
    )
    tapes = {}
    plays = (("coordinator", coordinator, scenario.with_coordinator), ("agent", agent, scenario.with_agent))
    for name, server, play in plays:
        recorder = Recorder(Security().coordinators().dial(await server.start(), ()))
        agent.publish(scenario.make_card())
        relay, address = await serving(recorder.relay)
        await play(address)
        await relay.stop(1.0)
        await recorder.close()
        await server.close()
        tapes[name] = recorder.tape.rows()
    return tapes


def ticket() -> str:
    from kvlink.ticket import LeaseSeat, Ticket

    seats = (LeaseSeat(3, 1005, 1007), LeaseSeat(4, 1006, 2**64 - 1))
    block_ids = array("I", [5, 1, 2**31])
    made = Ticket(
        request_id="r",
        worker_id="prefill",
        epoch=2,
        agent="127.0.0.1:1",
        seats=seats,
        block_ids=block_ids,
        num_tokens=40,
        ready=1,
        rank=1,
        num_ranks=2,
        ttl_s=12.5,
    )
    return made.to_bytes().hex()


def main() -> None:
    checkout, into = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    use(checkout)
    from control.older.tape import save

    from kvlink import __version__
    from kvlink.types import PROTOCOL_VERSION

    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    save(
        into,
        {
            "commit": commit.stdout.strip(),
            "release": __version__,
            "protocol_version": PROTOCOL_VERSION,
            "descriptors": base64.b64encode(described(checkout)).decode(),
            "ticket": ticket(),
            **asyncio.run(recorded()),
        },
    )


if __name__ == "__main__":
    main()
