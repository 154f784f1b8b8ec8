"""The benches: their cases, their contenders, and the measurements of each turn."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vnetlab import machine
from vnetlab.bench import control, interconnect, kinds, latency, mpi, sockets, tunnels, usage, vhost, workload
from vnetlab.bench.case import LAB, Bench, Case, Options, Turn, told, turn_of
from vnetlab.bench.contenders import BLOCK, HOST_TO_HOST, SETTINGS, TAP, TWO, VNET, Contender, Ends, Nebula, Tinc, Vnet
from vnetlab.bench.guests import TapGuests, VnetGuests
from vnetlab.bench.result import Conditions, Sample
from vnetlab.run import LabError, run
from vnetlab.topology import Kind, Settings, Topology, Wire

ROUTES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
INTERFACES = (1, 4, 16, 64, 256)
NEW_FLOWS = 100_000
"""Flows per second that a container invents."""
SETTLE_S = 1
"""Pause after start or traffic before a daemon is considered idle."""


def _between_hosts(
    load: Callable[[Ends, float], Sample], seconds: float, contenders: Sequence[Contender] = HOST_TO_HOST
) -> Callable[[Options], list[Case]]:
    """Cases of a load between two hosts: every wire, every MTU."""

    def cases(options: Options) -> list[Case]:
        everybody = list(options.vnets or contenders)
        return [
            Case(
                {"wire": wire, "MTU": mtu},
                Settings(name=LAB, vms=0, wire=wire, underlay_mtu=mtu, mtu=mtu),
                [turn_of(contender, lambda ends: load(ends, options.seconds(seconds))) for contender in everybody],
            )
            for wire, mtu in options.settings()
        ]

    return cases


def _vm(options: Options) -> list[Case]:
    """TCP and pings between virtual machines."""
    everybody: list[Contender] = [VnetGuests(vnet) for vnet in options.vnets]
    everybody = everybody or [TapGuests(), VnetGuests(VNET), VnetGuests(BLOCK)]
    return [
        Case(
            {"wire": wire, "MTU": mtu},
            Settings(name=LAB, containers=0, wire=wire, underlay_mtu=mtu, mtu=mtu),
            [
                turn_of(contender, lambda ends: workload.tcp_and_ping(ends, options.seconds(5)))
                for contender in everybody
            ],
        )
        for wire, mtu in options.settings()
    ]


def _small(options: Options) -> list[Case]:
    """64-byte frames on one host and across a link, and a stream of super-frames."""
    seconds = max(3, options.seconds(10))
    vnets = options.vnets or (VNET, BLOCK, TWO)
    local = [*([] if options.vnets else [vhost.Ovs()]), *(vhost.VnetSwitch(vnet) for vnet in vnets)]
    across = [vhost.VnetSwitch(vnet, link=True) for vnet in vnets]

    def turns(load: Callable[..., Sample], switches: Iterable[vhost.Switch], seconds: float) -> list[Turn]:
        return [
            Turn(switch.name, switch.missing, lambda topology, switch=switch: load(switch, topology, seconds))
            for switch in switches
        ]

    def streams(link: bool) -> list[Turn]:
        switches = [vhost.VnetSwitch(vnet, link=link, server=True, pinned=False) for vnet in vnets]
        return turns(vhost.super_frames, switches, options.seconds(5))

    cases = []
    for _, mtu in options.settings():
        settings = Settings(name=LAB, vms=0, containers=0, underlay_mtu=mtu)
        cases.append(
            Case(
                {"path": "link", "MTU": mtu, "load": "64-byte frames"},
                settings,
                turns(vhost.small_frames, across, seconds),
            )
        )
        across_bare = [] if options.vnets else [_bare(options.seconds(5))]
        load = {"path": "link", "MTU": mtu, "load": "TSO stream"}
        cases.append(Case(load, settings, [*across_bare, *streams(link=True)]))
    settings = Settings(name=LAB, vms=0, containers=0)
    one_host = [
        Case({"path": "one host", "load": "64-byte frames"}, settings, turns(vhost.small_frames, local, seconds)),
        Case({"path": "one host", "load": "TSO stream"}, settings, streams(link=False)),
    ]
    return one_host + cases


def _bare(seconds: float) -> Turn:
    """The stream of super-frames over bare UDP sockets, without an overlay."""
    return Turn("bare UDP sockets", lambda: None, lambda topology: vhost.bare_stream(topology, seconds))


def _links(options: Options) -> list[Case]:
    """The cost of sealing a datagram of the usual size, then links of every kind between two hosts."""
    settings = Settings(name=LAB, vms=0, containers=0)
    sealing = [_sealing(vnet) for vnet in options.vnets or (VNET,)]
    cases = [Case({"load": "datagrams of 1440 bytes"}, settings, sealing)]
    for wire, mtu in options.settings():
        settings = Settings(name=LAB, vms=0, wire=wire, underlay_mtu=mtu, mtu=mtu)
        turns = [
            turn_of(each, lambda ends: workload.tcp_and_ping(ends, options.seconds(5)))
            for each in tunnels.everybody(options.vnets)
        ]
        if not options.vnets:
            turns.append(turn_of(tunnels.Relay(), lambda ends: workload.tcp(ends, options.seconds(5))))
        cases.append(Case({"wire": wire, "MTU": mtu}, settings, turns))
    return cases


def _sealing(vnet: Vnet) -> Turn:
    """One run of vnet/examples/seal.rs."""

    def take(_topology: Topology) -> Sample:
        with vnet.own_binaries():
            return json.loads(run([str(vhost.example("seal"))], timeout_s=120))

    return Turn(vnet.name, vnet.missing, take)


def _scale(options: Options) -> list[Case]:
    """Lookups by number of routes, then a path between two containers by number of interfaces."""
    vnets, between = options.vnets or (VNET,), options.vnets or (VNET, TAP)
    settings = Settings(name=LAB, vms=0, containers=0)
    cases = [
        Case({"routes": routes}, settings, [_lookup(vnet, routes) for vnet in vnets])
        for routes in (ROUTES[::5] if options.quick else ROUTES)
    ]
    settings = Settings(name=LAB, vms=0)
    cases += [
        Case({"interfaces": count}, settings, [_interfaces(vnet, count, options.seconds(3)) for vnet in between])
        for count in (INTERFACES[::4] if options.quick else INTERFACES)
    ]
    return cases


def _lookup(vnet: Vnet, routes: int) -> Turn:
    """One run of vnet/examples/lookup.rs."""

    def take(_topology: Topology) -> Sample:
        with vnet.own_binaries():
            program = vhost.example("lookup")
        found = json.loads(run([str(program), str(routes)], timeout_s=120))
        return {name: value for name, value in found.items() if name != "routes"}

    return Turn(vnet.name, vnet.missing, take)


def _interfaces(vnet: Vnet, count: int, seconds: float) -> Turn:
    """TCP and pings between two containers while each vnetd has `count` interfaces."""

    def take(topology: Topology) -> Sample:
        topology = vnet.topology(topology)
        for host in topology.hosts:
            # Keep the other interfaces idle: disable IPv6 neighbour discovery on them.
            machine.execute(host, "sysctl", "-q", "-w", "net.ipv6.conf.default.disable_ipv6=1")
        lines = 'kind = "tap"\n'
        more = "".join(f'\n[[interface]]\nname = "more{i}"\n{lines}device = "more{i}"\n' for i in range(1, count))
        with vnet.daemons(topology, more) as processes:
            containers = topology.machines(Kind.CONTAINER)
            quiet = _idle(processes, seconds)
            sample = workload.tcp_and_ping(Ends(containers[0], containers[-1], processes), seconds)
        return sample | {"daemon_cores_idle": quiet["daemon_cores"], "rss_bytes": quiet["rss_bytes"]}

    return Turn(vnet.name, vnet.missing, take)


def _idle_cases(options: Options) -> list[Case]:
    """Daemons that are idle after traffic."""
    everybody = list(options.vnets) or [*SETTINGS[:4], Tinc(), Nebula()]
    seconds = max(3, options.seconds(20))
    return [
        Case(
            {"interfaces": 1},
            Settings(name=LAB, vms=0),
            [turn_of(contender, lambda ends: _idle_after_traffic(ends, seconds)) for contender in everybody],
        )
    ]


def _kinds(options: Options) -> list[Case]:
    """Two containers of one host behind the smallest forwarder; for revisions, behind each revision's vnetd, by TAP."""
    seconds = options.seconds(2)

    def of(vnet: Vnet) -> Turn:
        def take(topology: Topology) -> Sample:
            with vnet.own_binaries(), kinds.TAP.up(topology) as ends:
                return kinds.load(ends, seconds)

        return Turn(vnet.name, vnet.missing, take)

    turns = [of(vnet) for vnet in options.vnets]
    turns = turns or [turn_of(each, lambda ends: kinds.load(ends, seconds)) for each in kinds.CONTENDERS]
    return [Case({"between": "containers of one host"}, Settings(name=LAB, containers=2, vms=0), turns)]


