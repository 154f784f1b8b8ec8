"""A foreign VNET/P peer: Ethernet frames as UDP payload, port 9000."""

import sys

import pytest
from checks import ping, port, reaches, settled, wait_for_path
from conftest import PROGRAMS, MakeLab

from vnetlab import daemon, machine, process
from vnetlab.run import run
from vnetlab.topology import Topology

ADDRESS = "10.77.200.1"
SCRIPT = PROGRAMS / "classic_peer.py"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """A lab whose second host runs the foreign peer in place of vnetd."""
    topology = make_lab(encapsulation="vnet")
    host = topology.hosts[1]
    process.stop(host.file(".pid"))
    command = machine.namespace_command(host, [sys.executable, str(SCRIPT), ADDRESS])
    process.start(command, host.file(".pid"), host.file(".log"))
    return topology


@pytest.mark.parametrize("name", ["h1v1", "h1c1"])
def test_the_foreign_peer_answers(topology: Topology, name: str):
    source = topology.find(name)
    wait_for_path(source, ADDRESS)
    assert ping(source, ADDRESS, count=100) == (100, 100)
    assert reaches(source, ADDRESS, "-s", "1472"), "a full-sized frame, in IP fragments"


def test_an_unknown_source_is_dropped_and_counted(topology: Topology):
    """A datagram belongs to the link whose remote address is its source; this source has no link."""
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


def test_every_frame_is_accounted_for(topology: Topology):
    balance = daemon.ask(topology.hosts[0], "stats")["balance"]
    assert balance["in"] > 0
    settled(topology.hosts[0])
