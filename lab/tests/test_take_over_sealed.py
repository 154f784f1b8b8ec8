"""`vnetd --take-over` of hosts with sealed links: their sessions go on, without a lost frame and without a handshake.

VNET_TEST_TAKE_OVERS=100 runs the long test.
"""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checks import assert_balanced, link, pinging, reaches, wait_for_path, wait_for_state
from conftest import PROGRAMS, MakeLab
from rdma_perf import measured
from sealed_links import hang_up, underlay_capture
from take_overs import assert_none_lost_between, both, counters, peer, take_over

from vnetlab import daemon, machine, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology

TAKE_OVERS = int(os.environ.get("VNET_TEST_TAKE_OVERS", "4"))
HALF = PROGRAMS / "half_heir.py"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Two hosts with a sealed link, which rekeys every hour."""
    topology = make_lab(vms=0, sealed=True)
    for host in topology.hosts:
        wait_for_state(host, "up")
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


def logged(host: Node) -> str:
    return host.file(".log").read_text()


def epochs(log: str) -> list[str]:
    """Epochs of the sessions with which links came up, in order."""
    return re.findall(r"sealed with \S+ \(certificate \S+, epoch (\d)\)", log)


@contextmanager
def streaming(source: Node, destination: Node, number: int) -> Iterator[None]:
    """A UDP stream from one container to another while the context lasts."""
    at = str(5300 + number)
    server = machine.namespace_command(destination, ["iperf3", "-s", "-1", "-p", at])
    process.start(server, destination.file(f".iperf{at}.pid"), destination.file(f".iperf{at}.log"))
    listens = ["ss", "-Hltn", f"sport = :{at}"]
    wait_until("iperf3 to listen", lambda: machine.execute(destination, *listens) != "", 20)
    words = ["iperf3", "-u", "-c", destination.address, "-p", at, "-b", "10M", "-l", "1000", "-t", "3600"]
    with subprocess.Popen(machine.namespace_command(source, words), stdout=subprocess.DEVNULL) as client:
        try:
            yield
            assert client.poll() is None, "the stream goes on"
        finally:
            client.send_signal(signal.SIGINT)


def test_sessions_go_on_without_a_lost_frame(topology: Topology):
    """Take-overs of both hosts under pings and UDP in both directions."""
    one, other = topology.find("h1c1"), topology.find("h2c1")
    before = both(topology)
    first = {host.name: (logged(host), link(host)["keys_s"]) for host in topology.hosts}
    begin = time.monotonic()
    with streaming(one, other, 1), streaming(other, one, 2), pinging((one, other), (other, one), seconds=3):
        for number in range(TAKE_OVERS):
            take_over(topology, topology.hosts[number % 2])
            time.sleep(0.3)
    took_s = time.monotonic() - begin
    assert_none_lost_between(topology, before)
    for host in topology.hosts:
        log, keys_s = first[host.name]
        assert link(host)["keys_s"] >= keys_s + int(took_s), "no handshake since"
        news = logged(host)[len(log) :]
        assert set(epochs(news)) == {epochs(log)[-1]}
        assert "no keys" not in news
        assert link(host)["state"] == "up"
    assert_balanced(topology)


def test_keys_are_renewed_after_a_take_over(topology: Topology):
    """Both the side that connects and the one that accepts have the next handshake after a take-over."""
    one, other = topology.find("h1c1"), topology.find("h2c1")
    before = both(topology)
    with pinging((one, other), (other, one), seconds=3):
        for host in topology.hosts:
            take_over(topology, host)
            age_s = link(host)["keys_s"]
            daemon.issue(topology, host)
            hang_up(host)
            wait_until("new keys", lambda host=host, age_s=age_s: link(host)["keys_s"] < age_s, 10)
            take_over(topology, peer(topology, host))
            # A second passes, so that keys have an age to compare.
            time.sleep(1.5)
    assert_none_lost_between(topology, before)
    for host in topology.hosts:
        assert link(host)["state"] == "up"
    assert_balanced(topology)


def datagrams(capture: bytes, source: Node) -> list[bytes]:
    """UDP datagrams, with IP headers, that a host has sent from port 9000; of a capture of an Ethernet device."""
    found, at = [], 24
    while at + 16 <= len(capture):
        (length,) = struct.unpack_from("<I", capture, at + 8)
        packet = capture[at + 16 : at + 16 + length]
        at += 16 + length
        header = packet[14:]
        if packet[12:14] == b"\x08\x00" and header[9] == 17 and header[12:16] == socket.inet_aton(source.address):
            found.append(header)
    return [header for header in found if header[20:22] == struct.pack("!H", 9000)]


REPLAY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
    for line in open(sys.argv[2]):
        raw.sendto(bytes.fromhex(line), (sys.argv[1], 0))
"""