def _one_host(options: Options) -> list[Case]:
    """TCP and round trips between two containers of one host."""
    seconds = options.seconds(5)

    def load(ends: Ends) -> Sample:
        return workload.tcp(ends, seconds) | workload.rtt(ends, seconds)

    def beside(rate: int) -> Callable[[Topology, Ends], Sample]:
        def scanned(topology: Topology, ends: Ends) -> Sample:
            with workload.new_flows(topology.machines(Kind.CONTAINER)[1], ends.destination, rate):
                return workload.tcp(ends, seconds)

        return scanned

    everybody = list(options.vnets) or [kinds.BRIDGE, VNET, TAP]
    settings = Settings(name=LAB, hosts=1, containers=2, vms=0)
    cases = [Case({"between": "containers of one host"}, settings, [turn_of(each, load) for each in everybody])]
    # The second container of three sends from new addresses.
    settings = replace(settings, containers=3)
    for rate in (0, NEW_FLOWS):
        conditions = {"between": "containers of one host", "new flows per second": rate}
        cases.append(Case(conditions, settings, [told(each, beside(rate)) for each in everybody]))
    return cases


def _control(options: Options) -> list[Case]:
    """Agents of the distributed overlay."""
    scale = control.QUICK if options.quick else control.FULL

    def turn(vnet: Vnet) -> Turn:
        return Turn(vnet.name, vnet.missing, lambda topology: control.measure(vnet, topology, scale))

    conditions = {"hosts": scale.hosts, "MACs": scale.stations, "agents": scale.agents}
    settings = Settings(name=LAB, hosts=1, vms=0, containers=0, store=True)
    return [Case(conditions, settings, [turn(vnet) for vnet in options.vnets or (VNET,)])]


