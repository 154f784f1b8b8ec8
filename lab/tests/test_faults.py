"""Faults of the network and attacks: loss and reordering, flapping links, floods, clocks that jump."""

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import doctor, links, metrics, ping, pinging, port, reaches, settled, wait_for_path
from conftest import PROGRAMS, MakeLab

from vnetlab import daemon, lab, machine, process
from vnetlab.run import run, wait_until
from vnetlab.topology import PORT, Node, Topology

WIRE_PORTS = (9101, 9102)
DATAGRAMS = 4000
FRAGMENTS = 6
"""A frame of 8042 bytes with its offload metadata, in datagrams of 1456 bytes."""
FAULTS_PERMILLE = 50
FLAPS = 1000
HOUR_S = 3600
REKEY_S = 2
FLOOD_PER_S = 20_000
FLOOD_S = 5
REASSEMBLY_LINK_BYTES = 4 << 20
"""Reassembly memory of one link."""


def wait_up(host: Node, name: str) -> None:
    wait_until(f"{host.name}'s link {name} to be up", lambda: links(host)[name]["state"] == "up", 15)


def rewrite(topology: Topology, host: Node, *changes: tuple[str, str], without: str = "") -> None:
    """Restarts a host's vnetd with replacements in its configuration, and without the link `without`."""
    process.stop(host.file(".pid"))
    head, *tables = daemon.configuration(topology, host).split("[[link]]")
    text = "[[link]]".join([head, *(table for table in tables if f'name = "{without}"' not in table)])
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    host.file(".toml").write_text(text)
    lab.start_daemon(topology, host)


