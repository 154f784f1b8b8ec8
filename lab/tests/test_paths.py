"""Paths that change: roaming peers, links with an unknown remote on one side, replay attacks, smaller path MTUs."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import assert_balanced, link, links, logged_after, ping, port, reaches, wait_for_path, wait_for_state
from conftest import MakeLab

from vnetlab import daemon, lab, machine, process
from vnetlab.run import run, wait_until
from vnetlab.topology import PORT, Node, Topology

PING_INTERVAL_S = 0.01
OUTAGE_MAX_S = 2
REPLAY = """
import socket, struct, sys
data = open(sys.argv[1], "rb").read()
payloads, at = [], 24
while at + 16 <= len(data):
    length = struct.unpack("<I", data[at + 8 : at + 12])[0]
    packet = data[at + 16 : at + 16 + length]
    at += 16 + length
    if packet[23] == 17 and packet[26:30] == socket.inet_aton(sys.argv[2]):
        payloads.append(packet[42:])
thief = socket.socket(type=socket.SOCK_DGRAM)
thief.bind((sys.argv[4], 9000))
for payload in payloads * 3:
    thief.sendto(payload, (sys.argv[3], 9000))
print(len(payloads))
"""
"""Replays the UDP payloads that came from one address in a capture, three times, from another address."""


def forget_remote(topology: Topology, host: Node, *, forget: bool) -> None:
    """Restarts a host's vnetd with or without the remote of its link."""
    process.stop(host.file(".pid"))
    lines = daemon.configuration(topology, host).splitlines(keepends=True)
    host.file(".toml").write_text("".join(line for line in lines if not (forget and line.startswith("remote ="))))
    lab.start_daemon(topology, host)


def move(host: Node, before: str, now: str) -> None:
    """Replaces the address of a host's underlay device."""
    inside = ["ip", "-n", host.namespace, "address"]
    run([*inside, "add", f"{now}/24", "dev", "eth0"])
    # Deleting the first address of a subnet deletes the others, unless they are promoted.
    machine.execute(host, "sysctl", "-qw", "net.ipv4.conf.eth0.promote_secondaries=1")
    run([*inside, "del", f"{before}/24", "dev", "eth0"])


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """A lab with a sealed link; h1 does not know the address of h2."""
    topology = make_lab(vms=0, sealed=True)
    forget_remote(topology, topology.hosts[0], forget=True)
    return topology


@pytest.mark.parametrize("waiting", [1, 0])
def test_one_side_alone_knows_the_address(topology: Topology, waiting: int):
    # h1 connects, because its name sorts first; if h1 knows no remote, h2 connects.
    for number, host in enumerate(topology.hosts):
        forget_remote(topology, host, forget=number == waiting)
    for host in topology.hosts:
        wait_for_state(host, "up")
    peer = topology.hosts[1 - waiting]
    wait_until("the peer to be found", lambda: link(topology.hosts[waiting])["remote"] == f"{peer.address}:{PORT}", 5)
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)


def test_a_roaming_peer_is_followed_under_traffic(topology: Topology):
    near, far = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    moved = "10.78.0.202"
    wait_for_path(one, other.address)
    for before, now in ((far.address, moved), (moved, far.address)):
        with ThreadPoolExecutor() as pool:
            running = pool.submit(ping, one, other.address, count=300, interval_s=PING_INTERVAL_S)
            time.sleep(0.5)
            move(far, before, now)
            gone = time.monotonic()
            wait_for_path(one, other.address)
            assert time.monotonic() - gone < OUTAGE_MAX_S
            assert running.result()[1] > 0
        assert link(near)["remote"] == f"{now}:{PORT}"
        assert reaches(one, other.address)


def test_replayed_datagrams_do_not_move_the_link(topology: Topology, tmp_path: Path):
    near, far = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(one, other.address)
    thief, capture = "10.78.0.203", tmp_path / "seen.pcap"
    run(["ip", "-n", far.namespace, "address", "add", f"{thief}/24", "dev", "eth0"])
    try:
        words = ["timeout", "2", "tcpdump", "-U", "-n", "-i", "eth0", "-s", "0", "-w", str(capture), "udp port 9000"]
        with ThreadPoolExecutor() as pool:
            running = pool.submit(machine.attempt, near, *words)
            ping(one, other.address, count=100)
            running.result()
        before = port(daemon.ask(near, "stats"), "link", far.name)["discards"]["replayed"]
        script = ["python3", "-c", REPLAY, str(capture), far.address, near.address, thief]
        # Stop this vnetd, because it holds the UDP port on all addresses of its host.
        process.stop(far.file(".pid"))
        sent = int(machine.execute(far, *script))
        assert sent > 10, "too few datagrams to replay"
        lab.start_daemon(topology, far)
        wait_for_state(near, "up")
        counted = port(daemon.ask(near, "stats"), "link", far.name)["discards"]["replayed"]
        assert counted - before >= 3, "replayed keepalives were counted"
        assert link(near)["remote"] == f"{far.address}:{PORT}"
        wait_for_path(one, other.address)
    finally:
        run(["ip", "-n", far.namespace, "address", "del", f"{thief}/24", "dev", "eth0"])


