"""Attacks on a vnetd beside two bystanders that exchange pings and a TCP stream with known content.

When attacks are measured, bystanders and vnetd's dispatchers have one processor, attackers and the other threads of
vnetd another. So the time of an attacker's own program is not taken from bystanders, as between tenants of a large
host; the time that it costs the dispatchers is.
"""

import contextlib
import os
import re
import signal
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vnetlab import machine, measure, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology

PROGRAMS = Path(__file__).parent / "programs"
BYSTANDER = "bystander.py"
CONSOLE, HTTP = 9001, 9080
"""TCP ports of vnetd."""
STRANGER = "10.78.0.77"
"""An underlay address that belongs to no link, on the second host."""
GUESTS = {"e1": "52:54:00:01:0e:01", "e2": "52:54:00:01:0e:02"}
"""Interfaces of hostile front ends on the first host."""
BYSTANDERS, OTHERS = 0, 1
"""Processors where attacks are measured: of bystanders and dispatchers, and of attackers and the rest of vnetd."""
MACS_PER_S, DATAGRAMS_PER_S = 100_000, 50_000
READY_S, END_S = 60, 60


@dataclass(frozen=True)
class Attack:
    """An attack, and the bystanders that it must not harm."""

    name: str
    source: str
    destination: str
    words: list[str]
    """Program and arguments; STATE is the lab's directory."""
    place: str
    """Where it runs."""


def _guests(name: str) -> Attack:
    words = ["hostile_front_end.py", name, "STATE/e1.vhost", "STATE/e2.vhost", *GUESTS.values()]
    return Attack(name, "h1c1", "h1c2", words, "h1")


def _sockets(name: str, port: int, *, peer: bool, per_s: int = 0) -> Attack:
    address, *source = ["10.78.0.1", STRANGER] if peer else ["127.0.0.1"]
    words = ["pester.py", name, str(per_s), address, str(port), *source]
    return Attack(name, "h1c1", "h2c1" if peer else "h1c2", words, "h2" if peer else "h1")


ATTACKS = [
    *map(_guests, ("segments", "waiters", "unmapping", "truncation", "chains")),
    Attack("macs", "h1c1", "h1c2", ["pester.py", "macs", str(MACS_PER_S), "eth0", "52:54:00:01:00:01"], "h1c3"),
    *(_sockets(name, 9000, peer=True) for name in ("connections", "handshakes", "garbage")),
    _sockets("datagrams", 9000, peer=True, per_s=DATAGRAMS_PER_S),
    _sockets("learned", HTTP, peer=False),
    _sockets("console", CONSOLE, peer=False),
    _sockets("idle", CONSOLE, peer=False),
]


@dataclass(frozen=True)
class Seen:
    """What the bystanders measure in one phase."""

    p99_us: float
    bps: float

    def __str__(self) -> str:
        return f"{self.p99_us:.0f} us, {self.bps / 1e9:.1f} Gbit/s"


def _bystander(words: Sequence[str]) -> list[str]:
    """The words of a bystander's command, which runs on its own processor where attacks are measured."""
    return [*(["taskset", "--cpu-list", str(BYSTANDERS)] if rounds() else []), *words]


def run_program(topology: Topology, node: Node, words: list[str]) -> subprocess.Popen:
    """Starts a program of this directory on a host or in a container; returns when it is ready."""
    program, *arguments = (word.replace("STATE", str(topology.state)) for word in words)
    words = ["python3", str(PROGRAMS / program), *arguments]
    command = machine.namespace_command(node, _bystander(words) if program == BYSTANDER else words)
    running = subprocess.Popen(command, env=machine.environment(node), stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline().strip() == "ready", words
    return running


@contextlib.contextmanager
def beside(topology: Topology, attack: Attack) -> Iterator[None]:
    """Attacks while the context lasts."""
    running = run_program(topology, topology.find(attack.place), attack.words)
    try:
        yield
        running.send_signal(signal.SIGTERM)
        text, _ = running.communicate(timeout=END_S)
        assert running.returncode == 0, f"{attack.words} failed"
        done, duration_s, used_s = map(float, text.split())
        assert done > 0, f"{attack.words} did nothing"
        print(f"{attack.name}: {done / duration_s:.0f} a second, {used_s / duration_s:.2f} processors", flush=True)
    finally:
        running.kill()
        running.wait()


def see(source: Node, destination: Node, pings: int, interval_s: float, stream_s: float) -> Seen:
    """Pings, then streams; asserts that nothing arrives twice or damaged, and that pings are answered."""
    count, deadline_s = str(pings), str(measure.deadline_s(pings, interval_s))
    words = ["ping", "-n", "-c", count, "-i", str(interval_s), "-w", deadline_s, "-s", "64", destination.address]
    _, text = machine.attempt(source, *_bystander(words), timeout_s=int(deadline_s) + 60)
    assert "DUP!" not in text
    assert "wrong data byte" not in text
    times = [float(ms) * 1000 for ms in re.findall(r"icmp_seq=\d+ .*time=([\d.]+) ms", text)]
    assert len(times) >= 0.9 * pings, f"{len(times)} of {pings} pings were answered"
    stream = ["python3", str(PROGRAMS / BYSTANDER), "send", destination.address, str(stream_s)]
    bps = float(machine.execute(source, *_bystander(stream), timeout_s=stream_s + 90)) * 8
    return Seen(statistics.quantiles(times, n=100)[98], bps)


def prepare(topology: Topology) -> list[subprocess.Popen]:
    """Starts the bystanders' servers, and gives the second host the stranger's address; returns all processes."""
    machine.execute(topology.find("h2"), f"ip address add {STRANGER}/24 dev eth0")
    nodes = map(topology.find, ("h1c2", "h2c1"))
    return [run_program(topology, node, [BYSTANDER, "take", node.address]) for node in nodes]


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
