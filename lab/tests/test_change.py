"""Changes under traffic: they take effect at once, and paths that do not change lose no frame."""

import json
import socket
import time

import pytest
from checks import assert_balanced, pinging, port, reaches, settled, silent
from conftest import MakeLab

from vnetlab import daemon, machine
from vnetlab.run import LabError, run
from vnetlab.topology import Node, Topology

ROUNDS = 4
RULES = 1000
PLAN_S = 1.0
"""A quiet machine needs less than 50 ms; here other tests share the processors."""


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab()


@pytest.fixture
def paths(topology: Topology) -> list[tuple[Node, Node]]:
    """Paths that no test of this module changes."""
    find = topology.find
    return [(find("h1v1"), find("h2v1")), (find("h1c1"), find("h2c1")), (find("h2c1"), find("h2v1"))]


def names(host: Node, what: str) -> set[str]:
    return {row["name"] for row in daemon.ask(host, what, "list")}


def test_interfaces_come_and_go(topology: Topology, paths: list[tuple[Node, Node]]):
    host, home = topology.hosts[0], topology.find("h1c1")
    with pinging(*paths):
        for _ in range(ROUNDS):
            # A second device in a container's namespace serves as another container.
            add = ["--kind", "tap", "--device", "extra", "--netns", home.namespace, "--mac", "52:54:00:01:00:63"]
            daemon.vnet(host, "interface", "add", "extra", *add)
            daemon.vnet(host, "interface", "add", "spare", "--kind", "vhost-user", "--socket", str(host.file(".spare")))
            assert {"extra", "spare"} <= names(host, "interface")
            assert host.file(".spare").is_socket()
            assert "52:54:00:01:00:63" in machine.execute(home, "ip link show extra")
            daemon.vnet(host, "interface", "del", "extra")
            daemon.vnet(host, "interface", "del", "spare")
            assert not {"extra", "spare"} & names(host, "interface")
            assert not host.file(".spare").exists()
            assert machine.attempt(home, "ip link show extra")[0] != 0


def test_links_come_and_go(topology: Topology, paths: list[tuple[Node, Node]]):
    host = topology.hosts[0]
    with pinging(*paths):
        for _ in range(ROUNDS):
            daemon.vnet(host, "link", "add", "h9", "--remote", "10.78.0.9:9000", "--trusted")
            assert names(host, "link") == {"h2", "h9"}
            daemon.vnet(host, "link", "del", "h9")
            assert names(host, "link") == {"h2"}


def test_routes_come_and_go_and_work_at_once(topology: Topology, paths: list[tuple[Node, Node]]):
    """A rule that misdirects a third machine's frames is in force from its addition until its deletion."""
    host, source, destination = topology.hosts[0], topology.find("h1c1"), topology.find("h2v1")
    route = ["--src", source.mac, "--dst", destination.mac, "--to", "interface h1v1"]
    assert reaches(source, destination.address)
    with pinging(*paths):
        for _ in range(2):
            added = json.loads(daemon.vnet(host, "--json", "route", "add", *route))
            assert silent(source, destination.address), "the rule wins over learned addresses"
            daemon.vnet(host, "route", "del", str(added["index"]))
            assert reaches(source, destination.address)
    assert daemon.ask(host, "route", "list") == []


