"""Networks share hosts and links, but no frame crosses from one network to another."""

import os
import signal
import time

import pytest
from checks import assert_balanced, captured, reaches, silent
from conftest import MakeLab
from frame_capture import listening

from vnetlab import container, daemon, machine, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology


def network(host: Node, machine: Node) -> int:
    """The network of a machine's interface."""
    return next(row["network"] for row in daemon.ask(host, "interface", "list") if row["name"] == machine.name)


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """A lab whose second containers are moved to network 2 while it runs."""
    topology = make_lab(vms=0, containers=2)
    for host in topology.hosts:
        file, moved = host.file(".toml"), topology.find(f"{host.name}c2")
        name = f'name = "{moved.name}"\n'
        text = file.read_text().replace(name, f"{name}network = 2\n")
        fixed = topology.find(f"{host.name}c1")
        name = f'name = "{fixed.name}"\n'
        text = text.replace(name, f'{name}addresses = ["{fixed.address}"]\n')
        file.write_text(text + "\n[[network]]\nid = 2\n")
        pid = process.find(host.file(".pid"))
        assert pid
        os.kill(pid, signal.SIGHUP)

        wait_until(f"{moved.name} to be in network 2", lambda: network(host, moved) == 2, 5)  # noqa: B023
        container.configure(moved)
    return topology


def test_each_network_spans_the_hosts(topology: Topology):
    for source, destination in (("h1c1", "h2c1"), ("h1c2", "h2c2")):
        assert reaches(topology.find(source), topology.find(destination).address)


@pytest.mark.parametrize(("source", "destination"), [("h1c1", "h1c2"), ("h1c1", "h2c2"), ("h2c2", "h1c1")])
def test_no_frame_crosses_networks(topology: Topology, source: str, destination: str):
    one, other = topology.find(source), topology.find(destination)
    # A static neighbour entry lets the test send unicast frames without ARP.
    machine.execute(one, f"ip neighbour replace {other.address} lladdr {other.mac} dev eth0")
    assert silent(one, other.address)
    machine.execute(one, f"ip neighbour delete {other.address} dev eth0")
    assert silent(one, other.address)


def test_broadcasts_stay_in_their_network(topology: Topology):
    source, own = topology.find("h1c2"), topology.find("h2c2")
    strangers = [topology.find("h1c1"), topology.find("h2c1")]
    with listening([own, *strangers], f"ether src {source.mac}") as printed:
        machine.attempt(source, "ping -n -b -c 3 -i 0.1 -W 1 10.77.255.255")
        wait_until("3 frames", lambda: len(captured(printed(own))) >= 3, 60)
        # A frame that another network's machines get leaves the same host's queues within this time.
        time.sleep(0.5)
        assert [captured(printed(node)) for node in strangers] == [[], []]


def notes(host: Node, machine: Node) -> str:
    """The notes of a machine's interface."""
    rows = {row["name"]: row for row in daemon.ask(host, "interface", "list")}
    return "; ".join(rows[machine.name].get("notes", []))


def test_a_guest_with_another_mtu_is_noted(topology: Topology):
    one, other = topology.find("h1c1"), topology.find("h2c1")
    assert not notes(topology.hosts[1], other)
    machine.execute(one, "ip link set eth0 mtu 9000")
    machine.attempt(one, f"ping -n -c 2 -i 0.1 -W 1 -s 8000 {other.address}")
    machine.execute(one, "ip link set eth0 mtu 1500")
    wait_until(
        "the note",
        lambda: f"a packet of 8028 bytes from {one.mac} exceeds its MTU" in notes(topology.hosts[1], other),
        20,
    )


def test_a_guest_with_another_address_is_noted(topology: Topology):
    host, source, other = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    daemon.ask(host, "interface", "set", source.name, "port_security=true")
    machine.execute(source, "ip link set eth0 address 02:00:00:00:00:99")
    machine.attempt(source, f"ping -n -c 2 -i 0.1 -W 1 {other.address}")
    try:
        expected = f"its frames come from 02:00:00:00:00:99, but port security admits only {source.mac}"
        wait_until("the note", lambda: expected in notes(host, source), 20)
    finally:
        machine.execute(source, f"ip link set eth0 address {source.mac}")
        daemon.ask(host, "interface", "set", source.name, "port_security=false")


def test_a_guest_cannot_forge_ip_addresses(topology: Topology):
    host, source, other = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    forged = "10.77.0.250"

    def dropped() -> int:
        ports = daemon.ask(host, "stats")["ports"]
        return next(port for port in ports if port["name"] == source.name)["drops"].get("bad_address", 0)

    machine.execute(source, f"ip address add {forged}/16 dev eth0")
    daemon.ask(host, "interface", "set", source.name, "address_security=true")
    try:
        assert reaches(source, other.address)
        assert not dropped()
        machine.attempt(source, f"ping -n -c 2 -i 0.1 -W 1 -I {forged} {other.address}")
        wait_until("the drops", dropped, 20)
    finally:
        daemon.ask(host, "interface", "set", source.name, "address_security=false")
        machine.execute(source, f"ip address del {forged}/16 dev eth0")


def test_a_rate_limit_slows_a_guest_down_and_loses_nothing(topology: Topology):
    host, source, other = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    daemon.ask(host, "interface", "set", source.name, "frame_limit=100")
    try:
        begun = time.monotonic()
        done = machine.execute(source, f"ping -n -q -f -c 200 -W 10 {other.address}")
        assert "200 received" in done
        assert time.monotonic() - begun > 1.5
    finally:
        daemon.ask(host, "interface", "set", source.name, "frame_limit=0")


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
