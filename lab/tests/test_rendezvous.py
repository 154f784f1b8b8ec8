"""Rendezvous: two hosts behind NAT communicate through a relay, directly after hole punching, relayed again."""

import re
import time
from collections.abc import Iterator

import pytest
from checks import assert_balanced, links, ping, pinging, port, reaches, wait_for_path
from conftest import MakeLab
from sealed_links import hang_up
from take_overs import take_over

from vnetlab import daemon, lab, machine, process
from vnetlab.run import run, wait_until
from vnetlab.topology import PORT, Node, Topology

MEET_PORT = PORT + 1
"""UDP port at which the relay serves its only pair."""
OUTSIDE = {1: "10.78.0.101", 2: "10.78.0.102"}
"""Outside addresses of the NATs, on h3's network."""
PACKETS = 50
CONE, SYMMETRIC = "masquerade", "masquerade fully-random"
"""Kinds of NAT: the first keeps one outside port for all destinations, the second uses one for each destination."""


def nat(topology: Topology, host: Node) -> str:
    """The namespace of a host's NAT."""
    return f"{topology.settings.name}-h{host.host}c9"


def put_behind_nat(topology: Topology, host: Node) -> None:
    """Moves a host to a private network behind NAT."""
    inside, router = host.namespace, nat(topology, host)
    private = f"192.168.{host.host}"
    run(["ip", "netns", "add", router])
    # The NAT takes over the host's device; the host gets a new one.
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


def set_nat(topology: Topology, host: Node, how: str) -> None:
    """Sets the kind of a host's NAT and makes it forget its connections. Unsolicited packets are dropped.

    They are dropped before connection tracking confirms them: otherwise they would occupy the port of a later flow.
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
    router = nat(topology, host)
    path = host.file(".nft")
    path.write_text(rules)
    run(["ip", "netns", "exec", router, "nft", "-f", str(path)])
    # The kernel forgets the connections of a device that is set down.
    for state in ("down", "up"):
        run(["ip", "-n", router, "link", "set", "outside", state])


def carried(host: Node) -> int:
    """Number of datagrams that the relay has received for other hosts."""
    return port(daemon.ask(host, "stats"), "bridge", "bridge")["in_datagrams"]


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Iterator[Topology]:
    """h1 and h2 behind NAT, linked with h3, which both can reach, and with each other by rendezvous at h3."""
    topology = make_lab(vms=0, hosts=3, sealed=True)
    *hidden, between = topology.hosts
    for host in topology.hosts:
        process.stop(host.file(".pid"))
    for host in hidden:
        put_behind_nat(topology, host)
        set_nat(topology, host, CONE)
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
        run(["ip", "netns", "delete", nat(topology, host)])


def wait_for_path_choice(topology: Topology, *, direct: bool) -> None:
    """Waits until both hosts send to each other directly, or through the relay."""
    near, far, between = topology.hosts

    def chosen(host: Node, peer: Node) -> bool:
        entry = links(host)[peer.name]
        relayed = entry["remote"] == f"{between.address}:{MEET_PORT}"
        return entry["state"] == "up" and relayed != direct and entry["remote"] != "anywhere"

    words = "directly" if direct else "by way of h3"
    wait_until(f"datagrams to go {words}", lambda: chosen(near, far) and chosen(far, near), 15)


def test_hole_punching_gives_a_direct_path(topology: Topology):
    near, far, between = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    # Neither host can reach the other directly.
    assert machine.attempt(near, "ping", "-c", "1", "-W", "1", "192.168.2.2")[0] != 0
    wait_for_path(one, other.address)
    wait_for_path_choice(topology, direct=True)
    assert links(near)[far.name]["remote"] == f"{OUTSIDE[2]}:{PORT}"
    before = carried(between)
    begun = time.monotonic()
    assert ping(one, other.address, "-s", "1000", count=400) == (400, 400)
    # The relay carries twenty keepalives and registrations a second, but none of the 800 frames.
    assert carried(between) - before < 50 + 30 * (time.monotonic() - begun), "the relay carries frames"
    assert reaches(one, other.address, "-s", "60000")
    assert reaches(other, topology.find("h3c1").address)


def test_symmetric_nat_keeps_the_relay(topology: Topology):
    near, far, between = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in (near, far):
        set_nat(topology, host, SYMMETRIC)
    wait_for_path_choice(topology, direct=False)
    wait_for_path(one, other.address)
    time.sleep(2)
    wait_for_path_choice(topology, direct=False)
    before = carried(between)
    assert ping(one, other.address, "-s", "1000", count=PACKETS) == (PACKETS, PACKETS)
    assert carried(between) - before >= 2 * PACKETS, "echo requests and replies"
    assert reaches(one, other.address, "-s", "60000")


def test_a_broken_direct_path_falls_back_and_recovers(topology: Topology):
    near, far, _ = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in (near, far):
        set_nat(topology, host, CONE)
    wait_for_path_choice(topology, direct=True)
    # The two hosts lose their direct path; h3 can still reach both.
    router = ["ip", "netns", "exec", nat(topology, near), "nft"]
    run([*router, "insert", "rule", "ip", "translator", "in", "ip", "saddr", OUTSIDE[2], "drop"])
    run([*router, "insert", "rule", "ip", "translator", "in", "ip", "daddr", OUTSIDE[2], "drop"])
    cut = time.monotonic()
    wait_for_path(one, other.address)
    assert time.monotonic() - cut < 3
    wait_for_path_choice(topology, direct=False)
    set_nat(topology, near, CONE)
    wait_for_path_choice(topology, direct=True)
    with pinging((one, other), (other, one), interval_s=0.01, seconds=3):
        pass


def test_the_relay_may_restart(topology: Topology):
    between = topology.hosts[2]
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in topology.hosts[:2]:
        set_nat(topology, host, SYMMETRIC)
    wait_for_path_choice(topology, direct=False)
    process.stop(between.file(".pid"))
    lab.start_daemon(topology, between)
    wait_for_path(one, other.address, timeout_s=20)
    wait_for_path_choice(topology, direct=False)


@pytest.mark.parametrize("kind", [CONE, SYMMETRIC])
def test_hosts_that_meet_are_taken_over(topology: Topology, kind: str):
    """Two hosts that meet, and the one where they do, get new vnetds under pings, with a direct path and without."""
    near, far, between = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in (near, far):
        set_nat(topology, host, kind)
    wait_for_path_choice(topology, direct=kind == CONE)
    wait_for_path(one, other.address)
    keys_s, begun = links(near)[far.name]["keys_s"], time.monotonic()
    logs = {host.name: len(host.file(".log").read_text()) for host in topology.hosts}
    with pinging((one, other), (other, one), interval_s=0.01, seconds=3):
        for host in (between, near, far, between):
            take_over(topology, host)
            time.sleep(0.5)
    wait_for_path_choice(topology, direct=kind == CONE)
    assert links(near)[far.name]["keys_s"] >= keys_s + int(time.monotonic() - begun), "no meeting since"
    for host in topology.hosts:
        log = host.file(".log").read_text()[logs[host.name] :]
        assert "no keys" not in log
        assert "meet anew" not in log
    # The next keys are agreed on at the new vnetd of the rendezvous.
    age_s = links(near)[far.name]["keys_s"]
    daemon.issue(topology, near)
    hang_up(near)
    wait_until("new keys", lambda: links(near)[far.name]["keys_s"] < age_s, 20)
    assert reaches(one, other.address)


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
