"""Experiments with applications: the NAS Parallel Benchmarks, the HPC Challenge suite, the advective application."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from vnetlab import measure
from vnetlab.bench import mpi, workload
from vnetlab.bench.case import Case
from vnetlab.bench.contenders import Contender, Ends
from vnetlab.bench.result import Conditions, Sample
from vnetlab.evaluate import ranks
from vnetlab.evaluate.kinds import ALONE, JUDGED, KINDS, NATIVE, ON_ONE_HOST, OVER_IP, SHARED, TAP
from vnetlab.evaluate.options import EvaluateOptions, Under, case, simple
from vnetlab.topology import Kind, Topology, Wire

KERNELS = ("ep", "cg", "is", "mg", "ft", "sp", "bt", "lu")
QUICK_KERNELS = ("cg", "is")
COUNTED_KERNELS = ("ep", "bt", "cg", "sp", "is")
"""Those of paper 002, figure 4, and IS, of which only bandwidth counts."""
IN_ROWS = ("sp", "bt", "lu")
"""Kernels whose class S has rows for at most 6 ranks."""
COUNTS = (1, 2, 4, 8)
CHECKED_SIZE = "S"
"""Class of runs with more ranks than are timed, unless it has too few rows: they show that results are right."""
RANKS_A_HOST = (1, 2, 3, 4)
LONG = {"A": "B"}
"""The class of the advective application of which two ranks compute for seconds, by the class chosen."""
SHARES = 4
"""Steps from as few messages between hosts as possible to all."""
THREADS = (1, 2)
RANKS = 2
"""Ranks of timed runs: the machine has two processors."""
IPOIB_MTUS = (2044, 65_520)
"""MTUs of IP over InfiniBand, datagram and connected mode (RFC 4391, RFC 4755)."""
QUICK_ORDER = 64
"""Rows of the HPC Challenge's matrices in a quick run."""
BESIDE_BPS = 500_000_000
"""Rate of the stream beside a computing application."""


def nas(options: EvaluateOptions) -> list[Case]:
    """Each kernel with a rank on each host."""
    count = max(RANKS, options.hosts)
    kernels = options.kernels or (QUICK_KERNELS if options.quick else KERNELS)
    return [
        _kernel(options, under, kernel, options.size, count, options.kinds(under))
        for under in options.settings()
        for kernel in kernels
    ]


def counts(options: EvaluateOptions) -> list[Case]:
    """A few kernels with 1 to 8 ranks (paper 002, figure 4)."""
    return [
        _kernel(options, under, kernel, _counted_size(options, kernel, count), count, JUDGED)
        for under in options.settings()
        for kernel in options.kernels or (QUICK_KERNELS[:1] if options.quick else COUNTED_KERNELS)
        for count in (COUNTS[2:3] if options.quick else COUNTS)
    ]


def _counted_size(options: EvaluateOptions, kernel: str, count: int) -> str:
    """The class of a kernel with this number of ranks."""
    return options.size if count <= RANKS or kernel in IN_ROWS else CHECKED_SIZE