def apply(host: Node, text: str) -> tuple[str, float]:
    """Applies a configuration by the API; returns the first line of the answer and the seconds that it took."""
    body = text.encode()
    head = (
        f"POST /v1/apply?name=rules HTTP/1.1\r\nHost: vnet\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(host.file(".sock")))
        start = time.perf_counter()
        client.sendall(head.encode() + body)
        status = client.recv(1 << 16)
        took = time.perf_counter() - start
        while client.recv(1 << 16):
            pass
    return status.decode().splitlines()[0], took


def test_a_thousand_rules_are_one_plan(topology: Topology, paths: list[tuple[Node, Node]]):
    """A plan adds or removes all of them at once, or none; traffic on other paths loses no frame."""
    host = topology.hosts[0]
    before = host.file(".toml").read_text()
    rule = '\n[[route]]\nsrc = "52:54:00:99:{0:02x}:{1:02x}"\ndst = "52:54:00:98:{0:02x}:{1:02x}"\nto = "link h2"\n'
    rules = "".join(rule.format(*divmod(n, 256)) for n in range(RULES))
    broken = rules + rule.format(9, 9).replace("link h2", "link nowhere")
    times = []
    with pinging(*paths, seconds=8):
        for _ in range(ROUNDS):
            status, _ = apply(host, before + broken)
            assert "400" in status or "409" in status or "422" in status, status
            assert daemon.ask(host, "route", "list") == [], "a partly applied configuration"
            for text, count in ((before + rules, RULES), (before, 0)):
                status, took = apply(host, text)
                assert "200" in status, status
                times.append(took)
                assert len(daemon.ask(host, "route", "list")) == count
    # The best round counts: the machine may be busy.
    assert min(times) < PLAN_S, times


def configured(host: Node) -> list[list[dict]]:
    """A host's lists without what changes by itself: rates, counters, times, notes about recent frames."""
    moving = {"driven_by", "rate", "switches", "notifications_per_1000_frames", "heard_s", "early", "early_discarded"}
    moving |= {"early_at_arrival", "early_mispredicted", "early_premature", "coalesced_injected", "coalesced_withheld"}
    moving |= {"rtt_us", "loss_permille", "traffic", "notes"}
    lists = (daemon.ask(host, what, "list") for what in ("interface", "link", "route"))
    return [[{key: value for key, value in item.items() if key not in moving} for item in items] for items in lists]


def test_a_refused_change_changes_nothing(topology: Topology, paths: list[tuple[Node, Node]]):
    host, taken = topology.hosts[0], str(topology.find("h1v1").file(".vhost"))
    refused = {
        "interface add h1c1 --kind tap --device other": "h1c1",
        f"interface add new --kind vhost-user --socket {taken}": taken,
        "interface add new --kind tap --device x --mac 52:54:00:01:00:01": "52:54:00:01:00:01",
        "interface add new --kind tap --device x --netns no-such-namespace": "no-such-namespace",
        "interface add new --kind tap --device x --mtu 65536": "65536",
        "interface del none": "none",
        "link add h2 --remote 10.78.0.9:9000 --trusted": "h2",
        "link add new --remote 10.78.0.1:9000 --trusted": "this host itself",
        "link add new --remote nowhere --trusted": "nowhere",
        "link del none": "none",
        "route add --dst any --to link\tnone": "none",
        "route add --dst 52:54 --to link\th2": "52:54",
        "route del 99": "99",
    }
    before = configured(host)
    with pinging(*paths, seconds=4):
        for arguments, word in refused.items():
            with pytest.raises(LabError, match="status 1") as refusal:
                daemon.vnet(host, *(part.replace("\t", " ") for part in arguments.split(" ")))
            assert word in str(refusal.value), arguments
    assert configured(host) == before


def test_a_removed_interface_stays_in_the_balance(topology: Topology):
    """Frames of a removed interface stay in the balance."""
    host, home = topology.hosts[0], topology.find("h1c1")
    daemon.vnet(host, "interface", "add", "extra", "--kind", "tap", "--device", "extra", "--netns", home.namespace)
    run(["ip", "-n", home.namespace, "address", "add", "10.99.0.1/24", "dev", "extra"])
    machine.attempt(home, "ping -c 3 -i 0.1 -W 1 10.99.0.2")
    counted = port(settled(host), "interface", "extra")["in_frames"]
    removed = port(settled(host), "removed", "removed")["in_frames"]
    assert counted > 0
    daemon.vnet(host, "interface", "del", "extra")
    assert port(settled(host), "removed", "removed")["in_frames"] >= removed + counted


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
