"""What benches consist of: cases, and the turns of contenders in each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vnetlab.bench.contenders import Contender, Ends, Vnet
from vnetlab.bench.result import Conditions, Sample
from vnetlab.topology import Settings, Topology, Wire

LAB = "bench"
EMULATED = "emulated virtual machines"
"""Value of a condition of cases between them."""
MTUS = (1500, 9000)


@dataclass(frozen=True)
class Options:
    """Selection and duration of a run."""

    quick: bool = False
    wires: tuple[str, ...] = ()
    mtus: tuple[int, ...] = MTUS
    contenders: tuple[str, ...] = ()
    """Parts of contenders' names; empty selects all."""
    pings: int = 5_000
    """Number of pings of each size in the benches latency and ablation."""
    vnets: tuple[Vnet, ...] = ()
    """Revisions to compare; they replace all contenders."""

    def seconds(self, full: float) -> float:
        """Duration of a measurement: `full` seconds, or 1 in a quick run."""
        return 1 if self.quick else full

    def settings(self) -> Iterable[tuple[str, int]]:
        """Underlay wires and MTUs to measure on."""
        return [(wire, mtu) for wire in self.wires for mtu in self.mtus]


@dataclass(frozen=True)
class Turn:
    """One contender's turn."""

    contender: str
    missing: Callable[[], str | None]
    take: Callable[[Topology], Sample]


@dataclass(frozen=True)
class Case:
    """Turns under the same conditions."""

    conditions: Conditions
    settings: Settings
    turns: list[Turn]


@dataclass(frozen=True)
class Bench:
    """A bench."""

    name: str
    title: str
    cases: Callable[[Options], list[Case]]
    plotted: tuple[str, ...]
    """Metrics that are plotted."""
    notes: tuple[str, ...] = ()
    wires: tuple[str, ...] = (Wire.NONE,)
    """Default wires."""
    axis: str = ""
    """The condition on the x axis of plots with lines."""


def turn_of(contender: Contender, load: Callable[[Ends], Sample]) -> Turn:
    """A turn that brings a contender up and applies a load."""

    def take(topology: Topology) -> Sample:
        with contender.up(topology) as ends:
            return load(ends)

    return Turn(contender.name, contender.missing, take)


def told(contender: Contender, load: Callable[[Topology, Ends], Sample]) -> Turn:
    """Like `turn_of`, for a load that also queries the daemons."""

    def take(topology: Topology) -> Sample:
        with contender.up(topology) as ends:
            return load(topology, ends)

    return Turn(contender.name, contender.missing, take)
