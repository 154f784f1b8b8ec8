"""Direct ports of virtual machines, negotiated by links that an overlay computes, in two networks.

    h1v1, h1v2 -- vnetd h1 -- vnetd h2 -- h2v1, h2v2        v1 in network 1, v2 in network 2

Large frames are received into the guests' buffers. Small ones, and all while a port is not reached, take the ordinary
way.
"""

import re
import time
from collections.abc import Iterator

import pytest
from checks import assert_balanced, links, ping, port, readdressed, wait_for_path
from file_guests import start_file_guests

from vnetlab import daemon, lab, machine, process, store
from vnetlab.run import run, wait_until
from vnetlab.topology import Node, Settings, Topology

NAME = "test-direct-ports"
BYTES = 8_000_000
PORT = 8000
WAIT_S = 90
FOLLOW_S = 2
"""Longest time until the other host, once it knows a new address, uses the ports there. The best round counts."""


def bring_up(settings: Settings) -> Topology:
    """A lab of virtual machines with direct ports, each of which serves a file."""
    topology = lab.prepare(settings)
    if settings.store:
        store.start(topology)
    for host in topology.hosts:
        host.file(".toml").write_text(configuration(topology, host))
        lab.start_daemon(topology, host)
    start_file_guests(topology, PORT, BYTES)
    for one, other in pairs(topology):
        wait_for_path(one, other.address, WAIT_S)
    return topology


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    """Two hosts that find each other through a store, each with a virtual machine in each of two networks."""
    lab.down(NAME)
    try:
        yield bring_up(Settings(name=NAME, containers=0, vms=2, underlay_mtu=9000, mtu=9000, store=True))
    finally:
        lab.down(NAME)


def configuration(topology: Topology, host: Node) -> str:
    """A host's vnet.toml: direct ports, and its second machine in network 2."""
    text = daemon.configuration(topology, host, "direct = true\n")
    text = re.sub(rf'(name = "{host.name}v2"\n)', r"\1network = 2\n", text)
    return text.replace("[[network]]\n", "[[network]]\nid = 2\nlearning = true\n[[network]]\n", 1)


def pairs(topology: Topology) -> list[tuple[Node, Node]]:
    """The machines of each network: that of h1, and that of h2."""
    one, other = (topology.machines(host=host.host) for host in topology.hosts)
    return list(zip(one, other, strict=True))


def states(host: Node) -> list[str]:
    """The states of the direct ports of a host's machines."""
    return [
        direct["state"] for each in daemon.ask(host, "interface", "list") for direct in each.get("direct_ports", [])
    ]


def used(host: Node) -> list[bool]:
    """Whether the host sends to each direct port that the other host announces."""
    return [direct["used"] for each in daemon.ask(host, "link", "list") for direct in each.get("direct_guests", [])]


def wait_until_used(topology: Topology) -> None:
    """Waits until each machine of each host has a direct port that is used."""
    count = topology.settings.vms
    for host in topology.hosts:
        wait_until(f"direct ports of {host.name}", lambda host=host: states(host) == ["used"] * count, WAIT_S)
        wait_until(f"direct ports seen by {host.name}", lambda host=host: used(host) == [True] * count, WAIT_S)


def peer(topology: Topology, host: Node) -> str:
    return next(other.name for other in topology.hosts if other != host)


def landed(topology: Topology, host: Node) -> int:
    """Number of frames received in place, in guests' buffers."""
    return port(daemon.ask(host, "stats"), "link", peer(topology, host))["direct_in_place"]


def assert_fetched(node: Node, source: Node) -> None:
    """Asserts that a node can fetch a file from another node unchanged."""
    sent = machine.execute(source, "sha256sum </files/sent", timeout_s=WAIT_S).split()[0]
    fetch = f"busybox wget -q -O - http://{source.address}:{PORT}/sent | sha256sum"
    assert machine.execute(node, fetch, timeout_s=WAIT_S).split()[0] == sent


def test_large_frames_of_both_networks_are_received_in_place(topology: Topology):
    wait_until_used(topology)
    for one, other in pairs(topology):
        for node, source, host in ((one, other, topology.hosts[0]), (other, one, topology.hosts[1])):
            before = landed(topology, host)
            assert_fetched(node, source)
            assert landed(topology, host) > before + 50
    assert_balanced(topology)


