"""Stream links: over TCP, through a SOCKS 5 proxy, and after peers, connections and the proxy fail."""

from collections.abc import Iterator

import pytest
from checks import links, ping, port, reaches, settled, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, lab, machine, measure, process
from vnetlab.daemon import STREAM_PORT
from vnetlab.run import run, wait_until
from vnetlab.topology import Node, Settings, Topology

TCP_BPS_MIN = 100e6
PROXY_PORT = 1080
HALF_OPEN_S = 10
"""A half-open connection is detected within this many seconds."""


def is_up(host: Node, name: str) -> bool:
    """Whether a link has a connection."""
    return links(host)[name]["state"] == "up"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Two hosts whose stream links connect to each other."""
    return make_lab(encapsulation="stream", vms=0, mtu=9000)


def test_frames_of_all_sizes_cross(topology: Topology):
    one, other = topology.machines()
    wait_for_path(one, other.address)
    assert ping(one, other.address, count=100) == (100, 100)
    assert reaches(one, other.address, "-s", "8972", "-M", "do"), "frames larger than the path MTU"
    for source, destination in ((one, other), (other, one)):
        assert measure.throughput(source, destination, seconds=1) > TCP_BPS_MIN
    for host in topology.hosts:
        settled(host)


def test_unknown_sources_are_closed_and_counted(topology: Topology):
    host, stranger = topology.hosts
    before = port(settled(host), "bridge", "bridge")["discards"].get("unknown_source", 0)
    run(["ip", "-n", stranger.namespace, "address", "add", "10.78.0.77/24", "dev", "eth0"])
    script = (
        "import socket; s = socket.create_connection"
        f"(('{host.address}', {STREAM_PORT}), 5, ('10.78.0.77', 0)); s.settimeout(5); print(s.recv(1))"
    )
    assert "b''" in machine.execute(stranger, "python3", "-c", script)
    assert port(settled(host), "bridge", "bridge")["discards"]["unknown_source"] == before + 1


def test_a_restarted_peer_is_reconnected(topology: Topology):
    one, other = topology.machines()
    host = topology.hosts[1]
    wait_for_path(one, other.address)
    process.stop(host.file(".pid"))
    wait_until("the link to be down", lambda: not is_up(topology.hosts[0], "h2"), 5)
    assert links(topology.hosts[0])["h2"]["reason"]
    lab.start_daemon(topology, host)
    wait_for_path(one, other.address)


def test_half_open_connections_are_detected(topology: Topology):
    """The wire is cut: neither FIN nor RST ends the connections."""
    one, other = topology.machines()
    near, far = topology.hosts
    wait_for_path(one, other.address)
    # With a blackhole route, both ends still consider their connections open.
    blackhole = ["ip", "-n", far.namespace, "route", "add", "blackhole", f"{near.address}/32"]
    run(blackhole)
    try:
        wait_until("the dead connection to be detected", lambda: not is_up(near, "h2"), HALF_OPEN_S, poll_s=0.2)
        wait_until("the other end to detect it", lambda: not is_up(far, "h1"), HALF_OPEN_S, poll_s=0.2)
    finally:
        run([word if word != "add" else "delete" for word in blackhole])
    wait_for_path(one, other.address, timeout_s=20)


@pytest.fixture(scope="module")
def proxied() -> Iterator[Topology]:
    """The first host connects through a proxy on the second one, which accepts and knows only the proxy's address."""
    name = "stream-socks"
    lab.down(name)
    topology = lab.up(Settings(name=name, vms=0, encapsulation="stream"))
    near, far = topology.hosts
    start_proxy(far)
    daemon.vnet(near, "link", "del", "h2")
    daemon.vnet(far, "link", "del", "h1")
    words = ["--encapsulation", "stream", "--trusted"]
    # The name proves that the proxy resolves it: on the first host, `localhost` would be the first host.
    proxy = f"socks5://lab:secret@{far.address}:{PROXY_PORT}"
    daemon.vnet(near, "link", "add", "far", "--remote", f"localhost:{STREAM_PORT}", "--proxy", proxy, *words)
    daemon.vnet(far, "link", "add", "near", "--remote", f"127.0.0.1:{STREAM_PORT + 1}", "--connect", "false", *words)
    yield topology
    lab.down(name)


def start_proxy(host: Node, user: str = "lab") -> None:
    """Starts a SOCKS 5 proxy with user and password."""
    words = ["microsocks", "-i", host.address, "-p", str(PROXY_PORT), "-u", user, "-P", "secret"]

    def listens() -> bool:
        # The proxy exits at once while its predecessor's port is still in use.
        if process.find(host.file(".proxy")) is None:
            process.start(machine.namespace_command(host, words), host.file(".proxy"), host.file(".proxy.log"))
        return bool(run(machine.namespace_command(host, ["ss", "-Hltn", f"sport = :{PROXY_PORT}"])))

    wait_until("the proxy to listen", listens, 10, host.file(".proxy.log"))


def test_a_proxy_carries_the_link(proxied: Topology):
    one, other = proxied.machines()
    wait_for_path(one, other.address)
    assert ping(one, other.address, count=50) == (50, 50)
    assert measure.throughput(one, other, seconds=1) > TCP_BPS_MIN
    assert measure.throughput(other, one, seconds=1) > TCP_BPS_MIN


def test_the_link_recovers_from_a_dead_proxy(proxied: Topology):
    one, other = proxied.machines()
    near, far = proxied.hosts
    wait_for_path(one, other.address)
    process.stop(far.file(".proxy"))
    wait_until("the link to be down", lambda: not is_up(near, "far"), 5)
    wait_until("the reason to be shown", lambda: "cannot connect" in links(near)["far"]["reason"], 5)
    start_proxy(far, user="somebody-else")
    wait_until("the refusal", lambda: "rejected user name or password" in links(near)["far"]["reason"], 15)
    process.stop(far.file(".proxy"))
    start_proxy(far)
    wait_for_path(one, other.address, timeout_s=20)
    settled(near)