def memory_bytes(host: Node) -> int:
    """Resident memory of a host's vnetd, in bytes."""
    status = Path(f"/proc/{process.find(host.file('.pid'))}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Three hosts with links in clear text and large frames; h3 is the attacker, or runs the faulty wire."""
    return make_lab(vms=0, hosts=3, mtu=9000)


@pytest.fixture
def faulty(topology: Topology) -> Path:
    """Runs a faulty wire on h3 between the two other hosts; returns the file that holds its counts after its end."""
    near, far, middle = topology.hosts
    process.stop(middle.file(".pid"))
    log = middle.file(".wire.log")
    ends = [f"{number},{host.address}" for number, host in zip(WIRE_PORTS, (near, far), strict=True)]
    faults = ",".join([str(FAULTS_PERMILLE)] * 3)
    words = ["python3", str(PROGRAMS / "faulty_wire.py"), *ends, faults, "7"]
    process.start(machine.namespace_command(middle, words), middle.file(".wire"), log)
    wait_until("the wire to be ready", lambda: "ready" in log.read_text(), 5)
    for host, peer, number in ((near, far, WIRE_PORTS[0]), (far, near, WIRE_PORTS[1])):
        change = (f'"{peer.address}:{PORT}"', f'"{middle.address}:{number}"')
        rewrite(topology, host, change, without=middle.name)
    return log


def test_frame_loss_follows_datagram_loss_and_nothing_is_corrupted(topology: Topology, faulty: Path):
    near, far, middle = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(one, other.address)
    script, taken = ["python3", str(PROGRAMS / "udp_integrity.py")], other.file(".taken")
    taking = machine.namespace_command(other, [*script, "take", str(DATAGRAMS)])
    process.start(taking, other.file(".taking"), taken)
    wait_until("the receiver to be ready", lambda: "ready" in taken.read_text(), 10)
    before = port(daemon.ask(far, "stats"), "link", near.name)
    machine.execute(one, *script, "send", str(DATAGRAMS), other.address)
    wait_until("the receiver to end", lambda: len(taken.read_text().split()) == 4, 10)
    came, again, wrong = map(int, taken.read_text().split()[1:])
    assert (again, wrong) == (0, 0), "duplicated or corrupted datagrams"
    # The reassembly timeout is 0.2 s; an idle dispatcher checks for it once a second.
    time.sleep(1.5)
    after = port(daemon.ask(far, "stats"), "link", near.name)
    process.stop(middle.file(".wire"))
    did = json.loads(faulty.read_text().splitlines()[-1])
    # Compared with the frames that the receiver's core saw: a busy machine's sockets may lose further datagrams.
    begun = after["in_frames"] - before["in_frames"]
    dropped = after["drops"]["reassembly"] - before["drops"]["reassembly"]
    expected = 1 - (1 - FAULTS_PERMILLE / 1000) ** FRAGMENTS
    lost = dropped / begun
    assert 0.9 * expected < lost < 1.1 * expected, f"{lost:.3f}, not {expected:.3f}: {did}, {before}, {after}"
    assert 0.9 * DATAGRAMS < came + dropped <= DATAGRAMS + 100, f"{came} came, {dropped} were dropped"
    assert min(did["lost"], did["repeated"], did["delayed"]) > 0.04 * did["carried"]


def test_a_flood_of_first_fragments_fills_its_own_links_memory_only(topology: Topology):
    near, far, evil = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for host in (near, far):
        rewrite(topology, host)
    process.stop(evil.file(".pid"))
    wait_for_path(other, one.address)
    assert reaches(other, one.address, "-s", "8000")
    before = memory_bytes(near)
    words = ["python3", str(PROGRAMS / "bridge_attacks.py"), "fragments", near.address, str(FLOOD_PER_S), str(FLOOD_S)]
    with ThreadPoolExecutor() as pool:
        flooding = pool.submit(machine.execute, evil, *words)
        time.sleep(0.5)
        # Large pings need reassembly as well.
        sent, answered = ping(other, one.address, "-s", "8000", count=200, interval_s=0.01)
        grown = memory_bytes(near) - before
        assert not flooding.done(), "the flood ended before the traffic did"
        assert int(flooding.result()) > FLOOD_PER_S
    assert answered >= 0.95 * sent, f"{answered} of {sent} answered"
    counted = daemon.ask(near, "stats")
    assert port(counted, "link", evil.name)["discards"]["memory_limit"] > 0, "no memory limit reached"
    assert port(counted, "link", far.name)["discards"]["memory_limit"] == 0, "another link lost frames to the limit"
    assert grown < 8 * REASSEMBLY_LINK_BYTES, f"{grown >> 20} MB more"
    assert settled(near)["balance"]["in"] > 0


def test_one_mac_address_on_two_hosts_is_told_on_both(topology: Topology):
    near, far, _ = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    daemon.vnet(
        far,
        *f"interface add twin --kind tap --device twin --netns {other.namespace} --mac {one.mac} --mtu 1500".split(),
    )
    run(["ip", "-n", other.namespace, "address", "add", "10.98.0.1/24", "dev", "twin"])

    def told(host: Node, here: str, there: str) -> bool:
        machine.attempt(other, "ping -c 1 -W 0.1 10.98.0.2")
        machine.attempt(one, "ping -c 1 -W 0.1 10.77.250.250")
        twice = daemon.ask(host, "status").get("duplicate_addresses", [])
        return [(known["mac"], known["at"], known["also"]) for known in twice] == [(one.mac, here, there)]

    for host, here, there in ((near, "interface h1c1", "link h2"), (far, "interface twin", "link h1")):
        wait_until(f"{host.name} to tell", lambda host=host, here=here, there=there: told(host, here, there), 60)
        assert f"use {one.mac}: one at {here}, one at {there}" in doctor(host)
        assert f"two stations use one MAC address, at {here} and at {there}" in host.file(".log").read_text()
    daemon.vnet(far, "interface", "del", "twin")
    assert "duplicate_addresses" not in daemon.ask(far, "status"), "what is gone is in conflict with nobody"


def test_two_hosts_of_one_name_notice_each_other(topology: Topology):
    near, far, _ = topology.hosts
    rewrite(topology, far, ('name = "h1"', 'name = "peer"'), ('name = "h2"', 'name = "h1"'))
    try:
        for host, link in ((near, "h2"), (far, "peer")):
            reason = lambda host=host, link=link: links(host)[link].get("reason", "")  # noqa: E731
            wait_until(f"{host.name} to notice", lambda reason=reason: "has this host's name" in reason(), 60)
            assert links(host)[link]["state"] == "degraded"
            assert "has this host's name" in doctor(host)
        wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    finally:
        rewrite(topology, far)
    wait_up(near, "h2")


@pytest.fixture(scope="module")
def sealed(make_lab: MakeLab) -> Topology:
    """Three hosts as in `topology`, with sealed links that rekey every two seconds."""
    topology = make_lab(vms=0, hosts=3, sealed=True)
    for host in topology.hosts[:2]:
        rewrite(topology, host, ("[bridge]\n", f"[bridge]\nrekey_s = {REKEY_S}\n"))
    process.stop(topology.hosts[2].file(".pid"))
    wait_up(topology.hosts[0], "h2")
    wait_up(topology.hosts[1], "h1")
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


def test_a_syn_flood_from_spoofed_addresses(sealed: Topology):
    near, _, evil = sealed.hosts
    one, other = sealed.find("h1c1"), sealed.find("h2c1")
    # Route answers to spoofed addresses to h3, which sends no reset for them.
    run(["ip", "-n", near.namespace, "route", "add", "198.18.0.0/15", "via", evil.address])
    words = ["python3", str(PROGRAMS / "bridge_attacks.py"), "syns", near.address, "eth0"]
    ages = []
    with ThreadPoolExecutor() as pool:
        flooding = pool.submit(machine.execute, evil, *words)
        time.sleep(0.5)
        with pinging((one, other), (other, one), interval_s=0.01, seconds=6):
            for _ in range(10):
                ages.append(links(near)["h2"]["keys_s"])
                time.sleep(0.5)
        spent, answered, sent = map(int, flooding.result().split())
    assert sent > 10_000
    assert 0 < answered <= 3 * spent, f"{answered} bytes answered {spent}"
    assert max(ages) <= REKEY_S + 2, f"no rekey meanwhile: {ages}"


def test_a_thousand_flaps_under_traffic(sealed: Topology, tmp_path: Path):
    near, far, _ = sealed.hosts
    one, other = sealed.find("h1c1"), sealed.find("h2c1")
    flaps = tmp_path / "flaps"
    flaps.write_text("link set eth0 down\nlink set eth0 up\n" * FLAPS)

    def open_files() -> int:
        return len(os.listdir(f"/proc/{process.find(near.file('.pid'))}/fd"))

    before = open_files()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ping, one, other.address, count=500, interval_s=0.02)
        run(["ip", "-n", near.namespace, "-batch", str(flaps)], timeout_s=120)
        running.result()
    wait_up(near, "h2")
    wait_up(far, "h1")
    wait_for_path(one, other.address)
    with pinging((one, other), seconds=1):
        pass
    wait_until("descriptors to be closed", lambda: open_files() <= before + 4, 10)
    for host in (near, far):
        assert settled(host)["balance"]["in"] > 0


