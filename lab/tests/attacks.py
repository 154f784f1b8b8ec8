"""Attacks on a vnetd beside two bystanders that exchange pings and a TCP stream with known content.

An attacker that needs processor time takes it from anybody on a small machine, whatever vnetd does. So each attack has
a *control*, a harmless load of the same cost: the same program sends as many frames to vnetd without the attack, or
does to a device or a server of the kernel what the attack does to vnetd, as often as the attack before it could. The
bar compares bystanders beside the attack with those beside the control; what they have alone is shown, too.
"""

import contextlib
import os
import re
import signal
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vnetlab import machine, measure, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology

PROGRAMS = Path(__file__).parent / "programs"
CONSOLE, HTTP, OTHER = 9001, 9080, 9081
"""TCP ports of vnetd, and that of a server which is pestered in its place."""
STRANGER = "10.78.0.77"
"""An underlay address that belongs to no link, on the second host."""
GUESTS = {"e1": "52:54:00:01:0e:01", "e2": "52:54:00:01:0e:02"}
"""Interfaces of hostile front ends on the first host."""
MACS_PER_S, DATAGRAMS_PER_S = 100_000, 50_000
READY_S, END_S = 60, 60


@dataclass
class Load:
    """What an attack or its control has done when it has ended."""

    per_s: float = 0
    processor: float = 0
    """Used by the program itself; 1 is one processor."""


@dataclass(frozen=True)
class Attack:
    """An attack, the bystanders that it must not harm, and its control."""

    name: str
    source: str
    destination: str
    hostile: list[str]
    """Program and arguments; STATE is the lab's directory."""
    harmless: list[str]
    """The same for the control; LIMIT and PROCESSOR are how often the attack came and what it used."""
    place: str
    """Where it runs."""

    def words(self, before: Load | None) -> list[str]:
        """The command of the attack; or of its control, if it has run before."""
        if before is None:
            return self.hostile
        known = {"LIMIT": f"{before.per_s:.1f}", "PROCESSOR": f"{before.processor:.3f}"}
        return [known.get(word, word) for word in self.harmless]


def _guests(name: str) -> Attack:
    def words(*mode: str) -> list[str]:
        return ["hostile_front_end.py", name, "STATE/e1.vhost", "STATE/e2.vhost", *GUESTS.values(), *mode]

    return Attack(name, "h1c1", "h1c2", words(), words("PROCESSOR"), "h1")


def _sockets(name: str, port: int, other: int = OTHER, *, peer: bool, per_s: int = 0) -> Attack:
    address, *source = ["10.78.0.1", STRANGER] if peer else ["127.0.0.1"]

    def words(limit: str, port: int) -> list[str]:
        return ["pester.py", name, limit, address, str(port), *source]

    ends = "h1c1", "h2c1" if peer else "h1c2"
    return Attack(name, *ends, words(str(per_s), port), words("LIMIT", other), "h2" if peer else "h1")


def _macs() -> Attack:
    def words(limit: str, device: str) -> list[str]:
        return ["pester.py", "macs", limit, device, "52:54:00:01:00:01"]

    return Attack("macs", "h1c1", "h1c2", words(str(MACS_PER_S), "eth0"), words("LIMIT", "bridged"), "h1c3")


ATTACKS = [
    *map(_guests, ("segments", "waiters", "unmapping", "truncation", "chains")),
    _macs(),
    *(_sockets(name, 9000, peer=True) for name in ("connections", "handshakes", "garbage")),
    _sockets("datagrams", 9000, peer=True, per_s=DATAGRAMS_PER_S),
    _sockets("learned", HTTP, OTHER + 1, peer=False),
    _sockets("console", CONSOLE, OTHER + 1, peer=False),
    _sockets("idle", CONSOLE, peer=False),
]


@dataclass(frozen=True)
class Seen:
    """What the bystanders measure in one phase."""

    p99_us: float
    bps: float


