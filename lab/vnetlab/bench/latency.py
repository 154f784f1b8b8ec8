"""The benches `latency` (latency by size) and `ablation` (what each part of vnet contributes).

`latency` reproduces figures 4 and 6 of the VNET/P+ paper: round trips by ICMP size with their spread, and throughput
over time; the bench `mpi` has its figure 7. `ablation` measures the same two machines while the parts of vnet are
switched on one by one, from a VNET/U-like configuration to the complete one. Both count notifications and wake-ups per
frame.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from vnetlab import daemon, measure
from vnetlab.bench import share, usage, workload
from vnetlab.bench.contenders import (
    BLOCK,
    TAP,
    VNET,
    Bare,
    Contender,
    Ends,
    Nebula,
    Pinned,
    Tinc,
    Vnet,
    VxlanContainers,
    VxlanDevice,
)
from vnetlab.bench.floor import Floor
from vnetlab.bench.guests import TapGuests, VnetGuests
from vnetlab.bench.result import Sample, percentile
from vnetlab.run import LabError
from vnetlab.topology import Kind, Node, Topology

PING_BYTES = (56, 256, 1_024, 4_096, 16_384, 65_000)
SMALL_BYTES = 64
INTERVAL_S = 0.001
STREAM_INTERVAL_S = 0.1

OPTIMISTIC = Vnet("vnet, optimistic interrupts", interface=(("interrupts", "optimistic"),))
LIKE_VNET_U = Vnet(
    "like VNET/U: one frame a system call, blocking",
    (("yield", "block"), ("burst", 1)),
    encapsulation="vnet",
    interface=(("mode", "guest-driven"),),
    offloads=False,
)
"""MTU-sized frames, each read, routed and sent alone."""
GUEST_DRIVEN = Vnet("guest-driven, blocking", (("yield", "block"),), interface=(("mode", "guest-driven"),))
VMM_DRIVEN = Vnet("VMM-driven, immediate yield", (("yield", "immediate"),), interface=(("mode", "vmm-driven"),))
ADAPTIVE = Vnet("adaptive mode and yield")
PLUS_OPTIMISTIC = replace(OPTIMISTIC, name="+ optimistic interrupts")
CUT_THROUGH = Vnet("+ cut-through", bridge=(("zero_copy", "on"),), direct=True)
BOTH = replace(CUT_THROUGH, name="both", interface=OPTIMISTIC.interface)
PLUS_PINNING = replace(BOTH, name="+ pinning, each host's dispatcher to a processor", pinned=Pinned.APART)
ON_ONE = replace(BOTH, name="+ pinning, all dispatchers to one processor", pinned=Pinned.TOGETHER)
STEPS = (LIKE_VNET_U, GUEST_DRIVEN, VMM_DRIVEN, ADAPTIVE, PLUS_OPTIMISTIC, CUT_THROUGH, BOTH, PLUS_PINNING, ON_ONE)
"""The parts, switched on one by one. A TAP has neither guest interrupts nor guest memory to send from."""
OF_GUESTS = (PLUS_OPTIMISTIC, CUT_THROUGH, BOTH)
"""Parts that only virtual machines have."""
FLOORS = (
    Floor("floor, blocking", blocks=True),
    Floor("floor, spinning"),
    Floor("floor, spinning on one processor", processor=0),
)
"""A lower bound for any program between a TAP and a socket."""
CONTAINERS: tuple[Contender, ...] = (Bare(), VxlanDevice(), VxlanContainers(), VNET, TAP, BLOCK, Tinc(), Nebula())
GUESTS: tuple[Contender, ...] = (TapGuests(), VnetGuests(VNET), VnetGuests(OPTIMISTIC), VnetGuests(BLOCK))


def steps(*, guests: bool) -> list[Contender]:
    """The rows of the ablation, preceded by contenders for comparison."""
    if guests:
        return [TapGuests(), *(VnetGuests(step) for step in STEPS)]
    return [Bare(), VxlanContainers(), *FLOORS, *(step for step in STEPS if step not in OF_GUESTS)]


@dataclass
class _Counts:
    """Counters of some hosts' daemons."""

    delivered: int = 0
    taken: int = 0
    notifications: int = 0
    kicks: int = 0
    wakeups: int = 0


