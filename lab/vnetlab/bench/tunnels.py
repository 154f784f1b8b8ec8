"""Links to and through foreign software: VXLAN to the kernel's device, streams compared with plain TCP relays."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vnetlab import daemon, lab, machine, process
from vnetlab.bench.contenders import (
    SEALED,
    START_S,
    TAP,
    VNET,
    VXLAN_HEADERS,
    Contender,
    Ends,
    Nebula,
    OnHost,
    Vnet,
    VxlanContainers,
    VxlanDevice,
    VxlanMixed,
    reach,
    remove_device,
    running,
)
from vnetlab.run import run, wait_until
from vnetlab.topology import Kind, Node, Topology

RELAY = Path(__file__).parent / "relay.py"
RELAY_PORT = 7010


@dataclass(frozen=True)
class VxlanToKernel(Vnet):
    """A container behind vnetd on one host, the kernel's VXLAN device on the other."""

    name: str = "vnet, VXLAN to the kernel"
    encapsulation: str = "vxlan"
    reverse: bool = False
    """True if the kernel's end sends."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs vnetd on the first host and creates a device on the second."""
        topology = self.topology(topology)
        near, far = topology.hosts
        mtu = topology.settings.underlay_mtu - VXLAN_HEADERS
        end = OnHost(far.lab, Kind.HOST, far.host)
        with self.own_binaries(), contextlib.ExitStack() as stack:
            near.file(".toml").write_text(daemon.configuration(topology, near) + self.section())
            stack.callback(near.file(".toml").unlink, missing_ok=True)
            lab.start_daemon(topology, near)
            stack.callback(process.stop, near.file(".pid"))
            tunnel = f"id 1 dstport 4789 local {far.address} remote {near.address} dev eth0"
            run(f"ip -n {far.namespace} link add vxlan mtu {mtu} up type vxlan {tunnel}".split())
            stack.callback(remove_device, far.namespace, "vxlan")
            run(["ip", "-n", far.namespace, "address", "add", f"{end.address}/16", "dev", "vxlan"])
            container = topology.machines(Kind.CONTAINER, near.host)[0]
            ends = (end, container) if self.reverse else (container, end)
            wait_until(f"{self.name} to connect the ends", lambda: reach(*ends), START_S)
            yield Ends(*ends, running(".pid", [near]))


@dataclass(frozen=True)
class Stream(Vnet):
    """vnet between containers over one TCP connection."""

    name: str = "vnet, stream"
    encapsulation: str = "stream"

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs vnetd on both hosts, and waits for the connection."""
        with super().up(topology) as ends:
            wait_until(f"{self.name} to connect the hosts", lambda: reach(ends.source, ends.destination), START_S)
            yield ends


class Relayed(Node):
    """The far host as seen through relays: the near relay's address."""

    @property
    def address(self) -> str:
        """IPv4 address to connect to."""
        return "127.0.0.1"


@dataclass(frozen=True)
class Relay:
    """A plain TCP relay on each host: comparable to a stream link, without frames. It carries TCP, but no pings."""

    name: str = "TCP relays"

    def missing(self) -> None:
        """None: it is a script of the lab."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs a relay on each host; iperf3's port on the near host leads to iperf3 on the far one."""
        near, far = topology.hosts
        ways = {near: (5201, far.address, RELAY_PORT), far: (RELAY_PORT, "127.0.0.1", 5201)}
        with contextlib.ExitStack() as stack:
            for host, (port, address, to) in ways.items():
                words = [sys.executable, str(RELAY), str(port), address, str(to)]
                process.start(machine.namespace_command(host, words), host.file(".relay.pid"), host.file(".relay.log"))
                stack.callback(process.stop, host.file(".relay.pid"))
            yield Ends(near, Relayed(far.lab, Kind.HOST, far.host), running(".relay.pid", topology.hosts))


def everybody(vnets: tuple[Vnet, ...]) -> list[Contender]:
    """All contenders measured with TCP and pings between two hosts."""
    if vnets:
        return list(vnets)
    return [
        VNET,
        TAP,
        SEALED,
        Nebula(),
        VxlanDevice(),
        VxlanContainers(),
        VxlanMixed(),
        TO_KERNEL,
        VxlanMixed("kernel VXLAN, device to container", reverse=True),
        FROM_KERNEL,
        Stream(),
        TLS_STREAM,
    ]


TO_KERNEL = VxlanToKernel()
FROM_KERNEL = VxlanToKernel("vnet, VXLAN from the kernel", reverse=True)
TLS_STREAM = Stream("vnet, stream with TLS", sealed=True)