def _idle_after_traffic(ends: Ends, seconds: float) -> Sample:
    """An idle daemon's cost after a stream and pings have ended."""
    workload.tcp_and_ping(ends, 1)
    return _idle(ends.processes, seconds)


def _idle(processes: dict[str, int], seconds: float) -> Sample:
    """Cost of one idle daemon: the average of all."""
    if not processes:
        raise LabError("no daemon runs")
    time.sleep(SETTLE_S)
    before = usage.wakeups(processes.values())
    with usage.measured(processes) as used:
        time.sleep(seconds)
    woken = usage.wakeups(processes.values()) - before
    return {
        "daemon_cores": used.processes_cores / len(processes),
        "wakeups_per_s": woken / used.seconds / len(processes),
        "rss_bytes": sum(usage.rss_bytes(pid) for pid in processes.values()) / len(processes),
    }


def _latency(options: Options) -> list[Case]:
    """Pings by size between containers and between virtual machines; a stream between containers."""
    count = 100 if options.quick else options.pings
    containers = Settings(name=LAB, vms=0)
    both = ((containers, latency.CONTAINERS), (Settings(name=LAB, containers=0), latency.GUESTS))
    everybody = list(options.vnets) or latency.CONTAINERS
    cases = []
    for settings, usual in both:
        guests = settings.vms > 0
        found = [VnetGuests(vnet) for vnet in options.vnets] if guests else list(options.vnets)
        for size in latency.PING_BYTES[:: 3 if options.quick else 1]:

            def load(topology: Topology, ends: Ends, size: int = size) -> Sample:
                workload.meet(ends)
                return latency.counted(topology, ends, lambda: latency.pings(ends, size, count))

            conditions = {"between": "virtual machines" if guests else "containers", "bytes": size}
            cases.append(Case(conditions, settings, [told(each, load) for each in found or usual]))

    def stream(topology: Topology, ends: Ends) -> Sample:
        workload.meet(ends)
        return latency.counted(topology, ends, lambda: latency.stream(ends, max(2, options.seconds(30))))

    return [*cases, Case({"load": "TCP stream"}, containers, [told(each, stream) for each in everybody])]


