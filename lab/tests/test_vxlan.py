"""VXLAN links with the kernel's own VXLAN devices as peers (RFC 7348)."""

import contextlib
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import TOO_BIG, ping, port, reaches, settled, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, lab, machine, measure, process
from vnetlab.run import run, wait_until
from vnetlab.topology import Kind, Node, Settings, Topology

SOURCE_PORT = re.compile(r"\.(\d+) > \S+\.4789")
TCP_BPS_MIN = 100e6
"""Far below any machine's throughput, far above that of a path that works only by retransmission."""


class Vtep(Node):
    """A host with the address of its kernel VXLAN device."""

    @property
    def address(self) -> str:
        """IPv4 address in the overlay."""
        return f"10.77.200.{self.host}"


def vtep(topology: Topology, host: Node, *options: str) -> Vtep:
    """Replaces a host's vnetd by a kernel VXLAN device of network 1."""
    process.stop(host.file(".pid"))
    mtu = topology.settings.underlay_mtu - (70 if any(":" in option for option in options) else 50)
    words = f"ip -n {host.namespace} link add vxlan0 type vxlan id 1 dstport 4789".split()
    run([*words, *(options or ("remote", topology.hosts[0].address, "dev", "eth0"))])
    node = Vtep(host.lab, Kind.HOST, host.host)
    run(["ip", "-n", host.namespace, "link", "set", "vxlan0", "mtu", str(mtu), "up"])
    run(["ip", "-n", host.namespace, "address", "add", f"{node.address}/16", "dev", "vxlan0"])
    return node


@contextlib.contextmanager
def captured_on(host: Node, what: str) -> Iterator[Path]:
    """Captures on a host's underlay while the context lasts; returns the file that tcpdump writes."""
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
    """A container behind vnetd, with the underlay's MTU, and a kernel VTEP on the other host."""
    topology = make_lab(encapsulation="vxlan", vms=0, mtu=request.param, underlay_mtu=request.param)
    kernel = vtep(topology, topology.hosts[1])
    container = topology.find("h1c1")
    wait_for_path(container, kernel.address)
    return topology, container, kernel


def test_pings_and_streams_go_both_ways(pair: tuple[Topology, Node, Vtep]):
    topology, container, kernel = pair
    assert ping(container, kernel.address, count=100) == (100, 100)
    whole = str(topology.settings.underlay_mtu - 50 - 28)
    assert reaches(container, kernel.address, "-s", whole, "-M", "do"), "frames of the path's MTU"
    assert reaches(kernel, container.address, "-s", whole)
    # The container's segments exceed the path MTU, so vnetd has to segment them again.
    assert measure.throughput(container, kernel, seconds=1) > TCP_BPS_MIN
    assert measure.throughput(kernel, container, seconds=1) > TCP_BPS_MIN


def test_source_ports_follow_flows(pair: tuple[Topology, Node, Vtep]):
    topology, container, kernel = pair
    host = topology.hosts[1]
    # Frames of different sizes: those of one size could leave as one message, which the capture shows as one datagram.
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


def test_unknown_sources_are_dropped_and_counted(pair: tuple[Topology, Node, Vtep]):
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
    assert after - before == 100, "a hundred datagrams of an unknown source"


def test_every_frame_is_accounted_for(pair: tuple[Topology, Node, Vtep]):
    balance = settled(pair[0].hosts[0])["balance"]
    assert balance["in"] > 0
    assert balance["in"] + balance["copies"] == balance["out"] + balance["drops"]


@pytest.fixture(scope="module", params=["list", "group"])
def trio(request: pytest.FixtureRequest) -> Iterator[tuple[Topology, list[Vtep]]]:
    """One link from vnetd to two kernel VTEPs, with flooding to a list or to a multicast group."""
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
    # Frames to a learned address go to one VTEP only.
    other = topology.hosts[2]
    with captured_on(other, "udp dst port 4789") as capture:
        assert ping(container, vteps[0].address, count=50) == (50, 50)
        text = capture.read_text()
    strays = [line for line in text.splitlines() if f"{vteps[0].address}: ICMP" in line]
    assert not strays
    settled(topology.hosts[0])


def streamed(topology: Topology, container: Node, kernel: Vtep) -> float:
    """Average number of bytes per frame on the link while a stream is sent."""
    host = topology.hosts[0]
    before = port(settled(host), "link", "h2")
    assert measure.throughput(container, kernel, seconds=1) > TCP_BPS_MIN
    after = port(settled(host), "link", "h2")
    return (after["out_bytes"] - before["out_bytes"]) / (after["out_frames"] - before["out_frames"])


