"""`vnetd --take-over` of hosts whose virtual machines have direct ports, negotiated or configured: no frame is lost.

    h1v1 -- vnetd h1 -- veth, jumbo frames -- vnetd h2 -- h2v1

VNET_TEST_TAKE_OVERS=100 runs the long test.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import assert_balanced, pinging, port, wait_for_path
from file_guests import start_file_guests
from take_overs import assert_none_lost_between, both, peer, take_over

from vnetlab import daemon, lab, machine, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Settings, Topology

NAME = "test-take-over-direct"
TAKE_OVERS = int(os.environ.get("VNET_TEST_TAKE_OVERS", "4"))
BYTES = 8_000_000
PORT = 8000
WAIT_S = 90


@pytest.fixture(scope="module", params=["negotiated", "configured", "sealed"])
def topology(request: pytest.FixtureRequest) -> Iterator[Topology]:
    """Two hosts with a virtual machine each, which serves a file."""
    lab.down(NAME)
    sealed = request.param == "sealed"
    topology = lab.prepare(Settings(name=NAME, containers=0, underlay_mtu=9000, mtu=9000, sealed=sealed))
    try:
        for host in topology.hosts:
            host.file(".toml").write_text(configuration(topology, host, request.param))
            lab.start_daemon(topology, host)
        guests = start_file_guests(topology, PORT, BYTES)
        wait_for_path(guests[0], guests[1].address, WAIT_S)
        yield topology
    finally:
        lab.down(NAME)


def configuration(topology: Topology, host: Node, kind: str) -> str:
    """A host's vnet.toml, with direct ports of its virtual machine."""
    if kind == "configured":
        return daemon.with_direct_ports(daemon.configuration(topology, host), topology, host)
    return daemon.configuration(topology, host, "direct = true\n")


def direct_ports(host: Node) -> list[tuple[int, str]]:
    """Numbers and states of the negotiated direct ports of a host's virtual machine."""
    (only,) = daemon.ask(host, "interface", "list")
    return [(direct["port"], direct["state"]) for direct in only.get("direct_ports", [])]


def sockets(host: Node) -> set[str]:
    """Local addresses of the UDP sockets in a host's namespace."""
    lines = machine.execute(host, "ss", "-Huln").splitlines()
    return {line.split()[3] for line in lines}


def landed(topology: Topology, host: Node) -> int:
    """Number of frames received in place, in guests' buffers."""
    return port(daemon.ask(host, "stats"), "link", peer(topology, host).name)["direct_in_place"]


def assert_fetched(node: Node, source: Node) -> None:
    """Asserts that a node can fetch a file from another node unchanged."""
    sent = machine.execute(source, "sha256sum </files/sent", timeout_s=WAIT_S).split()[0]
    fetch = f"busybox wget -q -O - http://{source.address}:{PORT}/sent | sha256sum"
    assert machine.execute(node, fetch, timeout_s=WAIT_S).split()[0] == sent


def test_direct_ports_go_on_without_a_lost_frame(topology: Topology):
    """Take-overs of both hosts under pings; large frames go to the same ports before and after."""
    one, other = topology.machines()
    negotiated = "direct = true" in topology.hosts[0].file(".toml").read_text()
    in_place = "[identity]" not in topology.hosts[0].file(".toml").read_text()
    for host in topology.hosts:
        used = [True] if negotiated else []
        wait_until(
            f"the direct port of {host.name} to be used",
            lambda host=host, used=used: [state == "used" for _, state in direct_ports(host)] == used,
            WAIT_S,
        )
    ports = {host.name: (direct_ports(host), sockets(host)) for host in topology.hosts}
    before = both(topology)
    with pinging((one, other), (other, one), interval_s=0.005, seconds=3):
        for number in range(TAKE_OVERS):
            take_over(topology, topology.hosts[number % 2])
            time.sleep(0.3)
    assert_none_lost_between(topology, before)
    for host in topology.hosts:
        numbers, addresses = ports[host.name]
        assert sockets(host) == addresses
        wait_until("its port to be used", lambda host=host, numbers=numbers: direct_ports(host) == numbers, WAIT_S)
    before = both(topology)
    counts = [landed(topology, host) for host in topology.hosts]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(assert_fetched, (one, other), (other, one)))
    assert_none_lost_between(topology, before)
    if in_place:
        for host, count in zip(topology.hosts, counts, strict=True):
            assert landed(topology, host) > count + 50, "large frames are received in place"
    assert_balanced(topology)


def test_data_in_flight_arrives_unchanged(topology: Topology):
    """Large frames, received in place, while the vnetds of both hosts change."""
    one, other = topology.machines()
    before = both(topology)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(fetch_again, *pair) for pair in ((one, other), (other, one))]
        for number in range(TAKE_OVERS):
            take_over(topology, topology.hosts[number % 2])
            time.sleep(0.3)
        for each in running:
            each.result()
    assert_none_lost_between(topology, before)
    assert_balanced(topology)


def fetch_again(node: Node, source: Node) -> None:
    """Fetches the file several times."""
    for _ in range(8):
        assert_fetched(node, source)


def test_a_peer_other_than_the_link_s_does_not_reach_the_port(topology: Topology):
    """The socket's filter goes along: after a take-over the port takes datagrams from the other host only."""
    host = topology.hosts[0]
    take_over(topology, host)
    addresses = sorted(sockets(host) - {f"*:{daemon.PORT}"})
    assert addresses
    pid = process.find(host.file(".pid"))
    assert pid
    send = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM);"
        f"[s.sendto(bytes(64), ('{host.address}', {{port}})) for _ in range(100)]"
    )
    stranger = topology.hosts[1]
    before = strangers(host)
    for address in addresses:
        machine.execute(stranger, "python3", "-c", send.format(port=address.rpartition(":")[2]))
    time.sleep(0.5)
    assert strangers(host) == before


def strangers(host: Node) -> int:
    """Number of datagrams that belong to no link."""
    (bridge,) = (each for each in daemon.ask(host, "stats")["ports"] if each["kind"] == "bridge")
    return bridge["discards"]["unknown_source"]
