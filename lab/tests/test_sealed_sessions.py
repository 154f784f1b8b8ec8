"""Across sealed links, what applications have sealed takes the kernel's own path, and nothing else does."""

import itertools
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checks import assert_balanced, link, port, settled, wait_for_path, wait_for_state
from conftest import MakeLab
from rdma_perf import measured, perf_server, rdma_metric
from sealed_links import assert_hidden, underlay_capture

from vnetlab import daemon, lab, machine, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology

WIRE_PORT = 9789
BY_DAEMON = ("env", "VNET_RDMA_ATTACHMENT=daemon")
TAKES = "applications"
"""In the reason why frames of a sealed link do not take the kernel's path: what applications have sealed does."""
FORGER = """
import socket, sys
wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for frame in sys.argv[2:]:
    head = bytes.fromhex("0800000000000100")
    wire.sendto(head + bytes.fromhex(frame), (sys.argv[1], 9789))
"""
ETHERNET, IPV4, UDP = 14, 20, 8
VXLAN = ETHERNET + IPV4 + UDP + 8


def wait_for_wires(topology: Topology) -> None:
    """Waits until the wire of every host works."""
    for host in topology.hosts:
        wait_until(f"the wire of {host.name}", lambda host=host: TAKES in (link(host).get("path_reason") or ""), 60)


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """A lab with a sealed link, and containers with the kernel's path."""
    topology = make_lab(vms=0, sealed=True, container="veth", rdma=True)
    for host in topology.hosts:
        wait_for_state(host, "up")
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    wait_for_wires(topology)
    return topology


def sealed_flows(host: Node) -> list[dict]:
    """The installed flows of sealed datagrams."""
    return [flow for flow in daemon.ask(host, "flows") if flow.get("sealed") and flow["kernel_ms"]]


def refused(host: Node) -> int:
    """Frames in clear text that a host has dropped at its sealed link."""
    return port(daemon.ask(host, "stats"), "link", "h2")["discards"].get("seal_required", 0)


def handled(host: Node) -> int:
    """Frames that the dispatchers of a host have handled."""
    return sum(dispatcher["frames"] for dispatcher in daemon.ask(host, "stats")["dispatchers"])


def captured(capture: bytes) -> Iterator[bytes]:
    """The frames of a capture file."""
    at = 24
    while at + 16 <= len(capture):
        (length,) = struct.unpack_from("<I", capture, at + 8)
        yield capture[at + 16 : at + 16 + length]
        at += 16 + length


def on_wire(capture: bytes) -> list[bytes]:
    """The frames inside the wire's datagrams, but for trials, which belong to no network."""
    found = []
    for frame in captured(capture):
        is_udp = frame[12:14] == b"\x08\x00" and frame[23] == 17
        if is_udp and struct.unpack_from(">H", frame, ETHERNET + IPV4 + 2)[0] == WIRE_PORT and any(frame[46:49]):
            found.append(frame[VXLAN:])
    return found


def test_sealed_packets_take_the_wire(topology: Topology):
    near, far = topology.find("h1c1"), topology.find("h2c1")
    before = [handled(host) for host in topology.hosts]
    with underlay_capture(topology.hosts[0]) as seen:
        figures = measured(near, far, seconds="2,0.1", size=16_384)
    assert figures["attachment"] == "sealed"
    frames = on_wire(seen[0])
    assert len(frames) > 1000, "they took the wire"
    # The program writes zeros.
    assert bytes(64) not in seen[0]
    firsts = {(frame[23], frame[ETHERNET + IPV4 + UDP]) for frame in frames}
    assert firsts == {(17, 0x20)}, "every frame of the wire is a sealed packet"
    for host, earlier in zip(topology.hosts, before, strict=True):
        assert handled(host) - earlier < len(frames) / 4, "dispatchers of vnetd forward only the first ones"
    assert_balanced(topology)
    assert measured(near, far)["streams"] == "0", "bytes of streams are not sealed"


