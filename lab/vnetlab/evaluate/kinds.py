"""Kinds of data paths between applications on different hosts, as contenders, and those that need another machine."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from vnetlab.bench.contenders import (
    Bare,
    Contender,
    Ends,
    Tinc,
    Vnet,
    VxlanContainers,
    remove_device,
    start_device,
)
from vnetlab.run import run
from vnetlab.topology import Kind, Topology


@dataclass(frozen=True)
class Macvlan:
    """Containers with a macvlan device of the host's own device: the stand-in for a direct function of an adapter."""

    name: str = "macvlan"

    def missing(self) -> None:
        """None: it is part of the kernel."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Creates a device in each container, and removes them."""
        containers = topology.machines(Kind.CONTAINER)
        with contextlib.ExitStack() as stack:
            for container in containers:
                host = topology.hosts[container.host - 1]
                device = f"link eth0 name {container.name} mtu {topology.settings.underlay_mtu}"
                run(f"ip -n {host.namespace} link add {device} type macvlan mode bridge".split())
                # Only after its move the name eth0 is free.
                there = f"{container.name} netns {container.namespace} name eth0"
                run(f"ip -n {host.namespace} link set {there}".split())
                stack.callback(remove_device, container.namespace, "eth0")
                start_device(container)
            yield Ends(containers[0], containers[-1])


@dataclass(frozen=True)
class Elsewhere:
    """A kind that this machine cannot run."""

    name: str
    stands_for: str
    reason: str
    command: str
    """What runs it on a machine that can."""


NATIVE = Bare()
SHARED = Bare("native, shared memory on a host")
"""Ranks on one host use shared memory: an upper bound for ranks that share a host."""
ON_ONE_HOST = Bare("native, shared memory, all ranks on one host")
"""The upper bound for ranks whose neighbours are on other hosts."""
ALONE = Bare("native, no stream")
TINC = Tinc()
BRIDGED = VxlanContainers("bridge and kernel VXLAN")
MACVLAN = Macvlan()
TAP = Vnet("vnet, TAP")
VETH = Vnet("vnet, veth", container="veth")
TUNNEL = Vnet("vnet, veth, all packets in the tunnel", (("translate", "off"),), container="veth")
DIRECT = Vnet("vnet, local", lan=True)
KINDS: tuple[Contender, ...] = (NATIVE, BRIDGED, MACVLAN, TAP, VETH, DIRECT)
JUDGED: tuple[Contender, ...] = (NATIVE, BRIDGED, TAP, VETH)
"""Kinds that bars compare."""
OVER_IP: tuple[Contender, ...] = (NATIVE, BRIDGED, TAP, VETH)
"""Kinds that need no Ethernet underneath."""
VNETS = (TAP.name, VETH.name)
"""The overlay: kinds whose hosts need not share a LAN."""
STANDS_FOR = {
    NATIVE.name: "no virtualization: processes in the host's own network namespace",
    SHARED.name: "the upper bound for ranks that share a host",
    ON_ONE_HOST.name: "the upper bound for ranks on several hosts",
    ALONE.name: "a computing application whose host sends nothing",
    BRIDGED.name: "a bridged path (Xen's bridge), and operating-system virtualization (OpenVZ): containers on a bridge",
    MACVLAN.name: "a direct function of an adapter (IOV, passthrough): containers on macvlan",
    TAP.name: "VNET/P and VNET/P+: containers whose frames vnetd reads from a TAP",
    VETH.name: "the same with the kernel's own path for known flows, on one host and between hosts",
    TUNNEL.name: "the same without translation: what the tunnel itself costs; for TCP requests only",
    DIRECT.name: "VNET's direct mode, and Ethernet frames on the wire as on Kitten: vnetd without encapsulation",
    TINC.name: "a user-level overlay that people use today; for MPI messages only",
}
ELSEWHERE = (
    Elsewhere(
        "virtual machines on tap and bridge",
        "full virtualization (VMware), paravirtualization (Xen)",
        "without KVM the emulator's speed hides that of the data path: emulated guests are compared with each other "
        "only",
        "`lab/lab evaluate machines --contender tap --native-hosts FILE`, whose first line is a machine with KVM, "
        "which the lab then uses, with `--class` and `--kernel` as for containers",
    ),
    Elsewhere(
        "virtual machines on vnet, vhost-user",
        "VNET/P and VNET/P+ under a machine monitor",
        "the same",
        "`lab/lab evaluate machines --contender vnet --native-hosts FILE`",
    ),
    Elsewhere(
        "virtual function of an adapter",
        "IOV (paper 003), passthrough (paper 001)",
        "no adapter with SR-IOV",
        "on each of two machines `echo 1 > /sys/class/net/DEVICE/device/sriov_numvfs`, then from one of them "
        "`lab/lab evaluate all --contender native --native-hosts FILE` with lines `root@MACHINE FUNCTION own`",
    ),
)
