"""One LAN: standard tools see a single Ethernet across hosts and kinds of machines."""

import pytest
from checks import assert_balanced, captured, ping, port, reaches, settled, wait_for_path
from conftest import MakeLab
from frame_capture import listening

from vnetlab import machine, measure
from vnetlab.run import wait_until
from vnetlab.topology import Topology

PAIRS = [
    ("h1v1", "h1v2"),
    ("h1v1", "h2v1"),
    ("h1v1", "h1c1"),
    ("h1v1", "h2c1"),
    ("h1c1", "h1c2"),
    ("h1c1", "h2c1"),
    ("h1c1", "h2v1"),
]


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab(vms=2, containers=2)


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_ping(topology: Topology, source: str, destination: str):
    one, other = topology.find(source), topology.find(destination)
    wait_for_path(one, other.address)
    assert ping(one, other.address, count=50) == (50, 50)
    assert reaches(one, other.address, "-M", "do", "-s", "1472"), "a full-sized frame"
    assert reaches(other, one.address)


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_iperf3(topology: Topology, source: str, destination: str):
    one, other = topology.find(source), topology.find(destination)
    assert measure.throughput(one, other, seconds=1) > 10e6
    assert measure.throughput(one, other, "--udp", "--bitrate", "10M", seconds=1) > 8e6


@pytest.mark.parametrize(
    ("source", "destination", "port"),
    [("h1v1", "h2v1", 7001), ("h1c1", "h2v1", 7002), ("h1v1", "h2c1", 7003), ("h1v1", "h1v2", 7004)],
)
def test_content_arrives_unchanged(topology: Topology, source: str, destination: str, port: int):
    """Offloads leave checksums and segmentation to the receiver: the content must arrive unchanged."""
    one, other = topology.find(source), topology.find(destination)
    directory = one.file(f".{port}")
    machine.execute(one, f"mkdir -p {directory}; head -c 5000000 /dev/urandom >{directory}/sent")
    machine.execute(one, f"busybox httpd -p {port} -h {directory}")
    received = machine.execute(other, f"busybox wget -q -O - http://{one.address}:{port}/sent | sha256sum")
    assert received == machine.execute(one, f"sha256sum <{directory}/sent")


@pytest.mark.parametrize(("source", "destination"), [("h1v1", "h2v1"), ("h1c1", "h2c1"), ("h1c1", "h1v1")])
def test_tcpdump_shows_the_senders_frames(topology: Topology, source: str, destination: str):
    """Frames keep their source and destination addresses, as on a physical Ethernet."""
    one, other = topology.find(source), topology.find(destination)
    with listening([other], f"icmp[icmptype] == icmp-echo and src {one.address}") as printed:
        ping(one, other.address, count=5)
        wait_until("5 frames", lambda: len(captured(printed(other))) >= 5, 60)
        assert captured(printed(other)) == [(one.mac, other.mac)] * 5


def test_a_broadcast_reaches_every_machine_once(topology: Topology):
    others = [node for node in topology.machines() if node.name != "h1c1"]
    source = topology.find("h1c1")
    with listening(others, "ether broadcast and icmp") as printed:
        machine.attempt(source, "ping -n -b -c 3 -i 0.1 -W 1 10.77.255.255")
        for node in others:
            wait_until(f"3 frames on {node.name}", lambda node=node: len(captured(printed(node))) >= 3, 60)
        for node in others:
            assert captured(printed(node)) == [(source.mac, "ff:ff:ff:ff:ff:ff")] * 3, node.name


def test_ipv6_works_as_on_any_ethernet(topology: Topology):
    source, destination = topology.find("h1v1"), topology.find("h2v1")
    show = "ip -6 address show dev eth0 scope link"
    address = machine.execute(destination, show).split("inet6 ")[1].split("/")[0]
    assert reaches(source, f"{address}%eth0")


def test_learned_addresses_are_not_flooded(topology: Topology):
    """A third machine sees no unicast between two others."""
    source, destination = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(source, destination.address)
    before = port(settled(topology.hosts[0]), "interface", "h1c2")["out_frames"]
    ping(source, destination.address, count=100)
    after = port(settled(topology.hosts[0]), "interface", "h1c2")["out_frames"]
    assert after - before < 20, "more than background multicast"


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