def _kernel(
    options: EvaluateOptions, under: Under, kernel: str, size: str, count: int, kinds: Iterable[Contender]
) -> Case:
    """A kernel with ranks in a row, neighbours on different hosts as far as each host has as many ranks as others."""
    wire, mtu = under
    hosts = [rank % options.hosts for rank in range(count)]

    def load(topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        return ranks.measure(topology, ends, kernel, [size], hosts)

    conditions: Conditions = {"wire": wire, "MTU": mtu, "kernel": kernel.upper(), "class": size, "ranks": count}
    if count > max(RANKS, options.hosts):
        conditions["more ranks than processors"] = "yes"
    a_host = max(map(hosts.count, hosts))
    return case(conditions | options.named, options.topology(wire, mtu, a_host), kinds, load)


def challenge(options: EvaluateOptions, _conditions: Conditions, ends: Ends) -> Sample:
    """The HPC Challenge suite."""
    return mpi.challenge(ends, QUICK_ORDER if options.quick else mpi.ORDER)


def ipoib(options: EvaluateOptions) -> list[Case]:
    """The HPC Challenge on underlays with the MTUs of IP over InfiniBand (paper 000, figures 15 and 16)."""
    load = simple(lambda ends: challenge(options, {}, ends))
    kinds = (NATIVE, TAP) if options.quick else OVER_IP
    return [
        case({"wire": Wire.NONE, "MTU": mtu}, options.topology(Wire.NONE, mtu, hosts=2, tun=True), kinds, load)
        for mtu in IPOIB_MTUS[: 1 if options.quick else 2]
    ]


def single(options: EvaluateOptions) -> list[Case]:
    """Serial and OpenMP kernels beside a stream that leaves their host (paper 002, figure 3)."""
    cases = []
    kinds = [*(KINDS if options.contenders else JUDGED), ALONE]
    for wire, mtu in options.settings():
        for kernel in options.kernels or (QUICK_KERNELS[:1] if options.quick else KERNELS):
            for threads in THREADS:

                def load(
                    topology: Topology, ends: Ends, kind: Contender, kernel: str = kernel, threads: int = threads
                ) -> Sample:
                    with contextlib.nullcontext() if kind is ALONE else _stream_beside(topology, ends):
                        return ranks.alone(ends.source, kernel, options.size, threads)

                conditions = {"wire": wire, "MTU": mtu, "kernel": kernel.upper(), "class": options.size}
                conditions |= {"threads": threads}
                cases.append(case(conditions, options.topology(wire, mtu, 2, hosts=2), kinds, load))
    return cases


@contextlib.contextmanager
def _stream_beside(topology: Topology, ends: Ends) -> Iterator[None]:
    """A TCP stream of a limited rate between other containers of the same hosts while the context lasts."""
    workload.meet(ends)
    source, destination = ends.source, ends.destination
    if source.kind is not Kind.HOST:
        source, destination = (topology.machines(Kind.CONTAINER, host)[1] for host in (1, 2))
    ended = threading.Event()

    def stream() -> None:
        while not ended.is_set():
            measure.throughput(source, destination, "--bitrate", str(BESIDE_BPS), seconds=1)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        try:
            yield
        finally:
            ended.set()
        running.result()


def _advect(
    options: EvaluateOptions, under: Under, place: ranks.Placement, split: str, bound: Contender, *, long: bool = False
) -> Case:
    """The advective application with ranks placed on hosts; `bound` is a contender beside the kinds."""
    wire, mtu = under
    size = LONG.get(options.advect, options.advect) if long else options.advect
    hosts = place.hosts
    conditions: Conditions = {
        "wire": wire,
        "MTU": mtu,
        "class": size,
        "ranks": len(hosts),
        "split": split,
        "placement": place.name,
        "% of messages between hosts": ranks.between_hosts(hosts, split),
        **options.named,
    }

    def load(topology: Topology, ends: Ends, kind: Contender) -> Sample:
        transports = mpi.SHARED_MEMORY if kind in (SHARED, ON_ONE_HOST) else mpi.TCP
        where = [0] * len(hosts) if kind is ON_ONE_HOST else hosts
        return ranks.measure(topology, ends, "advect", [size, split], where, transports)

    a_host = max(map(hosts.count, hosts))
    return case(conditions, options.topology(wire, mtu, a_host), [*KINDS, bound], load)


def _unnamed(case: Case, name: str) -> Case:
    """The case without one of its conditions, which follows from another."""
    return replace(case, conditions={key: value for key, value in case.conditions.items() if key != name})


def placement(options: EvaluateOptions) -> list[Case]:
    """Two ranks per host, by placement and split (paper 003, figure 2)."""
    count = 2 * options.hosts
    lines = (f"{count}x1x1", f"1x{count}x1", f"1x1x{count}")
    grid = f"2x{options.hosts}x1"
    line = {each.name: each for each in ranks.placements(count, options.hosts)}
    squares = {each.name: each for each in ranks.grid_placements(options.hosts)}
    chosen = [(line[name], split) for split in lines for name in (ranks.INTER, ranks.INTRA)]
    chosen += [(line[ranks.HYBRID], lines[0]), (line[ranks.ONE_HOST], lines[0])]
    chosen += [(place, grid) for place in squares.values()]
    if options.quick:
        chosen = [(line[ranks.ONE_HOST], lines[0]), (squares[ranks.INTER], grid)]
    return [_advect(options, under, place, split, SHARED) for under in options.settings() for place, split in chosen]


def scaling(options: EvaluateOptions) -> list[Case]:
    """More and more ranks in a row, all messages between hosts (paper 003, figure 3)."""
    cases = []
    for under in options.settings():
        for each in RANKS_A_HOST[:1] if options.quick else RANKS_A_HOST:
            count = options.hosts * each
            place = ranks.Placement(ranks.INTER, ranks.spread(count, options.hosts, count - 1))
            found = _advect(options, under, place, f"{count}x1x1", ON_ONE_HOST, long=True)
            # The split follows from the number of ranks, and would make a plot's line of each point.
            cases.append(_unnamed(found, "split"))
    return cases


def share(options: EvaluateOptions) -> list[Case]:
    """Four ranks on each host, more and more of their messages between hosts (paper 003, figure 4)."""
    count = (2 if options.quick else max(RANKS_A_HOST)) * options.hosts
    fewest, all_of_them = options.hosts - 1, count - 1
    steps = [fewest + (all_of_them - fewest) * step // (SHARES - 1) for step in range(SHARES)]
    places = tuple(ranks.Placement("", ranks.spread(count, options.hosts, crossings)) for crossings in steps)
    return [
        _unnamed(_advect(options, under, place, f"{count}x1x1", SHARED), "placement")
        for under in options.settings()
        for place in options.some(places)
    ]
