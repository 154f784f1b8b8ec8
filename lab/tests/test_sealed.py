"""Sealed links: an underlay without clear text, rekeying and new certificates under traffic, revocation."""

import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import (
    TOO_BIG,
    assert_balanced,
    link,
    logged_after,
    pinging,
    port,
    reaches,
    readdressed,
    silent,
    wait_for_path,
    wait_for_state,
)
from conftest import MakeLab
from rdma_perf import measured, perf_server
from sealed_links import assert_hidden, hang_up, underlay_capture

from vnetlab import daemon, lab, machine, process
from vnetlab.daemon import REPOSITORY
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Topology

DISSECTOR = REPOSITORY / "wireshark" / "vnet.lua"
FROM_PROGRAM = "udp.port == 7000 && !icmp"
"""What programs of the interconnect send, without what the kernel answers to a closed port."""


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """A lab with sealed links that rekey every two seconds."""
    topology = make_lab(vms=0, sealed=True)
    for host in topology.hosts:
        file = host.file(".toml")
        file.write_text(file.read_text().replace("[bridge]\n", "[bridge]\nrekey_s = 2\n"))
        process.stop(host.file(".pid"))
        lab.start_daemon(topology, host)
    for host in topology.hosts:
        wait_for_state(host, "up")
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


def test_the_underlay_shows_no_clear_text(topology: Topology):
    assert_hidden(topology)


def test_tcp_and_large_pings_cross(topology: Topology):
    one, other = topology.find("h1c1"), topology.find("h2c1")
    server = machine.namespace_command(other, ["iperf3", "-s", "-1", "--forceflush"])
    process.start(server, other.file(".iperf.pid"), other.file(".iperf.log"))
    wait_until("iperf3 to listen", lambda: "listening" in other.file(".iperf.log").read_text(), 5)
    text = machine.execute(one, "iperf3", "-c", other.address, "-t", "1", "-f", "m")
    assert re.search(r"[1-9]\d+ Mbits/sec.*receiver", text), text
    assert reaches(one, other.address, "-s", "60000")


def test_rekeying_under_traffic_loses_no_frame(topology: Topology):
    one, other = topology.find("h1c1"), topology.find("h2c1")
    ages = []
    with pinging((one, other), (other, one), seconds=6):
        for _ in range(8):
            ages.append(link(topology.hosts[0])["keys_s"])
            time.sleep(0.6)
    assert ages != sorted(ages), f"no rekey: {ages}"
    assert max(ages) <= 4


def test_applications_seal_what_they_exchange(topology: Topology, tmp_path: Path):
    """Across a sealed link the interconnect shows nothing inside the overlay, either. The link rekeys meanwhile."""
    near, far = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(near, far.address)
    with underlay_capture(topology.hosts[0]) as outside, underlay_capture(near) as inside:
        figures = measured(near, far, seconds="5,0.01", size=65_536)
    assert figures["attachment"] == "sealed"
    files = [tmp_path / "outside.pcap", tmp_path / "inside.pcap"]
    for file, seen in zip(files, (outside, inside), strict=True):
        file.write_bytes(seen[0])
        # The program writes zeros.
        assert bytes(64) not in seen[0], file.name
    # Wireshark has another protocol for this port.
    words = ["tshark", "-X", f"lua_script:{DISSECTOR}", "-d", "udp.port==7000,vnet_rdma", "-r", str(files[1])]
    words += ["-Y", FROM_PROGRAM, "-T", "fields"]
    fields = ["-e", "udp.payload", "-e", "vnet_rdma.kind", "-e", "vnet_rdma.seal.last", "-e", "vnet_rdma.seal.kind"]
    fields += ["-e", "vnet_rdma.seal.number"]
    lines = [line.split("\t") for line in run([*words, *fields]).splitlines()]
    assert len(lines) > 1000
    assert {payload[0] for payload, *_ in lines} == {"2"}, "every packet is one of sealing"
    assert {kind for _, kind, *_ in lines} == {""}, "none is in clear text"
    assert {last for *_, last, _, _ in lines} >= {"0", "10"}, "large transfers are sealed in packets of eleven parts"
    assert {kind for *_, kind, _ in lines} == {"0", "1", "2"}, "encrypted packets, and one handshake"
    assert sum(kind == "2" for *_, kind, _ in lines) < 4, "the link's rekeying does not end sessions"


