"""`vnet capture`: files for tcpdump and Wireshark, directions, drops with reasons, clients that stall or are killed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from capture_command import capturing, command, tcpdump
from checks import assert_balanced, ping, port, reaches, settled, wait_for_path
from conftest import PROGRAMS, MakeLab

from vnetlab import daemon, machine
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Topology

FRAMES = PROGRAMS / "mixed_frames.py"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Two hosts with a container each; without virtual machines, which take time to boot."""
    topology = make_lab(vms=0)
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


def tshark(file: Path, *fields: str) -> list[tuple[str, ...]]:
    """The given fields of each frame in a file, read by tshark."""
    options = [word for field in fields for word in ("-e", field)]
    return [tuple(row.split("\t")) for row in run(["tshark", "-r", str(file), "-T", "fields", *options]).splitlines()]


def test_tcpdump_and_wireshark_read_it(topology: Topology, tmp_path: Path):
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    file = tmp_path / "c.pcapng"
    with capturing(host, "h1c1", "-w", str(file), "icmp") as capture:
        assert ping(source, target.address, count=20) == (20, 20)
    assert capture.returncode == 0, capture.stderr.read()
    assert "40 frames captured, 0 missed" in capture.stderr.read()
    lines = tcpdump(file, "-e")
    requests = [line for line in lines if "echo request" in line]
    assert (len(requests), len(lines)) == (20, 40)
    assert all(f"{source.mac} > {target.mac}" in line and "length 98" in line for line in requests)
    sequence = [int(re.search(r"seq (\d+)", line)[1]) for line in requests]
    assert sequence == list(range(1, 21))
    assert set(tshark(file, "frame.interface_name", "frame.packet_flags_direction", "icmp.type")) == {
        ("interface h1c1", "0x00000001", "8"),
        ("interface h1c1", "0x00000002", "0"),
    }


def test_super_frames_are_whole(topology: Topology, tmp_path: Path):
    """TCP is carried in frames of up to 64 KB; the capture contains them unsegmented."""
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    file = tmp_path / "c.pcapng"
    before = port(settled(host), "link", "h2")["out_bytes"]
    server = ["ip", "netns", "exec", target.namespace, "iperf3", "-s", "-1"]
    with capturing(host, "link h2", "-s", "100", "-w", str(file), "tcp dst port 5201") as capture:
        listening = subprocess.Popen(server, stdout=subprocess.DEVNULL)
        time.sleep(0.3)
        machine.execute(source, "iperf3", "-c", target.address, "-n", "4M")
        listening.wait(10)
    lengths = [int(size) for line in tcpdump(file, "-e") if (size := re.search(r"length (\d+):", line)[1])]
    assert max(lengths) > 9000
    assert " 0 missed" in capture.stderr.read()
    # The counters include a few frames of other protocols.
    sent = port(settled(host), "link", "h2")["out_bytes"] - before
    assert 0.99 * sent <= sum(lengths) <= sent
    assert sent > 1 << 20
    assert all(len(packet) <= 100 for packet in packets(file))


def packets(file: Path) -> list[bytes]:
    """The captured bytes of each frame, from tcpdump's hexadecimal dump."""
    found: list[bytes] = []
    for line in run(["tcpdump", "-nr", str(file), "-xx"]).splitlines():
        if line.startswith("\t0x"):
            found[-1] += bytes.fromhex("".join(line.split(":", 1)[1].split()))
        else:
            found.append(b"")
    return found


