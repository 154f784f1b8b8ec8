"""Foreign VNET/P peers: Ethernet frames as UDP payload, to port 9000, sent from another port."""

import sys

import pytest
from checks import doctor, ping, port, reaches, settled, wait_for_path
from conftest import PROGRAMS, MakeLab

from vnetlab import daemon, machine, process
from vnetlab.run import run
from vnetlab.topology import Topology

ADDRESS = "10.77.200.1"
MAC = "02:00:00:00:00:99"
FAR = "10.78.0.78"
"""A second address of the second host, where another foreign peer is."""
FAR_MAC = "02:00:00:00:00:98"
SCRIPT = PROGRAMS / "classic_peer.py"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """A lab whose second host runs the foreign peer in place of vnetd."""
    topology = make_lab(encapsulation="vnet")
    host = topology.hosts[1]
    process.stop(host.file(".pid"))
    command = machine.namespace_command(host, [sys.executable, str(SCRIPT), host.address, ADDRESS, MAC])
    process.start(command, host.file(".pid"), host.file(".log"))
    return topology


@pytest.mark.parametrize("name", ["h1v1", "h1c1"])
def test_the_foreign_peer_answers(topology: Topology, name: str):
    source = topology.find(name)
    wait_for_path(source, ADDRESS)
    assert ping(source, ADDRESS, count=100) == (100, 100)
    assert reaches(source, ADDRESS, "-s", "1472"), "a full-sized frame, in IP fragments"


def test_an_unknown_source_is_dropped_and_counted(topology: Topology):
    """A datagram belongs to the link whose remote address is its source; no link has this source."""
    host = topology.hosts[0]
    before = port(settled(host), "bridge", "bridge")["discards"]["unknown_source"]
    stranger = topology.hosts[1]
    run(["ip", "-n", stranger.namespace, "address", "add", "10.78.0.77/24", "dev", "eth0"])
    send = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('10.78.0.77', 9001));"
        f"[s.sendto(bytes(60), ('{host.address}', 9000)) for _ in range(5)]"
    )
    machine.execute(stranger, sys.executable, "-c", send)
    after = port(settled(host), "bridge", "bridge")["discards"]["unknown_source"]
    assert after - before == 5
    assert "10.78.0.77:9001" in host.file(".log").read_text(), "the log names the stranger"
    sender = daemon.ask(host, "status")["unknown_sender"]
    assert sender["address"] == "10.78.0.77:9001"
    assert sender["datagrams"] >= 5
    assert "10.78.0.77:9001 sends to this host, but no link has that address" in doctor(host)


def test_a_way_point_forwards_between_foreign_peers(topology: Topology):
    """Explicit routes forward frames from link to link, as in VNET/P's paper; other frames are not forwarded."""
    host, other = topology.hosts
    run(["ip", "-n", other.namespace, "address", "add", f"{FAR}/24", "dev", "eth0"])
    daemon.vnet(host, *f"link add far --remote {FAR}:9000 --encapsulation vnet --trusted".split())
    ping_there = [sys.executable, str(SCRIPT), FAR, "10.77.200.2", FAR_MAC, host.address, f"{MAC},{ADDRESS}"]
    assert machine.execute(other, *ping_there).strip() == "0", "no route leads there"
    for destination, link in ((MAC, other.name), (FAR_MAC, "far")):
        daemon.vnet(host, "route", "add", "--dst", destination, "--to", f"link {link}")
    assert machine.execute(other, *ping_there).strip() == "20"


def test_a_link_to_nobody_is_not_up(topology: Topology):
    """Prometheus can raise an alert for that link; the links to the foreign peers are up."""
    host = topology.hosts[0]
    daemon.vnet(host, *["link", "add", "nobody", "--remote", "10.78.0.99:9000", "--trusted"])
    states = {link["name"]: (link["state"], link.get("reason", "")) for link in daemon.ask(host, "link", "list")}
    assert states["nobody"][0] == "down", states
    assert "nothing came" in states["nobody"][1], states
    assert states[topology.hosts[1].name] == ("up", "")


def test_every_frame_is_accounted_for(topology: Topology):
    balance = daemon.ask(topology.hosts[0], "stats")["balance"]
    assert balance["in"] > 0
    settled(topology.hosts[0])
