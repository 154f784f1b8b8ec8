"""The interconnect's programs inside virtual machines."""

from pathlib import Path

from vnetlab import channel, machine
from vnetlab.run import wait_until
from vnetlab.topology import Kind, Node, Topology

HELPER, PERF = "vnet-rdma-guest", "vnet-rdma-perf"
PROGRAMS = (HELPER, PERF)
"""Programs that the guests' image has."""
PORT = 7000
BOOT_S = 120
"""Emulated guests take their time."""
LARGER_PIECES = "echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled || true"
"""Kernels without huge pages have no such setting, and need none."""


def start_helpers(lab: Topology) -> None:
    """Starts the helper in every guest."""
    for guest in lab.machines(Kind.VM):
        machine.execute(guest, LARGER_PIECES)
        start_helper(guest)


def start_helper(guest: Node) -> None:
    """Starts the helper in a guest and waits until it listens."""
    start(guest, HELPER, Path("/tmp/helper.log"), "ready")


def start(guest: Node, words: str, log: Path, ready: str) -> None:
    """Starts a program in the background of a guest, and waits until its output has these words."""
    channel.execute(guest, [f"rm -f {log}; setsid {words} >{log} 2>&1 </dev/null &"], BOOT_S, lambda _: None)
    wait_until(f"{words} in {guest.name}", lambda: ready in machine.read(guest, log), BOOT_S)


def command(*words: str, attachment: str = "vm") -> list[str]:
    """Words that run the measuring program in a guest, by default with the engine of the host's vnetd."""
    return ["env", f"VNET_RDMA_ATTACHMENT={attachment}", PERF, *words]


def figures(text: str) -> dict[str, str]:
    """What the measuring program prints."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))
