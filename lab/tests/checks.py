"""Checks shared by tests: lost pings, states of links, counters that balance, captured frames."""

import contextlib
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from vnetlab import daemon, lab, machine, measure, process
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Node, Topology

RESTART_S = 0.3
"""From the end of a killed vnetd's start until a container's first frame finds its way."""
SUMMARY = (
    "/packets transmitted/ { sent = $1 } "
    "/bytes from/ && match($0, /icmp_seq=[0-9]+/) "
    "{ at = substr($0, RSTART + 9, RLENGTH - 9) + 0; if (at <= count && !(at in seen)) { seen[at]; answered++ } } "
    "END { print sent + 0, answered + 0 }"
)


def ping(
    source: Node, address: str, *options: str, count: int = 3, interval_s: float = 0.01, patience: int = 4
) -> tuple[int, int]:
    """Pings; returns the numbers of requests and replies. The first request opens the path and may wait for ARP.

    Unlike `measure.ping`, it counts the replies in the guest, because the guest's console is slow. It is patient:
    guests that share processors with others take longer to send all requests.
    """
    deadline_s = patience * measure.deadline_s(count, interval_s)
    words = ["ping", "-n", "-c", str(count), "-i", str(interval_s), "-w", str(deadline_s), *options, address]
    summary = f"busybox awk -v count={count} {shlex.quote(SUMMARY)}"
    _, text = machine.attempt(source, f"{shlex.join(words)} 2>&1 | {summary}", timeout_s=deadline_s + 60)
    sent, answered = map(int, text.split())
    return min(sent, count), answered


def reaches(source: Node, address: str, *options: str) -> bool:
    """Whether the first three pings are answered."""
    return ping(source, address, *options, patience=1)[1] == 3


def silent(source: Node, address: str) -> bool:
    """Whether none of three pings is answered within a second."""
    _, text = machine.attempt(source, "ping", "-n", "-q", "-c", "3", "-i", "0.01", "-W", "1", address)
    return "3 packets transmitted, 0 received" in text


def wait_for_path(source: Node, address: str, timeout_s: float = 10) -> None:
    """Waits until a ping is answered."""
    wait_until(
        f"{address} to answer {source.name}", lambda: ping(source, address, count=1, patience=1)[1] == 1, timeout_s
    )


@contextlib.contextmanager
def pinging(*paths: tuple[Node, Node], interval_s: float = 0.004, seconds: float = 6) -> Iterator[None]:
    """Pings along each path until the body has ended, at least for `seconds`; every request must be answered."""
    for source, destination in paths:
        wait_for_path(source, destination.address)
    count, over = int(seconds / interval_s), threading.Event()

    def lost(path: tuple[Node, Node]) -> int:
        source, destination = path
        lost = 0
        while True:
            sent, received = ping(source, destination.address, count=count, interval_s=interval_s)
            assert sent == count, f"{source.name} sent {sent} of {count}"
            lost += sent - received
            if over.is_set():
                return lost

    with ThreadPoolExecutor(len(paths)) as pool:
        running = [pool.submit(lost, path) for path in paths]
        try:
            yield
        finally:
            over.set()
        for (source, destination), future in zip(paths, running, strict=True):
            assert future.result() == 0, f"{source.name} - {destination.name}"


@contextlib.contextmanager
def readdressed(host: Node) -> Iterator[str]:
    """Changes a host's underlay address while the context lasts, then restores it."""
    inside = ["ip", "-n", host.namespace, "address"]
    network, _, last = host.address.rpartition(".")
    other = f"{network}.{100 + int(last)}"

    def change(before: str, now: str) -> None:
        run([*inside, "del", f"{before}/24", "dev", "eth0"])
        run([*inside, "add", f"{now}/24", "dev", "eth0"])

    change(host.address, other)
    try:
        yield other
    finally:
        change(other, host.address)


def kill(host: Node) -> None:
    """Kills a vnetd; its TAP devices stay for the next one."""
    pid = process.find(host.file(".pid"))
    assert pid, f"vnetd on {host.name} runs"
    os.kill(pid, signal.SIGKILL)
    wait_until(f"{host.name}'s vnetd to end", lambda: process.find(host.file(".pid")) is None, 5)


