"""Two dispatchers, two ports, two queues: all are used, and every flow stays in order."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import assert_balanced, ping, reaches, settled, wait_for_path
from conftest import PROGRAMS, MakeLab
from frame_capture import listening

from vnetlab import daemon, machine, measure
from vnetlab.topology import PORT, Node, Topology

SCRIPT = PROGRAMS / "udp_flow_order.py"
FLOWS = 16


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab(dispatchers=2, queues=2)


def busy(host: Node) -> list[dict]:
    return settled(host)["dispatchers"]


@pytest.mark.parametrize(("source", "destination"), [("h1v1", "h2v1"), ("h1c1", "h2c1"), ("h1c1", "h2v1")])
def test_all_machines_reach_each_other(topology: Topology, source: str, destination: str):
    one, other = topology.find(source), topology.find(destination)
    wait_for_path(one, other.address)
    assert ping(one, other.address, count=100) == (100, 100)
    assert reaches(other, one.address, "-M", "do", "-s", "1472")


def test_a_guest_uses_both_queue_pairs(topology: Topology):
    """The guest's driver uses both; every dispatcher of both hosts gets some of several streams."""
    source, destination = topology.find("h1v1"), topology.find("h2v1")
    channels = machine.execute(source, "ethtool -l eth0")
    assert re.search(r"Current hardware settings:.*Combined:\s+2\b", channels, re.DOTALL), channels
    wait_for_path(source, destination.address)
    before = [busy(host) for host in topology.hosts]
    assert measure.throughput(source, destination, "--parallel", "8", seconds=2) > 10e6
    queues = machine.execute(destination, "ethtool -S eth0")
    received = [int(count) for count in re.findall(r"rx_queue_[01]_packets: (\d+)", queues)]
    assert len(received) == 2
    assert all(received), queues
    for host, then in zip(topology.hosts, before, strict=True):
        for was, now in zip(then, busy(host), strict=True):
            assert now["frames"] - was["frames"] > 100, f"dispatcher {now['id']} of {host.name}"
            assert now["busy_ns"] > was["busy_ns"]


def test_flows_between_containers_spread_and_stay_in_order(topology: Topology):
    """Numbered datagrams of many flows and sizes, some of them answered; the underlay shows all pairs of ports."""
    source, destination = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(source, destination.address)
    host = topology.hosts[0]
    before = busy(topology.hosts[1])
    with listening([host], f"src {host.address} and udp") as printed, ThreadPoolExecutor() as pool:
        taking = pool.submit(machine.execute, destination, sys.executable, str(SCRIPT), "take", str(FLOWS))
        words = ["send", str(FLOWS), destination.address]
        sent = int(machine.execute(source, sys.executable, str(SCRIPT), *words, timeout_s=20))
        report = taking.result().split()
        pairs = set(re.findall(r"[\d.]+\.(\d+) > [\d.]+\.(\d+): UDP", printed(host)))
    taken, late, _ = map(int, report)
    assert taken > sent / 2, f"{taken} of {sent} arrived"
    assert late == 0, f"{late} of {taken} overtaken by a later one of their flow"
    both = {str(PORT), str(PORT + 1)}
    assert [set(side) for side in zip(*pairs, strict=True)] == [both, both], f"{pairs}: each side uses both its ports"
    for was, now in zip(before, busy(topology.hosts[1]), strict=True):
        assert now["frames"] - was["frames"] > sent / FLOWS, f"dispatcher {now['id']} got too few"


def test_status_shows_the_ports(topology: Topology):
    host = topology.hosts[0]
    status = daemon.ask(host, "status")
    assert (status["dispatchers"], status["ports"]) == (2, 2)
    assert [link["ports"] for link in daemon.ask(host, "link", "list")] == [2]


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