def run_program(topology: Topology, node: Node, words: list[str]) -> subprocess.Popen:
    """Starts a program of this directory on a host or in a container; returns when it is ready."""
    program, *arguments = (word.replace("STATE", str(topology.state)) for word in words)
    command = machine.namespace_command(node, ["python3", str(PROGRAMS / program), *arguments])
    running = subprocess.Popen(command, env=machine.environment(node), stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline().strip() == "ready", words
    return running


@contextlib.contextmanager
def beside(topology: Topology, attack: Attack, before: Load | None = None) -> Iterator[Load]:
    """Attacks while the context lasts, or does what the control of the attack `before` does."""
    words = attack.words(before)
    running = run_program(topology, topology.find(attack.place), words)
    load = Load()
    try:
        yield load
        running.send_signal(signal.SIGTERM)
        text, _ = running.communicate(timeout=END_S)
        assert running.returncode == 0, f"{words} failed"
        done, duration_s, used_s = map(float, text.split())
        assert done > 0, f"{words} did nothing"
        load.per_s, load.processor = done / duration_s, used_s / duration_s
        name = "control" if before else "attack"
        print(f"{attack.name} {name}: {load.per_s:.0f} a second, {load.processor:.2f} processors", flush=True)
    finally:
        running.kill()
        running.wait()


def see(source: Node, destination: Node, pings: int, interval_s: float, stream_s: float) -> Seen:
    """Pings, then streams; asserts that nothing arrives twice or damaged, and that pings are answered."""
    count, deadline_s = str(pings), str(measure.deadline_s(pings, interval_s))
    words = ["ping", "-n", "-c", count, "-i", str(interval_s), "-w", deadline_s, "-s", "64", destination.address]
    _, text = machine.attempt(source, *words, timeout_s=int(deadline_s) + 60)
    assert "DUP!" not in text
    assert "wrong data byte" not in text
    times = [float(ms) * 1000 for ms in re.findall(r"icmp_seq=\d+ .*time=([\d.]+) ms", text)]
    assert len(times) >= 0.9 * pings, f"{len(times)} of {pings} pings were answered"
    stream = ["python3", str(PROGRAMS / "bystander.py"), "send", destination.address, str(stream_s)]
    bps = float(machine.execute(source, *stream, timeout_s=stream_s + 90)) * 8
    return Seen(statistics.quantiles(times, n=100)[98], bps)


def prepare(topology: Topology) -> list[subprocess.Popen]:
    """Starts the bystanders' servers, and what controls pester; returns all processes."""
    far = topology.find("h2")
    machine.execute(far, f"ip address add {STRANGER}/24 dev eth0")
    # Where the control of invented addresses goes: a kernel's bridge that learns them.
    machine.execute(
        topology.find("h1c3"),
        "ip link add bridged type veth peer name port && ip link add br0 type bridge"
        " && ip link set port master br0 && for d in bridged port br0; do ip link set $d up; done",
    )
    running = []
    for name in ("h1c2", "h2c1"):
        node = topology.find(name)
        running.append(run_program(topology, node, ["bystander.py", "take", node.address]))
    near = topology.find("h1")
    size = len(machine.execute(near, "curl", "-s", f"http://127.0.0.1:{HTTP}/v1/learned"))
    for address, how in (("127.0.0.1", "keep"), (near.address, "close")):
        running.append(run_program(topology, near, ["pester.py", "serve", address, str(OTHER), how]))
    running.append(run_program(topology, near, ["pester.py", "serve", "127.0.0.1", str(OTHER + 1), str(size)]))
    return running


def fill_tables(topology: Topology, wanted: int) -> None:
    """Has a container on each host invent addresses until the first host has learned `wanted`."""
    near, far = topology.find("h1c3"), topology.find("h2c3")

    def learned() -> int:
        text = machine.execute(topology.find("h1"), "curl", "-s", f"http://127.0.0.1:{HTTP}/v1/learned")
        return text.count("mac")

    inventing = [
        run_program(topology, node, ["pester.py", "macs", "8000", "eth0", topology.find("h1c1").mac])
        for node in (near, far)
    ]
    try:
        wait_until("tables to be full", lambda: learned() >= wanted, READY_S)
    finally:
        for program in inventing:
            program.kill()
            program.wait()


def pids(topology: Topology) -> list[int | None]:
    """The processes of all vnetds."""
    return [process.find(host.file(".pid")) for host in topology.hosts]


def rounds() -> int:
    """How often each attack is measured against its bar; 0 where that is not asked for."""
    asked = os.environ.get("VNET_TEST_ATTACKS", "0")
    return 3 if asked == "strict" else int(asked)