def test_old_datagrams_are_refused_after_a_take_over(topology: Topology, tmp_path: Path):
    """The replay windows go on: what the vnetd before has opened, the new one does not open again."""
    near, far = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    with underlay_capture(far) as seen:
        assert reaches(one, other.address)
        machine.execute(other, "ping", "-n", "-q", "-c", "100", "-i", "0.01", one.address)
    # Without checksum (RFC 768): those of captured datagrams are left to the device.
    old = [datagram[:26] + b"\0\0" + datagram[28:] for datagram in datagrams(seen[0], far)]
    assert len(old) > 100
    take_over(topology, near)
    before = counters(topology, near)
    file = tmp_path / "old"
    file.write_text("\n".join(datagram.hex() for datagram in old))
    machine.execute(far, "python3", "-c", REPLAY, near.address, str(file))

    def replayed() -> int:
        return counters(topology, near)["discards"]["replayed"] - before["discards"]["replayed"]

    wait_until("all of them to be refused", lambda: replayed() >= len(old), 10)
    after = counters(topology, near)
    assert replayed() == len(old)
    assert after["discards"]["forged"] == before["discards"]["forged"]
    frames = counters(topology, far)["out_frames"]
    assert after["in_frames"] <= frames, "none was opened twice"


def test_applications_keep_their_keys(topology: Topology):
    """Applications across the link derive keys from the session that goes on."""
    near, far = topology.find("h1c1"), topology.find("h2c1")
    take_over(topology, topology.hosts[0])
    wait_for_path(near, far.address)
    assert measured(near, far, seconds="1,0.01", size=16_384)["attachment"] == "sealed"


@pytest.mark.parametrize(
    ("step", "how", "same"),
    [
        ("estate", "refuses", True),
        ("prepared", "hangs", True),
        ("last", "dies", True),
        ("last", "hangs", True),
        ("last", "refuses", True),
        ("last", "nonsense", False),
        ("begins", "dies", False),
        ("begins", "hangs", False),
    ],
)
def test_a_new_vnetd_that_fails_is_survived(topology: Topology, step: str, how: str, same: bool):
    """Keys that the new vnetd cannot have used go on; all others are replaced by a handshake."""
    host = topology.hosts[0]
    one, other = topology.find("h1c1"), topology.find("h2c1")
    for each in topology.hosts:
        wait_for_state(each, "up", 20)
    time.sleep(2)
    log, begin = host.file(".log"), len(logged(host))
    before, keys_s, at = counters(topology, host), link(host)["keys_s"], time.monotonic()
    command = [sys.executable, str(HALF), f"{host.file('.sock')}.take-over", step, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as half:
        assert half.stdout.readline() == "half\n"
        wait_until("the running vnetd to go on", lambda: "this vnetd goes on" in logged(host)[begin:], 20, log)
        half.kill()
    wait_for_state(host, "up", 20)
    wait_for_path(one, other.address, 20)
    passed_s = int(time.monotonic() - at)
    assert ("sealed links get new keys" in logged(host)[begin:]) == (not same)
    if same:
        # The other host agrees on new keys if it hears nothing for two seconds.
        assert how == "hangs" or link(host)["keys_s"] >= keys_s + passed_s, "no handshake since"
        with pinging((one, other), (other, one), seconds=1):
            pass
    else:
        assert link(host)["keys_s"] <= passed_s, "new keys"
    after = counters(topology, host)
    assert after["discards"]["forged"] == before["discards"]["forged"]
    assert_balanced(topology)
    take_over(topology, host)