def test_applications_that_want_clear_text_get_it_only_from_each_other(topology: Topology):
    near, far = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(near, far.address)
    off = ("env", "VNET_RDMA_SEAL=off")
    with perf_server(far, *off) as name:
        words = machine.execute(near, *off, "vnet-rdma-perf", "client", name, "8", "0.1", timeout_s=120)
        assert "attachment udp" in words
    with perf_server(far) as name:
        code, text = machine.attempt(near, *off, "vnet-rdma-perf", "client", name, "8", "0.1")
        assert code != 0
        assert f"{far.address}:7000 takes only sealed packets: unset VNET_RDMA_SEAL" in text
        machine.execute(near, "vnet-rdma-perf", "client", name, "8", "0.1", timeout_s=120)


def test_raw_ethernet_is_refused_where_a_link_is_sealed(topology: Topology):
    """Applications cannot seal it; who wants it nevertheless has what links seal, between hosts."""
    near, far = topology.find("h1c1"), topology.find("h2c1")
    server, name = "ether://eth0:7000", f"ether://{far.mac.replace(':', '-')}:7000/0"
    status, text = machine.attempt(far, "vnet-rdma-perf", "server", server, "once")
    assert (status, text.count("\n")) == (1, 1), text
    assert "cannot use Ethernet device eth0: a link of this host is sealed" in text
    wait_for_path(near, far.address)
    off = ["env", "VNET_RDMA_SEAL=off", "vnet-rdma-perf"]
    words = machine.namespace_command(far, ["timeout", "120", *off, "server", server, "once"])
    with (
        subprocess.Popen(words, env=machine.environment(far), stdout=subprocess.PIPE, text=True) as serving,
        underlay_capture(topology.hosts[0]) as seen,
    ):
        assert serving.stdout.readline().strip() == name
        client = [*off, "client", "from", "ether://eth0:0", name, "16384", "0.1"]
        assert "attachment ethernet" in machine.execute(near, *client, timeout_s=120)
        assert serving.wait(60) == 0
    assert len(seen[0]) > 16_384, "the frames were captured"
    # The program writes zeros.
    assert bytes(64) not in seen[0], "between hosts, links seal the frames"
    assert b"vrde" not in seen[0]


def test_certificates_are_replaced_under_traffic(topology: Topology):
    one, other = topology.find("h1c1"), topology.find("h2c1")
    with pinging((one, other), seconds=4):
        for host in topology.hosts:
            daemon.issue(topology, host)
            hang_up(host)
            time.sleep(1)
    for host in topology.hosts:
        assert link(host)["state"] == "up"
        assert "identity read again" in host.file(".log").read_text()


def test_a_killed_peer_is_detected_within_a_second_and_comes_back(topology: Topology):
    near, far = topology.hosts
    pid = process.find(far.file(".pid"))
    assert pid
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    wait_for_state(near, "down")
    assert logged_after(near, "link h2: down", killed) < 1.3, "one second, and the delays of a busy machine"
    assert "h2" in link(near)["reason"]
    process.stop(far.file(".pid"))
    lab.start_daemon(topology, far)
    wait_for_state(near, "up")
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    assert link(near)["rtt_us"] > 0


def test_a_peer_that_moved_is_found_after_a_restart(topology: Topology):
    """The configured address is out of date: the certificate identifies the connecting host."""
    near, far = topology.hosts
    with readdressed(far) as address:
        wait_until("the link to follow", lambda: link(near)["remote"] == f"{address}:9000", 10)
        process.stop(near.file(".pid"))
        lab.start_daemon(topology, near)
        wait_for_path(topology.find("h1c1"), topology.find("h2c1").address, 60)
        assert link(near)["remote"] == f"{address}:9000"
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address, 60)


def test_clear_text_from_the_peer_is_refused(topology: Topology):
    near, far = topology.hosts
    process.stop(far.file(".pid"))
    before = port(daemon.ask(near, "stats"), "link", far.name)["discards"]["seal_required"]
    send = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('0.0.0.0', 9000));"
        f"[s.sendto(b'\\x10\\x01\\0\\0\\0\\0\\x01\\0' + n.to_bytes(8, 'big') + bytes(60), ('{near.address}', 9000))"
        " for n in range(1, 101)]"
    )
    machine.execute(far, "python3", "-c", send)

    def counted() -> bool:
        return port(daemon.ask(near, "stats"), "link", far.name)["discards"]["seal_required"] == before + 100

    wait_until("all datagrams to be counted", counted, 5)
    lab.start_daemon(topology, far)
    wait_for_state(near, "up")