@pytest.fixture(scope="module", params=["native", "sealed"])
def narrow(request: pytest.FixtureRequest, make_lab: MakeLab) -> Topology:
    """Three hosts around a switch, with links in clear text or sealed."""
    topology = make_lab(vms=0, hosts=3, sealed=request.param == "sealed")
    for host in topology.hosts:
        wait_until("links to be up", lambda: all(entry["state"] == "up" for entry in links(host).values()), 10)  # noqa: B023
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


def narrow_to(topology: Topology, mtu: int) -> None:
    """Makes the switch drop larger packets to h2, without ICMP, because a switch is not a router."""
    run(["ip", "-n", topology.switch, "link", "set", "h2", "mtu", str(mtu)])


def test_a_smaller_path_mtu_without_icmp_is_obeyed_within_three_seconds(narrow: Topology):
    near = narrow.hosts[0]
    one, other = narrow.find("h1c1"), narrow.find("h2c1")
    assert reaches(one, other.address, "-s", "1400")
    assert links(near)["h2"]["mtu"] == 1500
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ping, one, other.address, "-s", "1400", count=300, interval_s=PING_INTERVAL_S)
        time.sleep(0.5)
        narrow_to(narrow, 1280)
        narrowed = time.monotonic()
        time.sleep(0.1)
        wait_until("large pings to be answered", lambda: ping(one, other.address, "-s", "1400", count=1)[1] == 1, 5)
        assert time.monotonic() - narrowed < 3
        running.result()
    assert links(near)["h2"]["mtu"] == 1280
    assert reaches(one, other.address, "-s", "8000")
    assert not links(near)["h2"].get("reason")


def test_a_killed_peer_is_detected_within_a_second(narrow: Topology):
    near, far, _ = narrow.hosts
    narrow_to(narrow, 1500)
    listed = links(near)["h2"]
    assert listed["rtt_us"] > 0
    assert listed["loss_permille"] <= 100
    pid = process.find(far.file(".pid"))
    assert pid
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    wait_until("the link to be down", lambda: links(near)["h2"]["state"] == "down", 10, poll_s=0.05)
    assert logged_after(near, "link h2: down", killed) < 1.3, "one second, and the delays of a busy machine"
    assert "nothing came" in links(near)["h2"]["reason"]
    assert links(near)["h3"]["state"] == "up"
    process.stop(far.file(".pid"))
    lab.start_daemon(narrow, far)
    wait_until("the link to be up", lambda: links(near)["h2"]["state"] == "up", 10, poll_s=0.05)
    wait_for_path(narrow.find("h1c1"), narrow.find("h2c1").address)


def test_links_show_rates(narrow: Topology):
    near = narrow.hosts[0]
    one, other = narrow.find("h1c1"), narrow.find("h2c1")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ping, one, other.address, "-s", "1000", count=300, interval_s=PING_INTERVAL_S)
        time.sleep(2.3)
        traffic = links(near)["h2"]["traffic"]
        running.result()
    for way in ("in", "out"):
        assert 20 <= traffic[f"{way}_frames_per_s"] <= 150
        assert traffic[f"{way}_bits_per_s"] >= traffic[f"{way}_frames_per_s"] * 8 * 900


@pytest.fixture(scope="module")
def line(make_lab: MakeLab) -> Topology:
    """Three hosts in a line: h1 and h3 have a link only to h2, the relay."""
    topology = make_lab(vms=0, hosts=3)
    for host, unlinked in zip(topology.hosts, ("h3", None, "h1"), strict=True):
        process.stop(host.file(".pid"))
        head, *tables = daemon.configuration(topology, host).split("[[link]]")
        if not unlinked:
            head = head.replace("learning = true", "learning = true\nrelay = true")
        kept = [table for table in tables if f'name = "{unlinked}"' not in table]
        host.file(".toml").write_text("[[link]]".join([head, *kept]))
        lab.start_daemon(topology, host)
    return topology


def test_a_relay_joins_hosts_that_have_no_link(line: Topology):
    ends = line.find("h1c1"), line.find("h3c1")
    assert [set(links(host)) for host in line.hosts] == [{"h2"}, {"h1", "h3"}, {"h2"}]
    for source, destination in (ends, ends[::-1]):
        wait_for_path(source, destination.address)
        assert reaches(source, destination.address, "-s", "8000")
    assert reaches(line.find("h2c1"), ends[0].address)
    assert_balanced(line)
