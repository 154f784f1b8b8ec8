"""Places MPI ranks on hosts, and runs a workload on them."""

from dataclasses import dataclass

from vnetlab import machine, workloads
from vnetlab.bench import usage, workload
from vnetlab.bench.contenders import Ends
from vnetlab.bench.mpi import START_S, TCP, launcher
from vnetlab.bench.result import Sample
from vnetlab.run import LabError
from vnetlab.topology import Kind, Node, Topology

PROGRAMS = workloads.SOURCES / "build"
RUN_S = 1_200
"""Time limit of a workload."""
INTER, HYBRID, INTRA, ONE_HOST = "inter", "hybrid", "intra", "one host"
"""Placements: with all, some and the fewest possible messages between hosts (paper 003), and none."""
PARTS = ("compute_s", "pack_s", "send_s", "wait_s")


@dataclass(frozen=True)
class Placement:
    """Where ranks run (paper 003, figure 1)."""

    name: str
    hosts: list[int]
    """The host of each rank, counted from 0."""


def placements(ranks: int, hosts: int) -> list[Placement]:
    """Placements of ranks in a row: neighbours on different hosts, about half of them, as few as possible, none."""
    fewest, most = hosts - 1, ranks - 1
    found = [(INTER, most), (HYBRID, (fewest + most) // 2), (INTRA, fewest), (ONE_HOST, 0)]
    return [Placement(name, spread(ranks, hosts, crossings)) for name, crossings in found]


def grid_placements(hosts: int) -> list[Placement]:
    """Placements of 2 x `hosts` x 1 ranks: neighbours on different hosts, or only those of the second dimension."""
    columns = range(hosts)
    inter = [(row + column) % hosts for row in range(2) for column in columns]
    return [Placement(INTER, inter), Placement(HYBRID, [*columns, *columns])]


def between_hosts(hosts: list[int], split: str) -> int:
    """Percentage of messages of the advective application that go to another host; ranks are split as in advect.c."""
    sizes = [int(word) for word in split.split("x")]
    steps = (sizes[1] * sizes[2], sizes[2], 1)
    pairs = [
        (rank, rank + step)
        for rank in range(len(hosts))
        for size, step in zip(sizes, steps, strict=True)
        if rank // step % size + 1 < size
    ]
    return round(100 * sum(hosts[one] != hosts[other] for one, other in pairs) / max(1, len(pairs)))


def spread(ranks: int, hosts: int, crossings: int) -> list[int]:
    """The host of each rank, counted from 0, such that `crossings` of `ranks` - 1 neighbours are on different hosts.

    Every host gets the same number of ranks, unless no neighbours are on different hosts: then all are on the first.
    Raises LabError if that is impossible.
    """
    if crossings == 0:
        return [0] * ranks
    blocks = crossings + 1
    if ranks % hosts or not hosts <= blocks <= ranks:
        raise LabError(f"{ranks} ranks in a row on {hosts} hosts cannot have {crossings} neighbours on different hosts")
    sizes: list[int] = []
    for block in range(blocks):
        # A host divides its ranks among its blocks: every hosts-th one.
        own = len(range(block % hosts, blocks, hosts))
        place, share = block // hosts, ranks // hosts
        sizes.append(share * (place + 1) // own - share * place // own)
    return [block % hosts for block, size in enumerate(sizes) for _ in range(size)]


def nodes(topology: Topology, ends: Ends, hosts: list[int]) -> list[Node]:
    """The machine of each rank: its own container or virtual machine, or the host itself for native."""
    kind = ends.source.kind
    if kind is Kind.HOST:
        return [topology.hosts[host] for host in hosts]
    free = {host: iter(topology.machines(kind, host + 1)) for host in set(hosts)}
    return [next(free[host]) for host in hosts]


def measure(
    topology: Topology, ends: Ends, kernel: str, arguments: list[str], hosts: list[int], transports: str = TCP
) -> Sample:
    """Runs a workload with a rank on each of these hosts. Raises LabError if its result is wrong."""
    workload.meet(ends)
    name = f"{kernel}-mpi"
    program = name if ends.source.kind is Kind.VM else str(PROGRAMS / name)
    with (
        launcher(nodes(topology, ends, hosts), transports) as mpirun,
        usage.measured(ends.processes) as used,
    ):
        first = nodes(topology, ends, hosts)[0]
        status, text = machine.attempt(first, *mpirun, program, *arguments, timeout_s=START_S + RUN_S)
    figures = workloads.report(kernel, status, text)
    sample = {"operations_per_s": figures["mops"] * 1e6, "whole_s": figures["seconds"]}
    cores = {"daemon_cores": used.processes_cores, "system_cores": used.system_cores}
    return sample | {part: figures[part] for part in PARTS if part in figures} | cores


def alone(node: Node, kernel: str, size: str, threads: int) -> Sample:
    """Runs a workload on one machine: serial, or with several threads by OpenMP."""
    variant = "openmp" if threads > 1 else "serial"
    words = [
        "env",
        f"OMP_NUM_THREADS={threads}",
        "OMP_WAIT_POLICY=passive",
        str(PROGRAMS / f"{kernel}-{variant}"),
        size,
    ]
    figures = workloads.report(kernel, *machine.attempt(node, *words, timeout_s=RUN_S))
    return {"operations_per_s": figures["mops"] * 1e6, "whole_s": figures["seconds"]}


def build() -> None:
    """Builds the workloads: serial, by OpenMP, and by MPI."""
    workloads.build(PROGRAMS)