def test_drops_have_reasons(topology: Topology, tmp_path: Path):
    host, source = topology.hosts[0], topology.find("h1c1")
    file = tmp_path / "drops.pcapng"
    stray = ["--src", source.mac, "--dst", "52:54:00:99:99:99", "--to", "interface h1c1"]
    index = str(json.loads(daemon.vnet(host, "--json", "route", "add", *stray))["index"])
    send = (
        "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(('eth0', 0));"
        f"f = bytes.fromhex('525400999999{source.mac.replace(':', '')}88b5') + bytes(46);"
        "[s.send(f) for _ in range(5)]"
    )
    try:
        with (
            capturing(host, "any", "--drops", "--count", "5", "-w", str(file), "ether proto 0x88b5"),
            capturing(host, "h1c1", "--drops", "--filter", "ether proto 0x88b5", "--json") as shown,
        ):
            machine.execute(source, "python3", "-c", send)
        lines = [json.loads(line) for line in shown.stdout.read().splitlines()]
        assert [(line["dropped"], line["at"], line["direction"]) for line in lines] == [
            ("hairpin", "interface h1c1", "in")
        ] * 5
        assert len(tcpdump(file)) == 5
        assert file.read_bytes().count(b"dropped: hairpin: The only destination is the ingress") == 5
        comments = [comment for (comment,) in tshark(file, "frame.comment")]
        assert len(comments) == 5
        assert all(comment.startswith("dropped: hairpin") for comment in comments)
    finally:
        daemon.vnet(host, "route", "del", index)


def test_text_lines_and_a_count(topology: Topology):
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    with capturing(host, "interface h1c1", "--count", "4", "icmp") as capture:
        assert reaches(source, target.address)
        capture.wait(10)
    assert capture.returncode == 0
    lines = capture.stdout.read().splitlines()
    echo = rf"{source.mac} > {target.mac}, IP {source.address} > {target.address}, ICMP echo request id \d+ seq 1"
    assert re.fullmatch(rf"\d\d:\d\d:\d\d\.\d{{6}} interface h1c1 in  {echo}, length 98", lines[0]), lines
    assert len(lines) == 4
    assert "4 frames captured, 0 missed" in capture.stderr.read()


def test_captures_can_be_piped(topology: Topology):
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    line = (
        " ".join(command(host, "h1c1", "-w", "-", "--count", "6", "icmp")) + " 2>/dev/null | tcpdump -nr - 2>/dev/null"
    )
    pipe = subprocess.Popen(line, shell=True, stdout=subprocess.PIPE, text=True)
    time.sleep(0.5)
    assert reaches(source, target.address)
    assert len(pipe.communicate(timeout=60)[0].splitlines()) == 6


def test_bad_captures_are_refused(topology: Topology):
    host = topology.hosts[0]
    for arguments, word in {
        ("nowhere",): "there is no interface or link 'nowhere'",
        ("link h1c1",): "there is no",
        ("h1c1", "tcpp"): "'tcpp' is not a primitive",
        ("h1c1", "--snap", "5"): "snap length 5",
    }.items():
        with pytest.raises(LabError, match="status 1") as refusal:
            run(command(host, *arguments))
        assert word in str(refusal.value)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(capturing(host, "any", "vlan"))
        with pytest.raises(LabError, match="4 captures are under way"):
            run(command(host, "any"))


def test_stalled_and_killed_clients_block_nobody(topology: Topology):
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    with capturing(host, "any", "-w", "-") as stalled, capturing(host, "any", "-w", "-") as killed:
        os.kill(stalled.pid, signal.SIGSTOP)
        killed.kill()
        killed.wait(10)
        # Far more than buffers and pipe can hold.
        burst = [str(FRAMES), "eth0", "60000", target.mac]
        machine.execute(source, "python3", *burst)
        # The rest of the burst may still fill the target's queue, so a single ping can be lost.
        wait_for_path(source, target.address, 60)
        os.kill(stalled.pid, signal.SIGCONT)
        stalled.stdout.close()
    with capturing(host, "h1c1", "--count", "2", "icmp") as capture:
        assert reaches(source, target.address)
        capture.wait(10)
    assert capture.returncode == 0
    ended = lambda: "capture ended, 0 under way" in host.file(".log").read_text().splitlines()[-1]  # noqa: E731
    wait_until("all captures to end", ended, 10)
    assert_balanced(topology)