def link(host: Node) -> dict:
    """The only link of a host."""
    return daemon.ask(host, "link", "list")[0]


def offloaded(host: Node) -> bool:
    """Whether the link uses the kernel's VXLAN device for segmentation."""
    return link(host)["offload"]


def listening(host: Node) -> set[str]:
    """Unconnected UDP sockets in a host's namespace."""
    text = run(["ip", "netns", "exec", host.namespace, "ss", "-Huln"])
    return {line.split()[3] for line in text.splitlines()}


@pytest.fixture(scope="module", params=["IPv4", "IPv6"])
def whole(request: pytest.FixtureRequest, make_lab: MakeLab) -> tuple[Topology, Node, Vtep]:
    """A container behind vnetd and a kernel VTEP, over IPv4 and over IPv6."""
    topology = make_lab(encapsulation="vxlan", vms=0)
    near, far = topology.hosts
    remote = near.address
    if request.param == "IPv6":
        remote = near.address6
        daemon.vnet(near, "link", "del", "h2")
        words = ["--remote", f"[{far.address6}]:4789", "--encapsulation", "vxlan", "--trusted"]
        daemon.vnet(near, "link", "add", "h2", *words)
    kernel = vtep(topology, far, "remote", remote, "dev", "eth0")
    container = topology.find("h1c1")
    wait_for_path(container, kernel.address)
    wait_until("the kernel VXLAN device", lambda: offloaded(near), 5)
    return topology, container, kernel


def test_super_frames_leave_through_the_kernel_device(whole: tuple[Topology, Node, Vtep]):
    topology, container, kernel = whole
    host = topology.hosts[0]
    assert streamed(topology, container, kernel) > 4 * topology.settings.underlay_mtu
    # UDP segmentation offload: datagrams must arrive in the sizes that the container's program requested.
    receive = (
        "import socket, hashlib; s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(10); "
        f"s.bind(('{kernel.address}', 7001)); print('ready', flush=True); "
        "got = [s.recv(9000) for _ in range(20)]; "
        "print([len(g) for g in got], hashlib.sha256(b''.join(got)).hexdigest())"
    )
    send = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.setsockopt(socket.SOL_UDP, 103, 1200); "
        f"s.sendto(bytes(i * 7 % 251 for i in range(23500)), ('{kernel.address}', 7001))"
    )
    log, pid = kernel.file(".datagrams"), kernel.file(".receiver")
    process.start(machine.namespace_command(kernel, ["python3", "-c", receive]), pid, log)
    try:
        wait_until("the receiver", lambda: "ready" in log.read_text(), 5)
        machine.execute(container, "python3", "-c", send)
        wait_until("the datagrams", lambda: "]" in log.read_text(), 10, log)
    finally:
        process.stop(pid)
    digest = hashlib.sha256(bytes(i * 7 % 251 for i in range(23500))).hexdigest()
    assert f"{[1200] * 19 + [700]} {digest}" in log.read_text()
    balance = settled(host)["balance"]
    assert balance["in"] + balance["copies"] == balance["out"] + balance["drops"]


def test_without_offload_vnetd_segments_streams(whole: tuple[Topology, Node, Vtep]):
    topology, container, kernel = whole
    host = topology.hosts[0]
    remote = link(host)["remote"]
    daemon.vnet(host, "link", "del", "h2")
    words = ["--remote", remote, "--encapsulation", "vxlan", "--trusted", "--offload"]
    daemon.vnet(host, "link", "add", "h2", *words, "false")
    assert not offloaded(host)
    wait_for_path(container, kernel.address)
    assert streamed(topology, container, kernel) <= topology.settings.underlay_mtu
    daemon.vnet(host, "link", "del", "h2")
    daemon.vnet(host, "link", "add", "h2", *words, "true")
    wait_until("the kernel VXLAN device", lambda: offloaded(host), 5)
    wait_for_path(container, kernel.address)
    assert streamed(topology, container, kernel) > 4 * topology.settings.underlay_mtu


