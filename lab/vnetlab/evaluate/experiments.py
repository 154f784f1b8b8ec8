"""The experiments: benches whose contenders are the kinds of data paths, with the cases of the papers."""

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vnetlab import measure
from vnetlab.bench import latency, mpi, usage, workload
from vnetlab.bench.contenders import Contender, Ends
from vnetlab.bench.result import Conditions, Sample
from vnetlab.bench.suite import Bench, Case, Options, Turn
from vnetlab.evaluate import ranks
from vnetlab.evaluate.kinds import KINDS, SHARED
from vnetlab.topology import Kind, Settings, Topology, Wire

LAB = "evaluate"
KERNELS = ("ep", "cg", "is", "mg", "ft", "sp", "bt", "lu")
QUICK_KERNELS = ("ep", "cg", "is")
PAIRS = (1, 2, 3, 4)
RANKS_A_HOST = (1, 2, 3, 4)
SHARES = 4
"""Steps from as few messages between hosts as possible to all."""
RANKS = 2
"""Ranks of timed runs: the machine has two processors."""
MESSAGE_BYTES = (64, 1_024, 16_384, 262_144, 4 << 20)
PING_BYTES = latency.PING_BYTES


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Selection and duration of a run."""

    size: str = "W"
    """Class of the workloads: S, W or A."""
    hosts: int = 2
    lab: str = LAB
    """Name of the lab."""
    kernels: tuple[str, ...] = ()
    """Kernels of the NAS Parallel Benchmarks; empty selects all."""

    def topology(self, wire: str, mtu: int, containers: int = 1, hosts: int = 0) -> Settings:
        """Settings of a lab."""
        return Settings(
            name=self.lab,
            hosts=hosts or self.hosts,
            vms=0,
            containers=containers,
            wire=wire,
            underlay_mtu=mtu,
            mtu=mtu,
        )

    @property
    def named(self) -> Conditions:
        """The number of hosts as a condition, unless it is the usual one."""
        return {} if self.hosts == 2 else {"hosts": self.hosts}

    def some(self, values: tuple) -> tuple:
        """All values, or in a quick run the first and the last."""
        return (values[0], values[-1]) if self.quick else values


@dataclass(frozen=True)
class Experiment(Bench):
    """A bench of the evaluation."""

    relative: bool = False
    """Whether plots show figures as multiples of native ones."""


Load = Callable[[Topology, Ends, Contender], Sample]


def _case(conditions: Conditions, settings: Settings, kinds: Iterable[Contender], load: Load) -> Case:
    """A case in which every kind has a turn under this load."""

    def turn(kind: Contender) -> Turn:
        def take(topology: Topology) -> Sample:
            with kind.up(topology) as ends:
                return load(topology, ends, kind)

        return Turn(kind.name, kind.missing, take)

    return Case(conditions, settings, [turn(kind) for kind in kinds])


def _simple(load: Callable[[Ends], Sample]) -> Load:
    """A load between the two ends, with the CPU time of the daemons."""

    def measured(_topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        workload.meet(ends)
        with usage.measured(ends.processes) as used:
            sample = load(ends)
        return used.sample() | sample

    return measured


def _nas(options: EvaluateOptions) -> list[Case]:
    """Each kernel with a rank on each host."""
    count = max(RANKS, options.hosts)
    crossings = ranks.spread(count, options.hosts, count - 1)
    cases = []
    for wire, mtu in options.settings():
        for kernel in options.kernels or (QUICK_KERNELS if options.quick else KERNELS):

            def load(topology: Topology, ends: Ends, _kind: Contender, kernel: str = kernel) -> Sample:
                return ranks.measure(topology, ends, kernel, [options.size], crossings)

            conditions = {"wire": wire, "MTU": mtu, "kernel": kernel.upper(), "class": options.size, "ranks": count}
            conditions |= options.named
            cases.append(_case(conditions, options.topology(wire, mtu), KINDS, load))
    return cases


def _advect(options: EvaluateOptions, wire: str, mtu: int, hosts: list[int], split: str, *more: Contender) -> Case:
    """The advective application with a rank on each of these hosts; `more` are contenders beside the kinds."""
    crossings = sum(one != other for one, other in itertools.pairwise(hosts))
    conditions: Conditions = {
        "wire": wire,
        "MTU": mtu,
        "class": options.size,
        "ranks": len(hosts),
        "split": split,
        "% of messages between hosts": round(100 * crossings / (len(hosts) - 1)),
        **options.named,
    }

    def load(topology: Topology, ends: Ends, kind: Contender) -> Sample:
        transports = mpi.SHARED_MEMORY if kind is SHARED else mpi.TCP
        return ranks.measure(topology, ends, "advect", [options.size, split], hosts, transports)

    return _case(conditions, options.topology(wire, mtu, len(hosts) // options.hosts), [*KINDS, *more], load)


def _placement(options: EvaluateOptions) -> list[Case]:
    """Two ranks per host, every dimension split, with all or few messages between hosts (paper 003, figure 2)."""
    count = 2 * options.hosts
    splits = (f"{count}x1x1", f"1x{count}x1", f"1x1x{count}")
    return [
        _advect(options, wire, mtu, ranks.spread(count, options.hosts, crossings), split, SHARED)
        for wire, mtu in options.settings()
        for crossings in (count - 1, options.hosts - 1)
        for split in splits[: 1 if options.quick else 3]
    ]


def _scaling(options: EvaluateOptions) -> list[Case]:
    """More and more ranks in a row, all messages between hosts (paper 003, figure 3)."""
    counts = [options.hosts * each for each in options.some(RANKS_A_HOST)]
    return [
        _advect(options, wire, mtu, ranks.spread(count, options.hosts, count - 1), f"{count}x1x1")
        for wire, mtu in options.settings()
        for count in counts
    ]


def _share(options: EvaluateOptions) -> list[Case]:
    """Four ranks on each host, more and more of their messages between hosts (paper 003, figure 4)."""
    count = max(RANKS_A_HOST) * options.hosts
    fewest, all_of_them = options.hosts - 1, count - 1
    steps = tuple(fewest + (all_of_them - fewest) * step // (SHARES - 1) for step in range(SHARES))
    return [
        _advect(options, wire, mtu, ranks.spread(count, options.hosts, each), f"{count}x1x1")
        for wire, mtu in options.settings()
        for each in options.some(steps)
    ]


def _pairs(options: EvaluateOptions) -> list[Case]:
    """One to four pairs of containers at once (paper 003, tables 1 and 2)."""
    seconds = options.seconds(5)
    cases = []
    for wire, mtu in options.settings():
        for pairs in options.some(PAIRS):

            def load(topology: Topology, ends: Ends, _kind: Contender, pairs: int = pairs) -> Sample:
                workload.meet(ends)
                with usage.measured(ends.processes) as used:
                    rate = _at_once(topology, ends, pairs, seconds)
                return {"aggregate_bps": rate} | used.sample()

            conditions = {"wire": wire, "MTU": mtu, "pairs": pairs}
            cases.append(_case(conditions, options.topology(wire, mtu, pairs, hosts=2), KINDS, load))
    return cases


def _at_once(topology: Topology, ends: Ends, pairs: int, seconds: float) -> float:
    """One TCP stream in each pair of containers at once, or as many streams between the hosts; the sum of the rates."""
    if ends.source.kind is Kind.HOST:
        return measure.throughput(ends.source, ends.destination, "--parallel", str(pairs), seconds=seconds)
    sources, destinations = (topology.machines(Kind.CONTAINER, host)[:pairs] for host in (1, 2))

    def stream(number: int) -> float:
        return measure.throughput(sources[number], destinations[number], seconds=seconds)

    with ThreadPoolExecutor(pairs) as pool:
        return sum(pool.map(stream, range(pairs)))


def _between_two(
    values: Callable[[EvaluateOptions], Iterable[Conditions]],
    load: Callable[[EvaluateOptions, Conditions, Ends], Sample],
) -> Callable[[EvaluateOptions], list[Case]]:
    """Cases of a load between two containers: every wire and MTU, and these further conditions."""

    def cases(options: EvaluateOptions) -> list[Case]:
        return [
            _case(
                {"wire": wire, "MTU": mtu, **more},
                options.topology(wire, mtu, hosts=2),
                KINDS,
                _simple(lambda ends, more=more: load(options, more, ends)),
            )
            for wire, mtu in options.settings()
            for more in values(options)
        ]

    return cases


def _streams(options: EvaluateOptions, _conditions: Conditions, ends: Ends) -> Sample:
    """TCP, and UDP by size of writes."""
    return workload.udp(ends, options.seconds(2)) | workload.tcp(ends, options.seconds(5))


def _pings(options: EvaluateOptions, conditions: Conditions, ends: Ends) -> Sample:
    return latency.pings(ends, int(conditions["bytes"]), 100 if options.quick else options.pings)


def _messages(_options: EvaluateOptions, conditions: Conditions, ends: Ends) -> Sample:
    return mpi.messages(ends, int(conditions["bytes"]))


def _challenge(options: EvaluateOptions, _conditions: Conditions, ends: Ends) -> Sample:
    return mpi.challenge(ends, mpi.QUICK_ORDER if options.quick else mpi.ORDER)


_WIRES = (Wire.NONE, Wire.GIGABIT, Wire.TEN_GIGABIT)
_SHAPED = "Wires are shaped by a token bucket on the underlay's devices: compare with native on the same wire."
_RANKS = (
    "Ranks poll, and yield while they wait: they take every processor that a daemon leaves them. Timed runs have "
    "two ranks; with more ranks than processors, times contain waiting for a processor."
)
EXPERIMENTS = {
    each.name: each
    for each in (
        Experiment(
            "streams",
            "TCP throughput and UDP goodput",
            _between_two(lambda _: [{}], _streams),
            ("tcp_bps", "udp_64000_bps"),
            (
                "iperf3, one TCP stream; UDP writes as fast as it can, of which only those that arrive whole count.",
                _SHAPED,
            ),
            _WIRES,
        ),
        Experiment(
            "pings",
            "Round trips by size",
            _between_two(lambda options: [{"bytes": size} for size in options.some(PING_BYTES)], _pings),
            ("ping_median_us", "ping_p99_us"),
            ("ping, one per millisecond, or back to back when a round trip takes longer.",),
            axis="bytes",
        ),
        Experiment(
            "messages",
            "MPI messages by size",
            _between_two(lambda options: [{"bytes": size} for size in options.some(MESSAGE_BYTES)], _messages),
            ("oneway_us", "exchange_bps"),
            ("NetPIPE on Open MPI over TCP: ping-pong one way, then both directions at once.", _RANKS),
            (Wire.NONE, Wire.TEN_GIGABIT),
            axis="bytes",
        ),
        Experiment(
            "challenge",
            "HPC Challenge",
            _between_two(lambda _: [{}], _challenge),
            ("pingpong_latency_us", "pingpong_bytes_per_s", "ptrans_bytes_per_s", "fft_flops", "updates_per_s"),
            ("The HPC Challenge suite (Debian's hpcc) with a rank on each of two hosts.", _RANKS, _SHAPED),
            _WIRES,
        ),
        Experiment(
            "nas",
            "NAS Parallel Benchmarks",
            _nas,
            ("operations_per_s",),
            (
                "The kernels of docs/workloads.md with a rank on each host. A run whose result does not verify is a "
                "failure. Plots show multiples of native.",
                _RANKS,
                _SHAPED,
            ),
            _WIRES,
            relative=True,
        ),
        Experiment(
            "pairs",
            "Pairs of containers at once",
            _pairs,
            ("aggregate_bps",),
            ("One TCP stream in each pair; native has as many streams between the hosts. Sum of all rates.", _SHAPED),
            _WIRES,
            axis="pairs",
        ),
        Experiment(
            "placement",
            "Advective application by placement",
            _placement,
            ("whole_s", "compute_s", "wait_s"),
            ("Ranks in a row, two on each host: all messages between hosts, or as few as possible.", _RANKS),
            _WIRES,
        ),
        Experiment(
            "scaling",
            "Advective application by number of ranks",
            _scaling,
            ("whole_s", "compute_s"),
            ("Ranks in a row, neighbours always on different hosts.", _RANKS),
            (Wire.TEN_GIGABIT,),
            axis="ranks",
        ),
        Experiment(
            "share",
            "Advective application by share of messages between hosts",
            _share,
            ("whole_s", "wait_s"),
            ("Ranks in a row, four on each host.", _RANKS),
            (Wire.TEN_GIGABIT,),
            axis="% of messages between hosts",
        ),
    )
}