def _mpi(options: Options) -> list[Case]:
    """Messages by size on the unlimited wire, and the HPC Challenge suite on all, between containers."""
    cases = []

    def case(conditions: Conditions, settings: Settings, run: Callable[[Ends], Sample]) -> None:
        everybody = options.vnets or (mpi.CONTENDERS if settings.wire == Wire.NONE else mpi.ON_SHAPED_WIRES)

        def load(ends: Ends) -> Sample:
            workload.meet(ends)
            with usage.measured(ends.processes) as used:
                sample = run(ends)
            return sample | used.sample()

        cases.append(Case(conditions, settings, [turn_of(each, load) for each in everybody]))

    for wire, mtu in options.settings():
        settings = Settings(name=LAB, vms=0, wire=wire, underlay_mtu=mtu, mtu=mtu)
        under = {"wire": wire, "MTU": mtu}
        for size in mpi.MESSAGE_BYTES[:: 6 if options.quick else 1] if wire == Wire.NONE else ():
            case(under | {"bytes": size}, settings, lambda ends, size=size: mpi.messages(ends, size))
        order = mpi.QUICK_ORDER if options.quick else mpi.ORDER
        case(under | {"load": "HPC Challenge"}, settings, lambda ends, order=order: mpi.challenge(ends, order))
    return cases


def _ablation(options: Options) -> list[Case]:
    """The parts of vnet switched on one by one, between containers and between virtual machines."""
    count = 100 if options.quick else options.pings
    seconds = max(2, options.seconds(5))

    def load(topology: Topology, ends: Ends) -> Sample:
        return latency.step(topology, ends, seconds, count)

    cases = []
    for guests in (False, True):
        found: list[Contender] = [VnetGuests(vnet) if guests else vnet for vnet in options.vnets]
        settings = Settings(name=LAB, containers=0) if guests else Settings(name=LAB, vms=0)
        conditions = {"between": "virtual machines" if guests else "containers"}
        cases.append(Case(conditions, settings, [told(each, load) for each in found or latency.steps(guests=guests)]))
    return cases


_SHAPED = "Wires are shaped by a token bucket on the underlay's devices: compare with native on the same wire."
_RTT = tuple(f"{kind}_{rank}_us" for kind in ("ping", "flood", "tcp") for rank in ("median", "p99"))
_SMALL_NOTES = (
    "testpmd (virtio-user, flow generator) is pinned to processor 1; the switch, or both daemons of a link, to "
    "processor 0.",
    "Frames are those that arrived, both directions together. Forwarding threads of OVS and vnet count busy "
    "cycles themselves: wall-clock time of loop turns with work. All cycles are CPU time times clock rate, "
    "spinning included; of a switch that is not saturated they say too much.",
    "Across a link, cycles are those of both daemons, and per core means the busier daemon's. Two dispatchers "
    "share processor 0: that shows the cost of sharding, not its gain.",
    "The TSO stream goes one way, in frames of 65226 bytes with checksum and segmentation left to the device, "
    "between two guests that wait for interrupts (vnet/examples/guest.rs).",
    "Bare UDP sockets carry the same datagrams without a switch or guests, one system call per message "
    "(vnet/examples/sockets.rs); their CPU time is the sender's.",
)