def test_frames_leave_by_the_sealed_link(topology: Topology):
    assert_hidden(topology)


@contextmanager
def transfer(near: Node, far: Node, seconds: str, *prefix: str) -> Iterator[Path]:
    """Runs the measuring program between two containers, the client's behind `prefix`; yields the file it prints to."""
    pid, log = near.file(".perf.pid"), near.file(".perf.log")
    log.unlink(missing_ok=True)
    with perf_server(far) as name:
        words = machine.namespace_command(near, [*prefix, "vnet-rdma-perf", "client", name, "16384", seconds])
        process.start(words, pid, log, machine.environment(near))
        try:
            yield log
            wait_until("the transfer to end", lambda: process.find(pid) is None, 120, log)
        finally:
            process.stop(pid)


def test_flows_end_with_the_application_and_come_back_after_a_restart(topology: Topology):
    near, far = topology.find("h1c1"), topology.find("h2c1")
    (one, _) = topology.hosts
    with transfer(near, far, "20,0.1") as log:
        for host in topology.hosts:
            wait_until(f"flows on {host.name}", lambda host=host: len(sealed_flows(host)) == 2, 30)
        pid = process.find(one.file(".pid"))
        os.kill(pid, signal.SIGKILL)
        wait_until("vnetd to be gone", lambda: process.find(one.file(".pid")) is None, 30)
        lab.start_daemon(topology, one)
        # The application meets the new vnetd, and opens a new session for it.
        wait_until("flows of the new vnetd", lambda: len(sealed_flows(one)) == 2, 60)
    text = log.read_text()
    assert "attachment sealed" in text, text
    assert "latency_us" in text, text
    for host in topology.hosts:
        wait_until(f"no flows on {host.name}", lambda host=host: not sealed_flows(host), 30)
    wait_for_wires(topology)


