"""VXLAN links against the kernel's own VXLAN devices: RFC 7348 with a peer that is not ours."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MakeLab
from traffic import ping, port, reaches, settled, wait_for_path

from vnetlab import daemon, lab, machine, measure, process
from vnetlab.run import run, wait_until
from vnetlab.topology import Kind, Node, Settings, Topology

SOURCE_PORT = re.compile(r"\.(\d+) > \S+\.4789")
TCP_BPS_MIN = 100e6
"""Far below what any machine does, far above what a path does that works by retransmission only."""


class Vtep(Node):
    """A host by its address on its kernel's VXLAN device."""

    @property
    def address(self) -> str:
        """IPv4 address in the overlay."""
        return f"10.77.200.{self.host}"


def vtep(topology: Topology, host: Node, *options: str) -> Vtep:
    """Puts a kernel VXLAN device of network 1 where vnetd was."""
    process.stop(host.file(".pid"))
    mtu = topology.settings.underlay_mtu - 50
    words = f"ip -n {host.namespace} link add vxlan0 type vxlan id 1 dstport 4789".split()
    run([*words, *(options or ("remote", topology.hosts[0].address, "dev", "eth0"))])
    node = Vtep(host.lab, Kind.HOST, host.host)
    run(["ip", "-n", host.namespace, "link", "set", "vxlan0", "mtu", str(mtu), "up"])
    run(["ip", "-n", host.namespace, "address", "add", f"{node.address}/16", "dev", "vxlan0"])
    return node


@contextlib.contextmanager
def captured_on(host: Node, what: str) -> Iterator[Path]:
    """Captures on a host's underlay; gives the file that tcpdump writes to."""
    capture = host.file(".capture")
    capture.unlink(missing_ok=True)
    words = ["tcpdump", "-n", "-l", "--immediate-mode", "-i", "eth0", what]
    process.start(machine.namespace_command(host, words), host.file(".tcpdump"), capture)
    try:
        wait_until("tcpdump to listen", lambda: "listening on" in capture.read_text(), 5)
        yield capture
    finally:
        process.stop(host.file(".tcpdump"))


@pytest.fixture(scope="module", params=[1500, 9000])
def pair(request: pytest.FixtureRequest, make_lab: MakeLab) -> tuple[Topology, Node, Vtep]:
    """A container behind vnetd, whose MTU does not know of VXLAN, and a kernel VTEP on the other host."""
    topology = make_lab(encapsulation="vxlan", vms=0, mtu=request.param, underlay_mtu=request.param)
    kernel = vtep(topology, topology.hosts[1])
    container = topology.find("h1c1")
    wait_for_path(container, kernel.address)
    return topology, container, kernel


def test_pings_and_streams_go_both_ways(pair: tuple[Topology, Node, Vtep]):
    topology, container, kernel = pair
    assert ping(container, kernel.address, count=100) == (100, 100)
    whole = str(topology.settings.underlay_mtu - 50 - 28)
    assert reaches(container, kernel.address, "-s", whole, "-M", "do"), "as much as the path carries"
    assert reaches(kernel, container.address, "-s", whole)
    # The container's segments are larger than the path: they are cut to its size.
    assert measure.throughput(container, kernel, seconds=1) > TCP_BPS_MIN
    assert measure.throughput(kernel, container, seconds=1) > TCP_BPS_MIN


def test_flows_have_source_ports_of_their_own(pair: tuple[Topology, Node, Vtep]):
    topology, container, kernel = pair
    host = topology.hosts[1]
    # Of growing sizes: frames of one size may leave as one message, which the capture shows as one datagram.
    send = (
        "import socket; s = [socket.socket(type=socket.SOCK_DGRAM) for _ in range(24)]; "
        f"[each.sendto(bytes(100 + n), ('{kernel.address}', 7000)) for n, each in enumerate(s)]"
    )
    with captured_on(host, f"udp dst port 4789 and src host {topology.hosts[0].address}") as capture:
        machine.execute(container, "python3", "-c", send)
        wait_until("the datagrams", lambda: len(SOURCE_PORT.findall(capture.read_text())) >= 24, 5)
        ports = [int(found) for found in SOURCE_PORT.findall(capture.read_text())]
    assert len(set(ports)) >= 8, "24 flows on 16 ports"
    assert min(ports) >= 49152, "the range of RFC 7348 section 5"


def test_strangers_are_dropped_and_counted(pair: tuple[Topology, Node, Vtep]):
    topology, *_ = pair
    host, stranger = topology.hosts
    before = port(settled(host), "bridge", "bridge")["discards"]["unknown_source"]
    run(["ip", "-n", stranger.namespace, "address", "replace", "10.78.0.77/24", "dev", "eth0"])
    frame = "bytes([8,0,0,0,0,0,1,0]) + b'\\xff' * 6 + bytes([2,0,0,0,0,9]) + bytes(50)"
    send = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('10.78.0.77', 0)); "
        f"[s.sendto({frame}, ('{host.address}', 4789)) for _ in range(100)]"
    )
    machine.execute(stranger, "python3", "-c", send)
    after = port(settled(host), "bridge", "bridge")["discards"]["unknown_source"]
    assert after - before == 100, "none of a hundred was delivered"


def test_every_frame_is_accounted_for(pair: tuple[Topology, Node, Vtep]):
    balance = settled(pair[0].hosts[0])["balance"]
    assert balance["in"] > 0
    assert balance["in"] + balance["copies"] == balance["out"] + balance["drops"]


@pytest.fixture(scope="module", params=["list", "group"])
def trio(request: pytest.FixtureRequest) -> Iterator[tuple[Topology, list[Vtep]]]:
    """One link from vnetd to two kernel VTEPs, flooded by a list or by a multicast group."""
    name = f"vxlan-{request.param}"
    lab.down(name)
    topology = lab.up(Settings(name=name, hosts=3, vms=0, encapsulation="vxlan"))
    first, *others = topology.hosts
    group = ["--group", "239.1.1.1"] if request.param == "group" else []
    options = ["group", "239.1.1.1", "dev", "eth0"] if group else []
    vteps = [vtep(topology, host, *options) for host in others]
    for host in others:
        daemon.vnet(first, "link", "del", host.name)
    words = ["--encapsulation", "vxlan", "--flood", others[1].address, "--networks", "1", "--trusted", *group]
    daemon.vnet(first, "link", "add", "fabric", "--remote", others[0].address, *words)
    yield topology, vteps
    lab.down(name)


def test_one_link_leads_to_several_vteps(trio: tuple[Topology, list[Vtep]]):
    topology, vteps = trio
    container = topology.find("h1c1")
    for kernel in vteps:
        wait_for_path(container, kernel.address)
        assert ping(container, kernel.address, count=50) == (50, 50)
    # What is known goes to one of them only.
    other = topology.hosts[2]
    with captured_on(other, "udp dst port 4789") as capture:
        assert ping(container, vteps[0].address, count=50) == (50, 50)
        text = capture.read_text()
    strays = [line for line in text.splitlines() if f"{vteps[0].address}: ICMP" in line]
    assert not strays
    settled(topology.hosts[0])