BENCHES = {
    bench.name: bench
    for bench in (
        Bench(
            "tcp",
            "TCP between containers",
            _between_hosts(workload.tcp, 5),
            ("tcp_bps",),
            ("One iperf3 stream, default settings.", _SHAPED),
            tuple(Wire),
        ),
        Bench(
            "udp",
            "UDP goodput between containers",
            _between_hosts(workload.udp, 2),
            tuple(f"udp_{size}_bps" for size in workload.UDP_WRITES),
            ("iperf3 writes as fast as it can; only datagrams that arrive whole count.", _SHAPED),
        ),
        Bench(
            "rtt",
            "Round trips between containers",
            _between_hosts(workload.rtt, 4),
            _RTT,
            (
                "Pings one per millisecond (ping) and back to back (flood); TCP requests of 64 bytes by sockperf "
                "(tcp). ping prints whole microseconds: medians are interpolated within theirs (grouped data).",
            ),
        ),
        Bench(
            "one-host",
            "Containers of one host",
            _one_host,
            ("tcp_bps", *_RTT),
            (
                "As tcp and rtt, between two containers of one host; against two veth pairs on a kernel bridge. Then "
                "one TCP stream while a third container sends from new MAC addresses (vnet/examples/scan.rs).",
            ),
        ),
        Bench(
            "sockets",
            "Plain UDP sockets between containers",
            _between_hosts(sockets.load, 3, sockets.CONTENDERS),
            ("messages_bps", "fitting_bps", "datagram_oneway_us"),
            (
                "Messages of 64 KB, segmented and coalesced by the kernel (UDP_SEGMENT, UDP_GRO), as fast as the "
                "sender can: only what arrives counts. Datagrams have the size of the device's MTU, or leave 52 bytes, "
                "so that a tunnel over an equal MTU need not fragment them. Then 8 bytes to and fro: half the round "
                "trip. Both ends poll (vnet/examples/sockets.rs).",
            ),
        ),
        Bench("small", "vhost-user ports", _small, ("frames_per_s", "tso_bps_a_core"), _SMALL_NOTES),
        Bench(
            "vm",
            "Virtual machines under QEMU",
            _vm,
            ("tcp_bps", "ping_median_us"),
            (
                "One iperf3 stream, then pings. QEMU emulates the processor where the machine has no KVM.",
                "Time on vCPUs is what a switch can hardly save.",
            ),
        ),
        Bench(
            "scale",
            "Routes and interfaces",
            _scale,
            ("cached_ns", "few_ns", "all_ns"),
            ("Lookups by vnet/examples/lookup.rs, which defines the three kinds.",),
            axis="routes",
        ),
        Bench(
            "kinds",
            "Kinds of interfaces for containers",
            _kinds,
            ("tcp_bps", "small_frames_per_s", "flood_median_us"),
            (
                "The smallest forwarder between two containers of one host, over TAP and over packet sockets "
                "(packet(7)) with PACKET_VNET_HDR: vnet/examples/kinds/. Datagrams of 64 bytes; pings one per "
                "millisecond and back to back (flood).",
            ),
        ),
        Bench(
            "links",
            "Links",
            _links,
            ("seal_bps", "open_bps", "tcp_bps", "ping_median_us"),
            (
                "Sealing and opening on one core by vnet/examples/seal.rs. One iperf3 stream with default "
                "settings, then pings. VXLAN to and from the kernel: a container behind vnetd, a kernel VXLAN "
                "device on the other host. TCP relays: a Python relay on each host in place of vnetd, iperf3 "
                "through both.",
            ),
        ),
        Bench(
            "control",
            "Agents of the distributed overlay",
            _control,
            ("view_s", "move_p99_s", "agent_cores", "rss_bytes"),
            (
                "One etcd and complete agents in one process (vnetd/examples/agents.rs); other hosts exist as "
                "records. Cores and RSS are per agent, while one address moves per second.",
            ),
        ),
        Bench(
            "latency",
            "Latency by size",
            _latency,
            ("ping_median_us", "ping_p99_us"),
            (
                "Pings one per millisecond, or back to back when they take longer. Frames are counted where they "
                "enter or leave a guest; wake-ups are those of all threads of vnetd.",
            ),
            axis="bytes",
        ),
        Bench(
            "mpi",
            "MPI programs",
            _mpi,
            ("oneway_us", "exchange_us", "pingpong_latency_us", "ring_bytes_per_s", "ptrans_bytes_per_s", "fft_flops"),
            (
                "Two ranks, one in each container, on Open MPI over TCP (lab/vnetlab/bench/mpi.py). By bytes: NetPIPE, "
                "ping-pong one way and messages both ways at once. Otherwise the HPC Challenge suite (Debian's hpcc): "
                "largest ping-pong latency, its bandwidth, latency and bandwidth of randomly ordered rings, PTRANS, "
                "FFT and RandomAccess.",
                "Ranks poll, and yield while they wait: they take every processor that a daemon leaves them.",
                _SHAPED,
            ),
            tuple(Wire),
            axis="bytes",
        ),
        Bench(
            "interconnect",
            "The interconnect",
            interconnect.cases,
            ("goodput_bps", "datagram_oneway_us", "oneway_us", "application_s_a_gb"),
            (
                "Writes: 2 MiB each (TCP: one iperf3 stream; UDP sockets: 64 KB messages without a protocol), then 8 "
                "bytes to and fro (TCP: 16 bytes, by sockets that sleep or poll, whichever is faster): half the round "
                "trip. CPU time is that of both applications. By bytes: NetPIPE on Open MPI, over the libfabric "
                "provider or TCP; the HPC Challenge suite passes all its checks. On one host messages have 1 MiB; "
                "memcpy is one copy into memory that two processes share (interconnect/examples/copies.rs).",
                "Faults: writes of 256 KiB through a relay on a third host, which handles each datagram alone "
                "(interconnect/examples/faults.rs). Every write has other bytes, and the receiver checks all of them. "
                "A late datagram is overtaken by 8 others.",
                "Beside a bulk guest: 8-byte writes while other containers of the same hosts stream 2 MiB writes. With "
                "priority, the guest's processes have the scheduling class SCHED_FIFO.",
                "Virtual machines are emulated by QEMU: compare them only with each other. 8-byte writes and writes of "
                "1 MiB by the engine of their hosts' vnetd, past their kernels, and by UDP and TCP of their kernels.",
                _SHAPED,
            ),
            axis="bytes",
        ),
        Bench(
            "ablation",
            "Which part buys what",
            _ablation,
            ("ping_median_us", "flood_median_us", "tcp_bps"),
            (
                "56-byte pings, one per millisecond and back to back (flood), then one iperf3 stream. Rows add "
                "one part of vnet after the other. The floor is the smallest forwarder between a TAP and a "
                "socket: vnet/examples/floor.rs. For virtual machines, 300 pings, one per 10 ms, are split into "
                "the overlay's round trip and the guests' own time; small datagrams have 64 bytes.",
            ),
        ),
        Bench(
            "idle",
            "Idle daemons",
            _idle_cases,
            ("daemon_cores", "rss_bytes"),
            ("One daemon, from one second after its last traffic.",),
        ),
    )
}


def cases(bench: Bench, options: Options) -> list[Case]:
    """The cases of a bench with the selected contenders. Raises LabError if none matches."""
    options = replace(options, wires=options.wires or bench.wires)
    found, all_cases = [], bench.cases(options)
    names = {turn.contender for case in all_cases for turn in case.turns}
    for case in all_cases:
        wanted = [turn for turn in case.turns if _wanted(turn.contender, options.contenders, names)]
        if wanted:
            found.append(replace(case, turns=wanted))
    if not found:
        raise LabError(f"bench {bench.name} has no contender like {' or '.join(options.contenders)}")
    return found


def _wanted(name: str, parts: tuple[str, ...], names: set[str]) -> bool:
    """Whether a contender was asked for. A part that is a contender's whole name means that one only."""
    return not parts or any(name == part or (part not in names and part.lower() in name.lower()) for part in parts)
