"""Live migration: a running virtual machine moves to another host of its lab, by QEMU's own migration.

A second QEMU waits on the destination, with files of its own. It receives the machine's memory and state over the
underlay (`relay.py`) while the machine runs. Then its files replace those of the first QEMU, so that all commands find
the machine.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vnetlab import daemon, guest, lab, process
from vnetlab.channel import PORTS
from vnetlab.monitor import Monitor
from vnetlab.run import LabError, progress, wait_until
from vnetlab.topology import Kind, Node, Topology

START_S = 30
CLAIM_S = 10
MIGRATE_S = 300
STALL_S = 10
"""A migration that has transferred nothing for so long is cancelled: the network may be cut."""
PORT = 4444
"""TCP port on the destination's underlay address."""
RELAY = Path(__file__).parent / "relay.py"
TELL_S = 1
"""Interval of progress lines."""
MIB = 1 << 20
BANDWIDTH = 128 * MIB
"""QEMU's own default."""
FILES = (".pid", ".log", ".qmp", ".console", ".console.log", *(f".serial{number}" for number in range(1, PORTS + 1)))
"""Files of a QEMU that the next one's replace."""


@dataclass(frozen=True)
class Migrated:
    """What QEMU reports about a migration."""

    seconds: float
    """From the request until the destination runs the machine."""
    downtime_ms: int
    """How long the machine stood still."""
    mib: int
    """Memory and state transferred."""


def host_of(topology: Topology, machine: Node) -> Node:
    """The host on which a virtual machine runs."""
    with contextlib.suppress(FileNotFoundError):
        return topology.find(machine.file(".host").read_text())
    return next(host for host in topology.hosts if host.host == machine.host)


def migrate(
    topology: Topology, machine: Node, destination: Node, device: str = "", bandwidth: int = BANDWIDTH
) -> Migrated:
    """Moves a running virtual machine to another host.

    If the migration fails, the machine goes on where it was, and LabError is raised. `device` has additional properties
    of the destination's network device, `bandwidth` limits the transfer in bytes a second.
    """
    source = host_of(topology, machine)
    if machine.kind is not Kind.VM or destination.kind is not Kind.HOST or destination == source:
        raise LabError(
            f"'migrate {machine.name} {destination.name}': name a virtual machine and another host than its own"
        )
    if process.find(machine.file(".pid")) is None:
        raise LabError(f"{machine.name} does not run", machine.file(".log"))
    with (
        _arriving(topology, machine, destination, device) as place,
        _underlay(machine, source, destination, place) as (uri, incoming),
        Monitor(machine.file(f"{place}.qmp")) as there,
        Monitor(machine.file(".qmp")) as here,
    ):
        for monitor in (there, here):
            # The source learns whether the destination could load the machine.
            monitor.ask("migrate-set-capabilities", capabilities=[{"capability": "return-path", "state": True}])
        here.ask("migrate-set-parameters", max_bandwidth=bandwidth)
        there.ask("migrate-incoming", uri=incoming)
        begin = time.monotonic()
        here.ask("migrate", uri=uri)
        migrated = _follow(machine, here, begin)
    process.stop(machine.file(".pid"))
    for suffix in FILES:
        machine.file(f"{place}{suffix}").replace(machine.file(suffix))
    machine.file(".host").write_text(destination.name)
    if topology.settings.store:
        # Until then frames for the machine have no other place to go.
        claimed = [f"link {destination.name}"]
        wait_until(
            f"{source.name} to know that {machine.name} has moved",
            lambda: _trace(source, machine) == claimed,
            CLAIM_S,
            source.file(".log"),
        )
    daemon.vnet(source, "interface", "del", machine.name)
    return migrated


def _trace(host: Node, machine: Node) -> list[str]:
    """Where a host sends frames for a machine that it has an interface for."""
    return daemon.ask(host, "trace", "02:00:00:00:00:01", machine.mac, "--from", f"interface {machine.name}")["to"]