def frame(source: Node, destination: Node, ports: tuple[int, int], first: int) -> str:
    """A frame with a datagram between two containers, as hexadecimal digits."""
    payload = bytes([first]) + bytes(63)
    addresses = [bytes(map(int, node.address.split("."))) for node in (source, destination)]
    udp = struct.pack(">HHHH", *ports, UDP + len(payload), 0)
    ip = struct.pack(">BBHHHBBH", 0x45, 0, IPV4 + UDP + len(payload), 0, 0x4000, 64, 17, 0) + b"".join(addresses)
    total = sum(struct.unpack(">10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    ip = ip[:10] + struct.pack(">H", ~total & 0xFFFF) + ip[12:]
    macs = "".join(node.mac.replace(":", "") for node in (destination, source))
    return macs + "0800" + (ip + udp + payload).hex()


def test_what_comes_by_the_wire_and_is_no_sessions_is_dropped(topology: Topology):
    """The underlay is the attacker's: datagrams of the wire are not authenticated."""
    near, far = topology.find("h1c1"), topology.find("h2c1")
    one, two = topology.hosts
    with transfer(near, far, "15,0.1") as log:
        wait_until("flows", lambda: len(sealed_flows(one)) == 2, 30)
        (inbound,) = (flow for flow in sealed_flows(one) if flow["from"].startswith("link"))
        source, destination = (int(end.rsplit(":", 1)[1]) for end in inbound["sealed"].split(" > "))
        # Between the session's ports, but no sealed packets; sealed, but between other ports.
        forged = [frame(far, near, (source, destination), first) for first in (0x10, 0x21, 0xFF)]
        forged += [frame(far, near, ports, 0x20) for ports in ((source, 9), (9, 9), (destination, source))]
        before = refused(one)
        words = ["python3", "-c", FORGER, one.address, *itertools.chain.from_iterable(itertools.repeat(forged, 5))]
        machine.execute(two, *words)
        wait_until("forged frames to be dropped", lambda: refused(one) - before >= 5 * len(forged), 30)
        assert refused(one) - before == 5 * len(forged)
        # The application drops what only looks sealed.
        machine.execute(two, "python3", "-c", FORGER, one.address, frame(far, near, (source, destination), 0x20))
    assert "latency_us" in log.read_text(), log.read_text()
    settled(one)
    assert_balanced(topology)


def datagrams(capture: bytes) -> list[bytes]:
    """The UDP payloads between the ports of applications in a container's capture."""
    frames = [frame for frame in captured(capture) if frame[12:14] == b"\x08\x00" and frame[23] == 17]
    return [frame[ETHERNET + IPV4 + UDP :] for frame in frames]


@pytest.mark.parametrize("sides", ["client", "server", "both"])
def test_vnetds_engine_seals(topology: Topology, sides: str):
    """With vnetd's engine at one side, which then meets that of a process, and at both."""
    (one, two), (near, far) = topology.hosts, (topology.find("h1c1"), topology.find("h2c1"))
    client, server = ((BY_DAEMON if sides in (side, "both") else ()) for side in ("client", "server"))
    served = {one: near} if client else {}
    served |= {two: far} if server else {}
    before = {host: rdma_metric(host, node, "sealed_out_packets_total") for host, node in served.items()}
    frames = [handled(host) for host in topology.hosts]
    with underlay_capture(one) as seen, underlay_capture(near) as inside, perf_server(far, *server) as name:
        words = machine.execute(
            near, *client, "vnet-rdma-perf", "client", name, "16384", "2,0.1", timeout_s=120
        ).split()
    assert dict(zip(words[::2], words[1::2], strict=True))["attachment"] == "sealed"
    # The program writes zeros. Its packets are sealed before they leave the container.
    assert bytes(64) not in seen[0]
    assert bytes(64) not in b"".join(datagrams(inside[0]))
    assert {payload[0] >> 4 for payload in datagrams(inside[0])} == {2}, "version of sealing"
    wire = on_wire(seen[0])
    assert len(wire) > 1000, "they took the wire"
    assert {(frame[23], frame[ETHERNET + IPV4 + UDP]) for frame in wire} == {(17, 0x20)}
    for host, earlier in zip(topology.hosts, frames, strict=True):
        assert handled(host) - earlier < len(wire) / 4, "dispatchers of vnetd forward only the first ones"
    for host, node in served.items():
        assert rdma_metric(host, node, "sealed_out_packets_total") - before[host] > 100
        wait_until("its end", lambda host=host, node=node: rdma_metric(host, node, "processes") == 0, 30)
    for host in topology.hosts:
        wait_until(f"no flows on {host.name}", lambda host=host: not sealed_flows(host), 30)
    assert_balanced(topology)


def test_vnetds_engine_renews_its_session_with_an_application_that_meets_a_new_vnetd(topology: Topology):
    near, far = topology.find("h1c1"), topology.find("h2c1")
    one, two = topology.hosts
    before = rdma_metric(one, near, "seal_sessions_total")
    with transfer(near, far, "20,0.1", *BY_DAEMON) as log:
        wait_until("a session", lambda: rdma_metric(one, near, "seal_sessions_total") > before, 30)
        wait_until("flows", lambda: len(sealed_flows(one)) == 2, 30)
        before = rdma_metric(one, near, "seal_sessions_total")
        pid = process.find(two.file(".pid"))
        os.kill(pid, signal.SIGKILL)
        wait_until("vnetd to be gone", lambda: process.find(two.file(".pid")) is None, 30)
        lab.start_daemon(topology, two)
        wait_until("a new session", lambda: rdma_metric(one, near, "seal_sessions_total") > before, 60)
        wait_until("flows of the new vnetd", lambda: len(sealed_flows(two)) == 2, 60)
    text = log.read_text()
    assert "attachment sealed" in text, text
    assert "latency_us" in text, text
    wait_for_wires(topology)
