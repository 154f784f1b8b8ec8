"""What experiments are made of: the options of a run, and cases in which every kind of data path has a turn."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vnetlab import remote
from vnetlab.bench import usage, workload
from vnetlab.bench.case import Bench, Case, Options, Turn
from vnetlab.bench.contenders import Contender, Ends
from vnetlab.bench.result import METRICS, Conditions, Sample
from vnetlab.evaluate.kinds import DIRECT, JUDGED, KINDS
from vnetlab.remote import Machine
from vnetlab.topology import Settings, Topology, Wire

LAB = "evaluate"
STREAM_SECONDS = "seconds of TCP"
"""The condition that says how long a stream is measured."""
Under = tuple[str, int]
"""An underlay's wire and MTU."""
FAST: Under = (Wire.TEN_GIGABIT, 9000)
"""The underlay of the papers' main results."""
CPU_TIMES = {"cpu_s_a_gb", *(name for name, metric in METRICS.items() if metric.unit == "cores")}
"""Metrics of CPU time."""


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Selection and duration of a run."""

    size: str = "W"
    """Class of the workloads: S, W or A."""
    advect: str = "A"
    """Class of the advective application: in smaller ones a rank computes for a quarter of a second only."""
    mtus: tuple[int, ...] = ()
    """Only these MTUs; empty: those of the experiment."""
    under: tuple[Under, ...] = ()
    """Wires and MTUs to measure on; empty: every combination of `wires` and `mtus`."""
    pings: int = 1_000
    """Number of pings of each size."""
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

    def settings(self) -> Iterable[Under]:
        """Underlay wires and MTUs to measure on."""
        return self.under or super().settings()

    def kinds(self, under: Under) -> tuple[Contender, ...]:
        """The kinds for experiments of many cases: all on the fast wire or if named, else those that bars compare."""
        return KINDS if under == FAST or self.contenders else JUDGED

    @property
    def named(self) -> Conditions:
        """The number of hosts as a condition, unless it is the usual one."""
        return {} if self.hosts == 2 else {"hosts": self.hosts}

    def some(self, values: tuple) -> tuple:
        """All values, or in a quick run the last: the others take the same way."""
        return values[-1:] if self.quick else values


@dataclass(frozen=True)
class Experiment(Bench):
    """A bench of the evaluation."""

    under: tuple[Under, ...] = ((Wire.NONE, 1500),)
    """Usual wires and MTUs."""
    rounds: int = 1
    """Usual number of rounds: 3 for what bars judge."""
    usual_s: float = 10
    """Usual duration of a measurement, for the first estimate."""
    relative: bool = False
    """Whether plots show figures as multiples of native ones."""
    anywhere: bool = True
    """Whether hosts may be on several machines; else one machine runs all of it."""

    def chosen(self, options: EvaluateOptions) -> EvaluateOptions:
        """These options with the experiment's own wires and MTUs, where the options leave the choice to it."""
        wires = options.wires or tuple(dict.fromkeys(wire for wire, _ in self.under))
        mtus = options.mtus or tuple(dict.fromkeys(mtu for _, mtu in self.under))
        free = not (options.wires or options.mtus)
        under = self.under if free else tuple(itertools.product(wires, mtus))
        return replace(options, wires=wires, mtus=mtus, under=under)


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
            if kind is DIRECT and not all(each.own for each in remote.machines_of(settings.name)):
                return "a macvlan device receives nothing for other stations: give the hosts devices of their 'own'"
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
    *more: Contender,
) -> Callable[[EvaluateOptions], list[Case]]:
    """Cases of a load between two containers: every wire and MTU, and these further conditions.

    `more` are contenders beside the kinds.
    """

    def cases(options: EvaluateOptions) -> list[Case]:
        return [
            case(
                {"wire": wire, "MTU": mtu, **further},
                options.topology(wire, mtu, hosts=2),
                [*options.kinds((wire, mtu)), *more],
                simple(lambda ends, further=further: load(options, further, ends)),
            )
            for wire, mtu in options.settings()
            for further in values(options)
        ]

    return cases
