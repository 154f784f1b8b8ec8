"""Virtual machines: QEMU with a stock kernel and one network device, served by vnetd over vhost-user.

QEMU runs in the root namespace: it needs only vnetd's socket.
"""

import os
from pathlib import Path

from vnetlab import channel, process
from vnetlab.channel import PORTS
from vnetlab.image import Image
from vnetlab.run import LabError, wait_until
from vnetlab.topology import Node, Topology

BOOT_S = 60
SHELL_PORT = 2000
"""A virtual machine's port with a shell, after `open_shell`."""
QEMU = os.environ.get("VNET_LAB_QEMU", "qemu-system-x86_64")
"""Another QEMU by VNET_LAB_QEMU: its path."""
KERNEL_OPTIONS = "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check cryptomgr.notests"
"""These options do not affect the network, and shorten the boot on an emulated processor by a third."""


def start(topology: Topology, guest: Node, image: Image) -> None:
    """Starts a guest; `wait` waits until it is ready."""
    launch(guest, command(topology, guest, image))


def launch(guest: Node, words: list[str], place: str = "") -> None:
    """Starts a guest with a given command line; `place` as in `command`."""
    guest.file(f"{place}.console.log").unlink(missing_ok=True)
    process.start(words, guest.file(f"{place}.pid"), guest.file(f"{place}.log"))


def wait(guest: Node) -> None:
    """Waits until a guest has its address and accepts commands."""
    console = guest.file(".console.log")

    def ready() -> bool:
        if process.find(guest.file(".pid")) is None:
            raise LabError(f"QEMU of {guest.name} has exited", guest.file(".log"))
        text = console.read_text(errors="replace") if console.exists() else ""
        if "Kernel panic" in text:
            raise LabError(f"the kernel of {guest.name} panicked", console)
        return f"{guest.name} is ready" in text

    wait_until(f"{guest.name} to boot", ready, BOOT_S, console)


def open_shell(guest: Node) -> None:
    """Lets other machines of the overlay run commands in a guest, as Open MPI does: nobody but them can reach it."""
    words = f"setsid nc -ll -p {SHELL_PORT} -e /bin/sh >/dev/null 2>&1 </dev/null &"
    channel.execute(guest, [words], BOOT_S, lambda _: None)


def vhost_user(guest: Node, queues: int = 1, place: str = "") -> list[str]:
    """QEMU's arguments for a network device that vnetd serves."""
    return [
        *("-chardev", f"socket,id=vhost,path={guest.file(f'{place}.vhost')},reconnect=1"),
        *("-netdev", f"vhost-user,id=net,chardev=vhost,queues={queues}"),
    ]


def command(
    topology: Topology,
    guest: Node,
    image: Image,
    netdev: list[str] | None = None,
    msix: bool = False,
    device: str = "",
    memory: str = "",
    dimms: str = "",
    place: str = "",
) -> list[str]:
    """A guest's QEMU command line; vnetd serves its network device unless `netdev` replaces it.

    `netdev` must name its back end "net"; `device` and `memory` are additional properties of network device and memory.
    `dimms` is room for memory that is plugged later, as QEMU's -m has it: "slots=1,maxmem=1G".
    `place` stands before the suffixes of QEMU's files, for a second QEMU of the same guest (`migration`).
    QEMU 7.2 crashes under TCG when a vhost-user device uses MSI-X; other back ends may use it.
    """
    mtu = topology.mtu(guest)
    # The driver has to learn an MTU above 1500 from the device: it refuses larger ones otherwise.
    host_mtu = f",host_mtu={mtu}" if mtu > 1500 else ""
    vectors = "" if msix else ",vectors=0"
    # QEMU's default is 256 buffers of 1.5 to 4 KiB: too few for bursts of super-frames.
    ring = ",rx_queue_size=1024"
    queues = topology.settings.queues
    many = ",mq=on" if queues > 1 else ""
    options = f"{KERNEL_OPTIONS} vnet.name={guest.name} vnet.address={guest.address}/16 vnet.mtu={mtu}"
    console = f"socket,id=console,path={guest.file(f'{place}.console')},server=on,wait=off"
    serials = [["-chardev", f"{console},logfile={guest.file(f'{place}.console.log')}", "-serial", "chardev:console"]]
    for number in range(1, PORTS + 1):
        port = f"socket,id=serial{number},path={guest.file(f'{place}.serial{number}')},server=on,wait=off"
        serials.append(["-chardev", port, "-serial", f"chardev:serial{number}"])
    return [
        QEMU,
        *("-name", f"{guest.lab}-{guest.name},debug-threads=on", "-nodefaults", "-no-user-config", "-display", "none"),
        *("-machine", "pc", *accelerator(), "-smp", str(queues), "-m", f"{image.memory}{_more(dimms)}"),
        *("-qmp", f"unix:{guest.file(f'{place}.qmp')},server=on,wait=off"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append", options),
        # vhost-user: the guest's memory is shared with vnetd.
        *(
            "-object",
            f"memory-backend-memfd,id=mem,size={image.memory},share=on{_more(memory)}",
            "-numa",
            "node,memdev=mem",
        ),
        *(netdev or vhost_user(guest, queues, place)),
        *(
            "-device",
            f"virtio-net-pci,netdev=net,mac={guest.mac}{vectors},romfile={ring}{host_mtu}{many}{_more(device)}",
        ),
        *(word for serial in serials for word in serial),
    ]


def _more(properties: str) -> str:
    return f",{properties}" if properties else ""


def accelerator() -> list[str]:
    """KVM if the processor supports it; the existence of /dev/kvm alone does not prove that."""
    flags = Path("/proc/cpuinfo").read_text().split()
    if Path("/dev/kvm").exists() and ("vmx" in flags or "svm" in flags):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg", "-cpu", "max"]