@contextlib.contextmanager
def _arriving(topology: Topology, machine: Node, destination: Node, device: str) -> Iterator[str]:
    """An interface and a QEMU that wait for a machine; removed if the body fails.

    Yields the part of their files' names before the suffix.
    """
    place = f".{destination.name}"
    interface = ["--kind", "vhost-user", "--socket", str(machine.file(f"{place}.vhost")), "--mac", machine.mac]
    interface += ["--mtu", str(topology.mtu(machine)), "--queues", str(topology.settings.queues)]
    if topology.settings.store:
        interface += ["--addresses", machine.address]
    daemon.vnet(destination, "interface", "add", machine.name, *interface)
    try:
        image = lab.boot_image(topology)
        if image is None:
            raise LabError(f"lab {machine.lab} has no virtual machines")
        words = guest.command(topology, machine, image, device=device, place=place)
        guest.launch(machine, [*words, "-incoming", "defer"], place)
        _wait(machine, place)
        yield place
    except BaseException:
        process.stop(machine.file(f"{place}.pid"))
        daemon.vnet(destination, "interface", "del", machine.name)
        raise


@contextlib.contextmanager
def _underlay(machine: Node, source: Node, destination: Node, place: str) -> Iterator[tuple[str, str]]:
    """A way from QEMU to QEMU across the underlay; yields the addresses for the source and for the destination."""
    there = f"tcp:{destination.address}:{PORT}"
    outgoing, incoming = (f"unix:{machine.file(f'{place}.{name}')}" for name in ("outgoing", "incoming"))
    files = []
    try:
        for host, listen, to in ((destination, there, incoming), (source, outgoing, there)):
            words = ["ip", "netns", "exec", host.namespace, sys.executable, str(RELAY), listen, to]
            files.append(machine.file(f"{place}.{host.name}-relay"))
            process.start(words, files[-1], machine.file(f"{place}.log"))
        path = Path(outgoing.removeprefix("unix:"))
        wait_until("the way to the destination", path.exists, START_S, machine.file(f"{place}.log"))
        yield outgoing, incoming
    finally:
        for file in files:
            process.stop(file)
        for name in ("outgoing", "incoming"):
            machine.file(f"{place}.{name}").unlink(missing_ok=True)


def _wait(machine: Node, place: str) -> None:
    """Waits until the destination's QEMU answers."""
    log = machine.file(f"{place}.log")

    def answers() -> bool:
        if process.find(machine.file(f"{place}.pid")) is None:
            # The clean-up keeps the log.
            raise LabError(f"QEMU for {machine.name} on {place[1:]} exited at once", log)
        with socket.socket(socket.AF_UNIX) as monitor:
            return monitor.connect_ex(str(machine.file(f"{place}.qmp"))) == 0

    wait_until(f"QEMU for {machine.name} on {place[1:]}", answers, START_S, log)


def _follow(machine: Node, monitor: Monitor, begin: float) -> Migrated:
    """Waits until a migration has completed. Raises LabError if it fails."""
    told, moved, stalled = begin, (0, begin), False
    while True:
        report = monitor.ask("query-migrate")
        status, now = report.get("status"), time.monotonic()
        memory = report.get("ram", {})
        if status == "completed":
            return Migrated(round(now - begin, 2), report["downtime"], memory["transferred"] // MIB)
        if status in ("failed", "cancelled"):
            why = (
                f"nothing got through for {STALL_S} s" if stalled else report.get("error-desc", "QEMU gives no reason")
            )
            raise LabError(f"the migration of {machine.name} {status}, it goes on where it was: {why}")
        if memory.get("transferred", 0) != moved[0]:
            moved = memory["transferred"], now
        if now - moved[1] > STALL_S and not stalled:
            monitor.ask("migrate_cancel")
            stalled = True
        if now - begin > MIGRATE_S:
            monitor.ask("migrate_cancel")
            raise LabError(f"the migration of {machine.name} did not end within {MIGRATE_S} s; it goes on where it was")
        if memory and now - told >= TELL_S:
            progress(f"{machine.name}: {memory['remaining'] // MIB} of {memory['total'] // MIB} MiB left")
            told = now
        time.sleep(0.02)
