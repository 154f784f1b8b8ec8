"""Experiments with applications: the NAS Parallel Benchmarks, the HPC Challenge suite, the advective application."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from vnetlab import measure
from vnetlab.bench import mpi, workload
from vnetlab.bench.case import Case
from vnetlab.bench.contenders import Contender, Ends
from vnetlab.bench.result import Conditions, Sample
from vnetlab.evaluate import ranks
from vnetlab.evaluate.kinds import ALONE, KINDS, NATIVE, OVER_IP, SHARED, TAP
from vnetlab.evaluate.options import EvaluateOptions, case, simple
from vnetlab.topology import Kind, Topology, Wire

KERNELS = ("ep", "cg", "is", "mg", "ft", "sp", "bt", "lu")
QUICK_KERNELS = ("ep", "cg", "is")
RANKS_A_HOST = (1, 2, 3, 4)
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
    crossings = ranks.spread(count, options.hosts, count - 1)
    cases = []
    for wire, mtu in options.settings():
        for kernel in options.kernels or (QUICK_KERNELS if options.quick else KERNELS):

            def load(topology: Topology, ends: Ends, _kind: Contender, kernel: str = kernel) -> Sample:
                return ranks.measure(topology, ends, kernel, [options.size], crossings)

            conditions = {"wire": wire, "MTU": mtu, "kernel": kernel.upper(), "class": options.size, "ranks": count}
            conditions |= options.named
            cases.append(case(conditions, options.topology(wire, mtu), KINDS, load))
    return cases


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
                cases.append(case(conditions, options.topology(wire, mtu, 2, hosts=2), [*KINDS, ALONE], load))
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

    return case(conditions, options.topology(wire, mtu, len(hosts) // options.hosts), [*KINDS, *more], load)


def placement(options: EvaluateOptions) -> list[Case]:
    """Two ranks per host, every dimension split, with all or few messages between hosts (paper 003, figure 2)."""
    count = 2 * options.hosts
    splits = (f"{count}x1x1", f"1x{count}x1", f"1x1x{count}")
    return [
        _advect(options, wire, mtu, ranks.spread(count, options.hosts, crossings), split, SHARED)
        for wire, mtu in options.settings()
        for crossings in (count - 1, options.hosts - 1)
        for split in splits[: 1 if options.quick else 3]
    ]


def scaling(options: EvaluateOptions) -> list[Case]:
    """More and more ranks in a row, all messages between hosts (paper 003, figure 3)."""
    counts = [options.hosts * each for each in options.some(RANKS_A_HOST)]
    return [
        _advect(options, wire, mtu, ranks.spread(count, options.hosts, count - 1), f"{count}x1x1")
        for wire, mtu in options.settings()
        for count in counts
    ]


def share(options: EvaluateOptions) -> list[Case]:
    """Four ranks on each host, more and more of their messages between hosts (paper 003, figure 4)."""
    count = max(RANKS_A_HOST) * options.hosts
    fewest, all_of_them = options.hosts - 1, count - 1
    steps = tuple(fewest + (all_of_them - fewest) * step // (SHARES - 1) for step in range(SHARES))
    return [
        _advect(options, wire, mtu, ranks.spread(count, options.hosts, each), f"{count}x1x1")
        for wire, mtu in options.settings()
        for each in options.some(steps)
    ]