def assert_restart_is_short(topology: Topology, host: Node, source: Node, destination: Node) -> None:
    """A container's first frame finds its way after a kill: its ARP request is repeated only after a second."""
    times = []
    for _ in range(3):
        kept = topology.state / "state" / f"overlay-{host.name}.json"
        wait_until(f"{host.name} to have kept what it knows", kept.exists, 60)
        kill(host)
        lab.start_daemon(topology, host)
        begin = time.monotonic()
        wait_for_path(source, destination.address, 60)
        times.append(time.monotonic() - begin)
    # The best round counts: the machine may be busy.
    assert min(times) <= RESTART_S, times


def doctor(host: Node) -> str:
    """What `vnet doctor` says on a host; it may have found problems."""
    return machine.attempt(host, "vnet", "doctor")[1]


def metrics(host: Node) -> str:
    """A host's metrics as Prometheus reads them."""
    return run(["curl", "-s", "--unix-socket", str(host.file(".sock")), "http://vnetd/metrics"])


def settled(host: Node) -> dict:
    """Waits until a host's frame counters are constant and balanced; returns all of them."""
    last: dict = {}
    frames: list = []

    def still() -> bool:
        nonlocal last, frames
        before, last = frames, daemon.ask(host, "stats")
        frames = [
            {key: value for key, value in port.items() if key not in ("in_datagrams", "out_datagrams")}
            for port in last["ports"]
        ]
        balance = last["balance"]
        return before == frames and balance["in"] + balance["copies"] == balance["out"] + balance["drops"]

    wait_until(f"the counters of {host.name} to add up: in + copies = out + drops", still, 10, poll_s=0.3)
    return last


def assert_balanced(topology: Topology) -> None:
    """Asserts that every frame that entered any host was delivered or counted as dropped."""
    for host in topology.hosts:
        balance = settled(host)["balance"]
        assert balance["in"] > 0, f"{host.name} saw no frame"


def links(host: Node) -> dict[str, dict]:
    """The links of a host, by name."""
    return {entry["name"]: entry for entry in daemon.ask(host, "link", "list")}


def link(host: Node) -> dict:
    """A host's only link."""
    (only,) = links(host).values()
    return only


def wait_for_state(host: Node, state: str, timeout_s: float = 10) -> None:
    """Waits until a host's only link is up, degraded or down."""
    wait_until(f"{host.name}'s link to be {state}", lambda: link(host)["state"] == state, timeout_s, poll_s=0.05)


def logged_after(host: Node, words: str, begin: float) -> float:
    """Seconds from `begin` (time.time()) until vnetd logged `words`: more exact than polling the state."""
    for line in host.file(".log").read_text().splitlines():
        stamp = line.strip().partition(" ")[0]
        if words in line and (at := datetime.fromisoformat(stamp).timestamp()) >= begin:
            return at - begin
    raise LabError(f"{host.name} has not logged '{words}'", host.file(".log"))


def sent_to(host: Node, source: Node, mac: str) -> list[str]:
    """The interfaces and links to which a host forwards a container's frames for a MAC address."""
    return daemon.ask(host, "trace", source.mac, mac, "--from", f"interface {source.name}")["to"]


def port(stats: dict, kind: str, name: str) -> dict:
    """The counters of one port."""
    return next(port for port in stats["ports"] if port["kind"] == kind and port["name"] == name)


def captured(text: str) -> list[tuple[str, str]]:
    """Source and destination addresses of the frames in tcpdump's output (with -e)."""
    return re.findall(r"(\S+) > (\S+), ethertype", text)


TOO_BIG = """
import socket, struct, sys
far, near, port = socket.inet_aton(sys.argv[1]), socket.inet_aton(sys.argv[2]), int(sys.argv[3])
def checksum(data):
    total = sum(struct.unpack(f'!{len(data) // 2}H', data))
    total = (total & 0xffff) + (total >> 16)
    return ~((total & 0xffff) + (total >> 16)) & 0xffff
quoted = struct.pack('!BBHHHBBH', 0x45, 0, 1500, 1, 0x4000, 64, 17, 0) + near + far
quoted += struct.pack('!HHHH', port, 4789, 1480, 0)
icmp = struct.pack('!BBHHH', 3, 4, 0, 0, 1300) + quoted
icmp = icmp[:2] + struct.pack('!H', checksum(icmp)) + icmp[4:]
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as s:
    s.sendto(icmp, (sys.argv[2], 0))
"""
"""Sends ICMP "fragmentation needed" (RFC 1191) with MTU 1300 for a VXLAN datagram."""