class Clock:
    """A settable wall clock for one host's vnetd."""

    def __init__(self, topology: Topology, host: Node, folder: Path) -> None:
        self.topology, self.host = topology, host
        self.library, self.file = folder / "clock.so", folder / "ahead"
        run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(self.library), str(PROGRAMS / "settable_clock.c")])
        self.file.write_bytes(bytes(64))
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Sets the clock to `seconds` ahead of the true time. Writes the file in place, because it is mapped."""
        with self.file.open("r+b") as opened:
            opened.write(f"{seconds}\n".encode().ljust(64, b"\0"))

    def restart(self) -> None:
        """Restarts the host's vnetd with the settable clock."""
        process.stop(self.host.file(".pid"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(self.library))
            patch.setenv("CLOCK_AHEAD", str(self.file))
            lab.start_daemon(self.topology, self.host)


@pytest.fixture
def clock(sealed: Topology, tmp_path: Path) -> Iterator[Clock]:
    """The clock of h1's vnetd."""
    near = sealed.hosts[0]
    clock = Clock(sealed, near, tmp_path)
    clock.restart()
    wait_up(near, "h2")
    yield clock
    process.stop(near.file(".pid"))
    lab.start_daemon(sealed, near)


def test_a_clock_that_jumps_an_hour_changes_nothing(sealed: Topology, clock: Clock):
    near = sealed.hosts[0]
    one, other = sealed.find("h1c1"), sealed.find("h2c1")
    ages = []
    with pinging((one, other), (other, one), seconds=8):
        for seconds in (HOUR_S, -HOUR_S, 0):
            clock.jump(seconds)
            for _ in range(4):
                time.sleep(0.6)
                ages.append(links(near)["h2"]["keys_s"])
                assert links(near)["h2"]["state"] == "up"
    assert max(ages) <= REKEY_S + 2, f"no rekey meanwhile: {ages}"
    # Datagram numbers start at the clock: after this they are an hour behind the numbers that the peer has seen.
    clock.jump(-HOUR_S)
    clock.restart()
    wait_up(near, "h2")
    wait_for_path(one, other.address)


def test_certificates_expire_by_the_clock(sealed: Topology, clock: Clock):
    near, far, _ = sealed.hosts
    clock.jump(100 * 365 * 24 * HOUR_S)
    wait_until("the reason to be shown", lambda: "certificate ended" in links(near)["h2"].get("reason", ""), 40)
    assert links(near)["h2"]["state"] != "up"
    assert (links(near)["h2"]["certificate_s"], daemon.ask(near, "status")["certificate_s"]) == (0, 0)
    for host in (near, far):
        assert f'vnet_certificate_expiry_seconds{{host="{host.name}"}} 0\n' in metrics(near)
    assert 'vnet_link_up{link="h2"} 0\n' in metrics(near)
    assert re.search(r"PROBLEM +certificates +the certificate of h[12] has ended", doctor(near))
    assert "certificate of h2 has ended" in daemon.vnet(near, "link", "list")
    # The side with the right clock also logs the reason.
    wait_until("the other side to log it", lambda: "expired" in far.file(".log").read_text(), 10)
    clock.jump(0)
    wait_up(near, "h2")