def test_a_certificate_limits_macs_and_networks(topology: Topology):
    near, far = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(one, other.address)
    daemon.issue(topology, far, "--macs", "52:54:00:00:00:77")
    hang_up(far)
    wait_until("frames from an address outside the certificate to be dropped", lambda: silent(one, other.address), 10)
    assert port(daemon.ask(near, "stats"), "link", far.name)["drops"]["bad_source"] > 0
    daemon.issue(topology, far, "--macs", other.mac, "--networks", "1")
    hang_up(far)
    wait_for_path(one, other.address)


def test_a_revoked_peer_is_refused(topology: Topology):
    near, far = topology.hosts
    folder = str(daemon.keys(topology))
    text = run([str(daemon.binaries() / "vnet"), "keys", "revoke", far.name, "--dir", folder])
    assert "revoked" in text
    wait_until("the reason to be shown", lambda: "revoked" in link(near).get("reason", ""), 5, poll_s=0.05)
    assert link(near)["state"] == "down"
    assert silent(topology.find("h1c1"), topology.find("h2c1").address)
    with pytest.raises(LabError, match="no certificate"):
        run([str(daemon.binaries() / "vnet"), "keys", "revoke", far.name, "--dir", folder])
    # Both sides log the reason.
    for host in topology.hosts:
        wait_until("the reason to be logged", lambda: "revoked" in host.file(".log").read_text(), 5)  # noqa: B023
    daemon.issue(topology, far)
    for host in topology.hosts:
        hang_up(host)
    wait_for_state(near, "up")
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    assert "revoked" in run([str(daemon.binaries() / "vnet"), "keys", "show", "--dir", folder])


def test_forged_icmp_does_not_change_the_path_mtu(topology: Topology):
    """Only the peer's answers to probes count: anybody can send ICMP."""
    near, far = topology.hosts
    one, other = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(one, other.address)
    mtu = link(near)["mtu"]
    machine.execute(far, "python3", "-c", TOO_BIG, far.address, near.address, "9000")
    route = ["ip", "route", "get", far.address]
    wait_until("the kernel to believe it", lambda: "mtu 1300" in machine.execute(near, *route), 5)
    for _ in range(5):
        assert reaches(one, other.address, "-s", "8000")
        assert link(near)["mtu"] == mtu
        # vnetd asks the kernel once a second.
        time.sleep(0.5)
    assert "mtu 1300" in machine.execute(near, *route), "the kernel still believes it"


SYN_FLOOD = """
import socket, struct, sys, time
address = socket.inet_aton(sys.argv[1])
def checksum(data):
    total = sum(struct.unpack(f'!{len(data) // 2}H', data))
    total = (total & 0xffff) + (total >> 16)
    return ~((total & 0xffff) + (total >> 16)) & 0xffff
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as s:
    for n in range(8000):
        source = address[:3] + bytes([100 + n % 100])
        tcp = struct.pack('!HHIIBBHHH', 1024 + n, 9000, n, 0, 0x50, 2, 65535, 0, 0)
        tcp = tcp[:16] + struct.pack('!H', checksum(source + address + struct.pack('!HH', 6, 20) + tcp)) + tcp[18:]
        s.sendto(struct.pack('!BBHHHBBH', 0x45, 0, 40, 0, 0, 64, 6, 0) + source + address + tcp, (sys.argv[1], 0))
        time.sleep(0.0005)
"""
"""Begins TCP connections to port 9000 from addresses of the underlay that nobody has."""


def test_keys_are_renewed_under_a_flood_of_forged_connections(topology: Topology):
    """The kernel answers by SYN cookies, which keep no state for addresses that may be forged."""
    near, far = topology.hosts
    wait_for_state(near, "up")
    command = machine.namespace_command(near, ["python3", "-c", SYN_FLOOD, far.address])
    ages = []
    with ThreadPoolExecutor() as pool:
        flood = pool.submit(run, command)
        while not flood.done():
            ages.append(link(near)["keys_s"])
            time.sleep(0.3)
        flood.result()
    assert ages != sorted(ages), f"no rekey: {ages}"
    names, values = [line.split() for line in machine.execute(far, "cat", "/proc/net/netstat").splitlines()[:2]]
    assert int(values[names.index("SyncookiesSent")]) > 0
    assert link(near)["state"] == "up"


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
