"""What experiments are made of: the options of a run, and cases in which every kind of data path has a turn."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vnetlab import remote
from vnetlab.bench import usage, workload
from vnetlab.bench.case import Bench, Case, Options, Turn
from vnetlab.bench.contenders import Contender, Ends
from vnetlab.bench.result import METRICS, Conditions, Sample
from vnetlab.evaluate.kinds import DIRECT, KINDS
from vnetlab.remote import Machine
from vnetlab.topology import Settings, Topology

LAB = "evaluate"
CPU_TIMES = {"cpu_s_a_gb", *(name for name, metric in METRICS.items() if metric.unit == "cores")}
"""Metrics of CPU time."""


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Selection and duration of a run."""

    size: str = "W"
    """Class of the workloads: S, W or A."""
    hosts: int = 2
    lab: str = LAB
    """Name of the lab."""
    long: bool = False
    """Whether the stream whose variation is measured takes an hour."""
    machines: tuple[Machine, ...] = ()
    """Other machines that carry the hosts; empty: hosts are namespaces of this one."""
    kernels: tuple[str, ...] = ()
    """Kernels of the NAS Parallel Benchmarks; empty selects all."""

    def topology(self, wire: str, mtu: int, containers: int = 1, hosts: int = 0, *, tun: bool = False) -> Settings:
        """Settings of a lab."""
        return Settings(
            name=self.lab,
            hosts=hosts or self.hosts,
            vms=0,
            containers=containers,
            wire=wire,
            tun=tun,
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
    anywhere: bool = True
    """Whether the hosts may be other machines."""


Load = Callable[[Topology, Ends, Contender], Sample]


def case(conditions: Conditions, settings: Settings, kinds: Iterable[Contender], load: Load) -> Case:
    """A case in which every kind has a turn under this load."""

    def turn(kind: Contender) -> Turn:
        def take(topology: Topology) -> Sample:
            with kind.up(topology) as ends:
                sample = load(topology, ends, kind)
            if not remote.machines_of(settings.name):
                return sample
            # This machine's CPU time says nothing about others.
            return {name: value for name, value in sample.items() if name not in CPU_TIMES}

        def missing() -> str | None:
            if kind is DIRECT and remote.machines_of(settings.name):
                return "hosts on other machines have macvlan devices, which receive nothing for other stations"
            return kind.missing()

        return Turn(kind.name, missing, take)

    return Case(conditions, settings, [turn(kind) for kind in kinds])


def simple(load: Callable[[Ends], Sample]) -> Load:
    """A load between the two ends, with the CPU time of the daemons."""

    def measured(_topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        workload.meet(ends)
        with usage.measured(ends.processes) as used:
            sample = load(ends)
        return used.sample() | sample

    return measured


def between_two(
    values: Callable[[EvaluateOptions], Iterable[Conditions]],
    load: Callable[[EvaluateOptions, Conditions, Ends], Sample],
) -> Callable[[EvaluateOptions], list[Case]]:
    """Cases of a load between two containers: every wire and MTU, and these further conditions."""

    def cases(options: EvaluateOptions) -> list[Case]:
        return [
            case(
                {"wire": wire, "MTU": mtu, **more},
                options.topology(wire, mtu, hosts=2),
                KINDS,
                simple(lambda ends, more=more: load(options, more, ends)),
            )
            for wire, mtu in options.settings()
            for more in values(options)
        ]

    return cases
