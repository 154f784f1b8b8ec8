"""Two hosts behind translators of addresses meet by a third one: at once by it, then straight, and back."""

import re
import time
from collections.abc import Iterator

import pytest
from checks import assert_balanced, ping, pinging, port, reaches, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, lab, machine, process
from vnetlab.run import run, wait_until
from vnetlab.topology import PORT, Node, Topology

MEET_PORT = PORT + 1
"""UDP, on the host between: of the only pair there is."""
OUTSIDE = {1: "10.78.0.101", 2: "10.78.0.102"}
"""Addresses of the translators, on the network that h3 is in."""
PACKETS = 50
CONE, SYMMETRIC = "masquerade", "masquerade fully-random"
"""Of the kernel's translators, the first keeps a port whoever it is sent to from there, the second has one for each."""


def link(host: Node, name: str) -> dict:
    """One of a host's links."""
    return next(entry for entry in daemon.ask(host, "link", "list") if entry["name"] == name)


def translator(topology: Topology, host: Node) -> str:
    """The namespace of what stands between a host and the others."""
    return f"{topology.settings.name}-h{host.host}c9"


def put_behind(topology: Topology, host: Node) -> None:
    """Moves a host from the common network to one of its own, behind a translator of addresses."""
    inside, router = host.namespace, translator(topology, host)
    private = f"192.168.{host.host}"
    run(["ip", "netns", "add", router])
    # The end that was h's goes to the translator; h gets another.
    run(["ip", "-n", inside, "link", "set", "eth0", "netns", router])
    run(["ip", "-n", router, "link", "set", "eth0", "name", "outside", "up"])
    run(["ip", "-n", router, "address", "add", f"{OUTSIDE[host.host]}/24", "dev", "outside"])
    run(["ip", "-n", router, "link", "set", "lo", "up"])
    run(f"ip link add inside netns {router} type veth peer name eth0 netns {inside}".split())
    for namespace, device, address in ((router, "inside", f"{private}.1"), (inside, "eth0", f"{private}.2")):
        run(["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device])
        run(["ip", "-n", namespace, "link", "set", device, "up"])
    run(["ip", "-n", inside, "route", "add", "default", "via", f"{private}.1"])
    run(["ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1"])


def translate(topology: Topology, host: Node, how: str) -> None:
    """Has a host's translator translate that way from now on. What it knew is forgotten; nothing comes in unasked.

    What comes unasked ends before it is known: else it would take the port of what goes out to the same host later.
    """
    rules = (
        "flush ruleset\n"
        "table ip translator {\n"
        f" chain out {{ type nat hook postrouting priority 100; oifname outside {how}; }}\n"
        " chain in { type filter hook forward priority 0; policy drop; iifname inside accept;"
        " ct state established,related accept; }\n"
        " chain own { type filter hook input priority 0; iifname outside drop; }\n"
        "}\n"
    )
    router = translator(topology, host)
    path = host.file(".nft")
    path.write_text(rules)
    run(["ip", "netns", "exec", router, "nft", "-f", str(path)])
    # The kernel forgets the connections by a device that goes down.
    for state in ("down", "up"):
        run(["ip", "-n", router, "link", "set", "outside", state])


def carried(host: Node) -> int:
    """Datagrams that the host between has got for others."""
    return port(daemon.ask(host, "stats"), "bridge", "bridge")["in_datagrams"]


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Iterator[Topology]:
    """h1 and h2 behind translators, linked with h3, which everybody reaches, and with each other by way of it."""
    topology = make_lab(vms=0, hosts=3, sealed=True)
    *hidden, between = topology.hosts
    for host in topology.hosts:
        process.stop(host.file(".pid"))
    for host in hidden:
        put_behind(topology, host)
        translate(topology, host, CONE)
    for host in topology.hosts:
        head, *tables = daemon.configuration(topology, host).split("[[link]]")
        for number, table in enumerate(tables):
            name = re.search(r'name = "(\w+)"', table)
            assert name
            if name[1] == between.name:
                continue
            how = "" if host == between else f'via = "{between.name}"\n'
            tables[number] = re.sub(r"remote = .*\n", how, table)
        meetings = "meetings = 1\n" if host == between else ""
        text = "[[link]]".join([head, *tables]).replace("[bridge]\n", f"[bridge]\n{meetings}")
        host.file(".toml").write_text(text)
    for host in (between, *hidden):
        lab.start_daemon(topology, host)
    yield topology
    for host in hidden:
        run(["ip", "netns", "delete", translator(topology, host)])


def wait_for_way(topology: Topology, *, straight: bool) -> None:
    """Waits until both hosts send to each other straight, or by the host between."""
    near, far, between = topology.hosts

    def way(host: Node, peer: Node) -> bool:
        entry = link(host, peer.name)
        by_another = entry["remote"] == f"{between.address}:{MEET_PORT}"
        return entry["state"] == "up" and by_another != straight and entry["remote"] != "anywhere"

    words = "straight" if straight else "by way of h3"
    wait_until(f"datagrams to go {words}", lambda: way(near, far) and way(far, near), 15)


def test_they_meet_and_go_straight(topology: Topology):
    near, far, between = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    # Neither could reach the other by itself.
    assert machine.attempt(near, "ping", "-c", "1", "-W", "1", "192.168.2.2")[0] != 0
    wait_for_path(one, other.address)
    wait_for_way(topology, straight=True)
    assert link(near, far.name)["remote"] == f"{OUTSIDE[2]}:{PORT}"
    before = carried(between)
    begun = time.monotonic()
    assert ping(one, other.address, "-s", "1000", count=400) == (400, 400)
    # Keepalives and registrations, twenty a second; no frame, of which there were 800.
    assert carried(between) - before < 50 + 30 * (time.monotonic() - begun), "the host between carries no frame"
    assert reaches(one, other.address, "-s", "60000")
    assert reaches(other, topology.find("h3c1").address)


def test_symmetric_translators_leave_them_with_the_host_between(topology: Topology):
    near, far, between = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in (near, far):
        translate(topology, host, SYMMETRIC)
    wait_for_way(topology, straight=False)
    wait_for_path(one, other.address)
    time.sleep(2)
    wait_for_way(topology, straight=False)
    before = carried(between)
    assert ping(one, other.address, "-s", "1000", count=PACKETS) == (PACKETS, PACKETS)
    assert carried(between) - before >= 2 * PACKETS, "questions and answers"
    assert reaches(one, other.address, "-s", "60000")


def test_a_direct_way_that_dies_is_left_and_found_again(topology: Topology):
    near, far, _ = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in (near, far):
        translate(topology, host, CONE)
    wait_for_way(topology, straight=True)
    # The two cannot hear each other any more; h3 can hear both.
    router = ["ip", "netns", "exec", translator(topology, near), "nft"]
    run([*router, "insert", "rule", "ip", "translator", "in", "ip", "saddr", OUTSIDE[2], "drop"])
    run([*router, "insert", "rule", "ip", "translator", "in", "ip", "daddr", OUTSIDE[2], "drop"])
    cut = time.monotonic()
    wait_for_path(one, other.address)
    assert time.monotonic() - cut < 3
    wait_for_way(topology, straight=False)
    translate(topology, near, CONE)
    wait_for_way(topology, straight=True)
    with pinging((one, other), (other, one), interval_s=0.01, seconds=3):
        pass


def test_the_host_between_may_start_again(topology: Topology):
    between = topology.hosts[2]
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in topology.hosts[:2]:
        translate(topology, host, SYMMETRIC)
    wait_for_way(topology, straight=False)
    process.stop(between.file(".pid"))
    lab.start_daemon(topology, between)
    wait_for_path(one, other.address, timeout_s=20)
    wait_for_way(topology, straight=False)


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
