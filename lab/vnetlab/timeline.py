"""Show when a virtual machine is notified of pings and when it reacts, with early and direct notifications in turn.

vnetd records the steps (`vnet interface timeline`) while another node pings the guest. Settings change in turn between
machines that keep running, because differences between two boots would hide theirs.
"""

import argparse
import json
import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from vnetlab import daemon, lab, measure
from vnetlab.run import LabError
from vnetlab.topology import Kind, Node, Topology

SIZES = (56, 256, 1024, 2048, 4096)
ROUNDS = 10
PINGS = 200
SETTINGS = {
    "direct": ("interrupts=direct",),
    "early": ("interrupts=optimistic", "early_bytes=0"),
    "early from 2048": ("interrupts=optimistic", "early_bytes=2048"),
}
"""Settings of the interfaces of both virtual machines, by name."""
RTT = "round trip"
SLACK_S = 1
"""By how much a recording outlasts the time that pings take at least."""


@dataclass
class Row:
    """What was found with one size and one setting: medians of rounds, in microseconds."""

    bytes: int
    interrupts: str
    rounds: list[dict[str, float]] = field(default_factory=list)
    """For each round the median round trip, and the median of each step that happened."""
    announced: list[float] = field(default_factory=list)
    """For each round, the share of receptions that were announced early."""
    notified: list[float] = field(default_factory=list)
    """For each round, the share of receptions with a notification after the receive."""

    def median(self, what: str) -> float | None:
        """The median over the rounds; None if it never happened."""
        found = [each[what] for each in self.rounds if what in each]
        return statistics.median(found) if found else None


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("source", help="who pings: h1v1")
    parser.add_argument("node", help="the virtual machine that is pinged: h2v1")
    sizes = " ".join(map(str, SIZES))
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="B", help=f"bytes of pings (default: {sizes})"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds (default: {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print JSON")


def command(arguments: argparse.Namespace) -> None:
    """`lab timeline`: measures in a lab that is up, and prints a table."""
    topology = lab.load(arguments.name)
    source, guest = topology.find(arguments.source), topology.find(arguments.node)
    rows = run(topology, source, guest, tuple(arguments.sizes), arguments.rounds)
    print(json.dumps([asdict(row) for row in rows], indent=2) if arguments.json else table(rows))


def run(
    topology: Topology, source: Node, guest: Node, sizes: tuple[int, ...], rounds: int = ROUNDS, pings: int = PINGS
) -> list[Row]:
    """Pings a virtual machine with each size, with each setting in turn; afterwards interrupts are direct."""
    if guest.kind is not Kind.VM:
        raise LabError(f"{guest.name} is not a virtual machine: only they have interrupts")
    rows = [Row(size, name) for size in sizes for name in SETTINGS]
    try:
        for _ in range(rounds):
            for row in rows:
                _set(topology, (source, guest), SETTINGS[row.interrupts])
                _measure(topology, source, guest, row, pings)
    finally:
        _set(topology, (source, guest), SETTINGS["direct"])
    return rows


def _host(topology: Topology, node: Node) -> Node:
    return next(host for host in topology.hosts if host.host == node.host)


def _set(topology: Topology, nodes: tuple[Node, ...], settings: tuple[str, ...]) -> None:
    for node in nodes:
        if node.kind is Kind.VM:
            daemon.vnet(_host(topology, node), "interface", "set", node.name, *settings)


def _measure(topology: Topology, source: Node, guest: Node, row: Row, pings: int) -> None:
    """Records while the guest is pinged, and adds the medians to a row."""
    host = _host(topology, guest)
    seconds = math.ceil(pings * measure.PING_INTERVAL_S + SLACK_S)
    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(daemon.ask, host, "interface", "timeline", guest.name, "--seconds", str(seconds))
        _, times = measure.ping(source, guest.address, "-s", str(row.bytes), count=pings)
        timeline = recording.result()
    if not times or not timeline["receptions"]:
        raise LabError(f"no ping of {source.name} reached {guest.name}", host.file(".log"))
    steps = {step["step"]: step["median_us"] for step in timeline["steps"] if step["count"]}
    row.rounds.append({RTT: statistics.median(times)} | steps)
    counts = {step["step"]: step["count"] for step in timeline["steps"]}
    row.announced.append(counts["announced"] / timeline["receptions"])
    row.notified.append(counts["notified"] / timeline["receptions"])


def table(rows: list[Row]) -> str:
    """The rows as text, with the round trip as a multiple of that with direct interrupts.

    EARLY % and LATE % are the shares of receptions with a notification before and after the receive; each time is the
    median of those receptions in which the step happened.
    """
    steps = ("received", "delivered", "notified", "reacted")
    heading = ("BYTES", "INTERRUPTS", "RTT us", "x DIRECT", "EARLY %", "LATE %", "announced", *steps)
    lines = [heading]
    direct = {row.bytes: row.median(RTT) for row in rows if row.interrupts == "direct"}
    for row in rows:
        rtt, base = row.median(RTT), direct[row.bytes]
        times = ["-" if (at := row.median(step)) is None else f"{at:.1f}" for step in ("announced", *steps)]
        shares = [f"{100 * statistics.mean(share):.0f}" for share in (row.announced, row.notified)]
        lines.append((str(row.bytes), row.interrupts, f"{rtt:.0f}", f"{rtt / base:.2f}", *shares, *times))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