def test_an_interface_without_direct_ports_uses_the_links_port(topology: Topology):
    host = topology.hosts[1]
    source, node = pairs(topology)[0]
    daemon.vnet(host, "interface", "set", node.name, "direct=false")
    try:
        assert states(host) == ["used"]
        wait_until("the withdrawal", lambda: used(topology.hosts[0]) == [True], WAIT_S)
        before = landed(topology, host)
        assert_fetched(node, source)
        assert landed(topology, host) == before
    finally:
        daemon.vnet(host, "interface", "set", node.name, "direct=true")
    wait_until_used(topology)
    assert_balanced(topology)


def test_a_port_behind_a_firewall_is_not_used(topology: Topology):
    host = topology.hosts[1]
    source, node = pairs(topology)[0]
    nft = ["ip", "netns", "exec", host.namespace, "nft"]
    run([*nft, "add table inet block; add chain inet block in { type filter hook input priority 0; }"])
    run([*nft, "add rule inet block in udp dport 10000-65535 drop"])
    try:
        wait_until("the ports to be unused", lambda: used(topology.hosts[0]) == [False] * 2, WAIT_S)
        assert states(host) == ["waiting"] * 2
        reason = daemon.ask(host, "interface", "list")[0]["direct_reason"]
        assert re.fullmatch(r"link h1: nothing comes from the other host to UDP port \d+: .* firewall drops it", reason)
        before = landed(topology, host)
        assert ping(source, node.address, count=20) == (20, 20)
        assert_fetched(node, source)
        assert landed(topology, host) == before
    finally:
        run([*nft, "delete table inet block"])
    wait_until_used(topology)
    assert_fetched(node, source)
    assert landed(topology, host) > before
    assert_balanced(topology)


def numbers(host: Node) -> list[int]:
    """The numbers of the direct ports of a host's machines."""
    return [direct["port"] for each in daemon.ask(host, "interface", "list") for direct in each.get("direct_ports", [])]


def test_ports_follow_a_hosts_address(topology: Topology):
    """The receiving host's underlay address changes: the same ports, of the same interfaces, are used there."""
    sender, host = topology.hosts
    source, node = pairs(topology)[0]
    wait_until_used(topology)
    before, times = numbers(host), []

    def followed(address: str) -> None:
        remote = f"{address}:9000"
        wait_until("the new address", lambda: links(sender)[host.name]["remote"] == remote, WAIT_S, poll_s=0.05)
        begin = time.monotonic()
        wait_until("the ports to be used", lambda: used(sender) == [True] * 2, WAIT_S, poll_s=0.05)
        times.append(time.monotonic() - begin)
        assert numbers(host) == before
        landed_before = landed(topology, host)
        assert_fetched(node, source)
        assert landed(topology, host) > landed_before + 50

    with readdressed(host) as address:
        followed(address)
    followed(host.address)
    assert min(times) <= FOLLOW_S, times
    wait_until_used(topology)
    assert_balanced(topology)


def test_a_machine_that_ends_withdraws_its_port(topology: Topology):
    host, node = topology.hosts[1], pairs(topology)[1][1]
    process.stop(node.file(".pid"))
    wait_until("the port to be withdrawn", lambda: used(topology.hosts[0]) == [True], WAIT_S)
    assert sorted(states(host)) == ["down", "used"]


def test_sealed_links_have_direct_ports():
    """Frames of both networks take the ports on sealed links, too; they are decrypted in vnetd's memory."""
    name = f"{NAME}-sealed"
    lab.down(name)
    try:
        topology = bring_up(Settings(name=name, containers=0, vms=2, sealed=True, store=True))
        wait_until_used(topology)
        host = topology.hosts[1]
        nft = ["ip", "netns", "exec", host.namespace, "nft"]
        run([*nft, "add table inet count; add chain inet count in { type filter hook input priority 0; }"])
        for number in numbers(host):
            run([*nft, f"add rule inet count in udp dport {number} counter"])
        for (one, other), number in zip(pairs(topology), numbers(host), strict=True):
            assert_fetched(other, one)
            assert ping(one, other.address, count=20) == (20, 20)
            counted = run([*nft, "list", "table", "inet", "count"])
            packets = int(re.search(rf"dport {number} counter packets (\d+)", counted)[1])
            assert packets > 50, "the file came by the port"
        assert landed(topology, host) == 0
        assert_balanced(topology)
    finally:
        lab.down(name)