def _counts(hosts: list[Node], ends: Ends) -> _Counts:
    counts = _Counts(wakeups=usage.wakeups(pid for name, pid in ends.processes.items() if name.startswith("h")))
    for host in hosts:
        for port in daemon.ask(host, "stats")["ports"]:
            if port["kind"] == "interface":
                counts.delivered += port["out_frames"]
                counts.taken += port["in_frames"]
                counts.notifications += port["notifications"]
                counts.kicks += port["kicks"]
    return counts


def _answering(topology: Topology, ends: Ends) -> list[Node]:
    """Hosts whose daemon is vnetd: other contenders have no daemon, or a daemon without a control socket."""
    return [host for host in topology.hosts if host.name in ends.processes and host.file(".sock").exists()]


def counted(topology: Topology, ends: Ends, load: Callable[[], Sample]) -> Sample:
    """Runs a load and adds its cost: CPU time, and for vnet notifications, kicks and wake-ups per frame."""
    hosts = _answering(topology, ends)
    before = _counts(hosts, ends)
    with usage.measured(ends.processes) as used:
        sample = load()
    sample = sample | used.sample()
    if hosts:
        after = _counts(hosts, ends)
        delivered, taken = max(1, after.delivered - before.delivered), max(1, after.taken - before.taken)
        sample["notifications_a_frame"] = (after.notifications - before.notifications) / delivered
        sample["kicks_a_frame"] = (after.kicks - before.kicks) / taken
        sample["wakeups_a_frame"] = (after.wakeups - before.wakeups) / (delivered + taken)
    return sample


def pings(ends: Ends, size: int, count: int) -> Sample:
    """Round trips of one size: minimum, median, p99, maximum."""
    seconds = max(2, round(2 * count * INTERVAL_S + count * 0.001))
    options = ("-s", str(size), "-i", str(INTERVAL_S), "-w", str(seconds))
    _, times = measure.ping(ends.source, ends.destination.address, *options, count=count, timeout_s=seconds + 30)
    if len(times) < count / 4:
        raise LabError(f"only {len(times)} of {count} pings of {size} bytes were answered")
    ranks = {"ping_min_us": min(times), "ping_max_us": max(times)}
    return ranks | {f"ping_{name}_us": percentile(times, workload.RANKS[name]) for name in ("median", "p99")}


def stream(ends: Ends, seconds: float) -> Sample:
    """One TCP stream, and its relative standard deviation over tenths of a second."""
    report = measure.iperf3(ends.source, ends.destination, "--interval", str(STREAM_INTERVAL_S), seconds=seconds)
    rates = [each["sum"]["bits_per_second"] for each in report["intervals"]]
    # Skip TCP's slow start.
    rates = rates[len(rates) // 5 :]
    rate = report["end"]["sum_received"]["bits_per_second"]
    return {"tcp_bps": rate, "tcp_variation": statistics.pstdev(rates) / statistics.fmean(rates)}


def small(topology: Topology, ends: Ends, seconds: float) -> Sample:
    """One stream of small datagrams at full rate: arrived datagrams per second, and notifications per frame."""
    words = ("--udp", "--bitrate", "0", "--length", str(SMALL_BYTES))
    receiver = _answering(topology, ends)[-1:]
    before = _counts(receiver, ends)
    rate = measure.throughput(ends.source, ends.destination, *words, seconds=seconds)
    sample = {"small_frames_per_s": rate / 8 / SMALL_BYTES}
    if receiver:
        after = _counts(receiver, ends)
        delivered = max(1, after.delivered - before.delivered)
        sample["small_notifications_a_frame"] = (after.notifications - before.notifications) / delivered
    return sample


def step(topology: Topology, ends: Ends, seconds: float, count: int) -> Sample:
    """The measurements of one row of the ablation: pings, then streams."""
    workload.meet(ends)
    found = counted(topology, ends, lambda: pings(ends, PING_BYTES[0], count))
    found |= workload.flood(ends, count)
    if ends.source.kind is Kind.VM:
        found |= share.of_pings(topology, ends)
        found |= small(topology, ends, seconds)
    streamed = counted(topology, ends, lambda: stream(ends, seconds))
    for name in ("notifications_a_frame", "daemon_cores"):
        if name in streamed:
            found[f"stream_{name}"] = streamed[name]
    return found | {name: streamed[name] for name in ("tcp_bps", "tcp_variation")}