def test_the_kernel_device_receives_nothing_and_is_removed(whole: tuple[Topology, Node, Vtep]):
    topology, container, kernel = whole
    host, far = topology.hosts
    with_link = listening(host)
    devices = run(["ip", "-n", host.namespace, "-o", "link"])
    assert "vxlan0" not in devices, "a device in the user's namespace"
    remote = link(host)["remote"]
    daemon.vnet(host, "link", "del", "h2")
    wait_until("the device's sockets to go", lambda: len(listening(host)) <= len(with_link) - 17, 10)
    without_link = listening(host)
    words = ["--remote", remote, "--encapsulation", "vxlan", "--trusted"]
    # The kernel's device sends no packets of its own accord.
    with captured_on(far, "udp dst port 4789") as capture:
        daemon.vnet(host, "link", "add", "h2", *words)
        wait_until("the kernel VXLAN device", lambda: offloaded(host), 5)
        wait_for_path(container, kernel.address)
        assert streamed(topology, container, kernel) > 4 * topology.settings.underlay_mtu
        # Packets to the device's port are dropped: a multicast echo request gets no answer.
        ports = sorted(int(address.rsplit(":", 1)[1]) for address in listening(host) - without_link)
        assert len(ports) == 17, "the device's own port, and its source ports"
        before = port(settled(host), "interface", "h1c1")["out_frames"]
        machine.execute(far, "python3", "-c", ECHO, host.address, *map(str, ports))
        time.sleep(0.2)
        assert port(settled(host), "interface", "h1c1")["out_frames"] == before
        text = capture.read_text()
    errors = [line for line in text.splitlines() if "ICMP6" in line and "router solicitation" not in line]
    assert all(f"> {far.address6}" in line for line in errors), errors
    balance = settled(host)["balance"]
    assert balance["in"] + balance["copies"] == balance["out"] + balance["drops"]
    os.kill(process.find(host.file(".pid")), signal.SIGKILL)
    wait_until("the device's socket to go with a killed vnetd", lambda: not listening(host), 10)


ECHO = """
import socket, struct, sys
source, group = bytes.fromhex('fe80' + '00' * 13 + '09'), bytes.fromhex('ff02' + '00' * 13 + '01')
def checksum(data):
    total = sum(struct.unpack(f'!{len(data) // 2}H', data))
    return ~((total & 0xffff) + (total >> 16)) & 0xffff
echo = struct.pack('!BBHHH', 128, 0, 0, 7, 7)
pseudo = source + group + struct.pack('!IBBBB', len(echo), 0, 0, 0, 58)
echo = echo[:2] + struct.pack('!H', checksum(pseudo + echo)) + echo[4:]
ip = struct.pack('!IHBB', 6 << 28, len(echo), 58, 255) + source + group
frame = bytes.fromhex('333300000001' + '020000000009' + '86dd') + ip + echo
with socket.socket(type=socket.SOCK_DGRAM) as s:
    for port in sys.argv[2:]:
        s.sendto(bytes([8, 0, 0, 0, 0, 0, 1, 0]) + frame, (sys.argv[1], int(port)))
"""
"""Sends an ICMPv6 echo request to all nodes, in VXLAN, to each of the ports."""


def test_icmp_reports_a_smaller_path_mtu(make_lab: MakeLab):
    """The daemon obeys ICMP "fragmentation needed" for a datagram that the kernel VXLAN device sent."""
    topology = make_lab(encapsulation="vxlan", vms=0)
    host, far = topology.hosts
    kernel = vtep(topology, far)
    container = topology.find("h1c1")
    wait_for_path(container, kernel.address)
    wait_until("the kernel VXLAN device", lambda: offloaded(host), 5)
    with captured_on(host, "udp dst port 4789 and greater 2000") as capture:
        assert streamed(topology, container, kernel) > 4 * topology.settings.underlay_mtu
        wait_until("a datagram of the stream", lambda: SOURCE_PORT.search(capture.read_text()), 5)
        source = SOURCE_PORT.search(capture.read_text())[1]
    machine.execute(far, "python3", "-c", TOO_BIG, far.address, host.address, source)
    wait_until("the link's MTU to be the path's", lambda: link(host)["mtu"] == 1300, 5)
    # Segments follow the new MTU; without device offloads the capture shows each segment.
    devices = ["gso", "tso", "tx-udp_tnl-segmentation", "tx-udp_tnl-csum-segmentation"]
    words = [word for device in devices for word in (device, "off")]
    machine.execute(host, "ethtool", "-K", "eth0", *words)
    with captured_on(far, f"udp dst port 4789 and greater {14 + 1300 + 1}") as too_large:
        assert streamed(topology, container, kernel) > 4 * topology.settings.underlay_mtu
        assert "VXLAN" not in too_large.read_text()
    with captured_on(far, f"udp dst port 4789 and greater {14 + 1300}") as largest:
        streamed(topology, container, kernel)
        assert "VXLAN" in largest.read_text()
