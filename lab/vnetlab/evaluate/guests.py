"""Experiments with virtual machines: applications and messages, early notifications, which part of vnet buys what."""

import contextlib
import shutil
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from vnetlab import daemon, guest, timeline
from vnetlab.bench import latency, mpi, workload
from vnetlab.bench.case import Case, Turn
from vnetlab.bench.contenders import Contender, Ends, Vnet, absent
from vnetlab.bench.guests import TapGuests, VnetGuests
from vnetlab.bench.result import EARLY_BYTES, STEPS, Conditions, Sample
from vnetlab.evaluate import network, ranks
from vnetlab.evaluate.applications import KERNELS
from vnetlab.evaluate.options import EvaluateOptions, Load, case, simple
from vnetlab.image import GUEST, Recipe, with_open_mpi
from vnetlab.topology import Kind, Settings, Topology, Wire

EMULATED_KERNELS = ("is", "ep", "cg", "mg")
EMULATED_SIZE = "S"
"""Without KVM, longer kernels and larger classes would measure the emulator only."""
ADVECT, NETPIPE = "advect", "NPopenmpi"
MESSAGE_BYTES = (64, 16_384, 262_144)
"""Sizes of MPI messages between virtual machines."""
OFF, EARLY_ALWAYS, EARLY_DEFAULT = "no early notification", "early, always", "early from 2 048 bytes"
ALWAYS = {"interrupts": "optimistic", "early_bytes": 0}
DENSITIES = ((0, 0), (0, 4_294_967_295), (1_000_000, 100_000_000), (500_000_000, 1_000_000_000))
"""Bounds alpha and beta of the receive density in bytes/s."""
BOUNDS = {"receive_density_low": 50_000_000, "receive_density_high": 1_000_000_000}
"""The default bounds."""
EARLY: dict[str, dict[str, str | int]] = {
    OFF: {"interrupts": "direct"},
    EARLY_ALWAYS: ALWAYS | BOUNDS,
    EARLY_DEFAULT: {"interrupts": "optimistic", "early_bytes": 2048} | BOUNDS,
    **{
        f"early, alpha {low / 1e6:g} MB/s, beta {high / 1e6:g} MB/s": ALWAYS
        | {"receive_density_low": low, "receive_density_high": high}
        for low, high in DENSITIES
    },
}
"""Settings of interfaces, by name."""
EARLY_COUNTS = (
    "early",
    "early_at_arrival",
    "early_mispredicted",
    "early_premature",
    "early_discarded",
    "coalesced_withheld",
    "coalesced_injected",
)
"""Counters of `vnet interface list`."""
IN_TURN, PINGS_A_TURN = 10, 300
"""How often each of the settings has its turn in running machines, and with how many pings of each size."""
TRACED_ROUNDS = 5
TRACE: Conditions = {"trace": "median us of each step"}
TRACED = {"direct": OFF, "early": EARLY_ALWAYS, "early from 2048": EARLY_DEFAULT}
"""Settings of the trace, and their names here."""


def chosen(options: EvaluateOptions) -> tuple[str, tuple[str, ...]]:
    """Class and kernels between virtual machines: the options' where KVM runs them, else what an emulator can."""
    if _kvm():
        size, usual = options.size, KERNELS
    else:
        size, usual = EMULATED_SIZE, EMULATED_KERNELS
    return size, options.kernels or (usual[:1] if options.quick else usual)


def _recipe(programs: tuple[Path, ...]) -> Recipe:
    """The guests' image with Open MPI and these programs; without any the usual image."""
    if not programs:
        return GUEST
    recipe = with_open_mpi(replace(GUEST, programs=programs))
    # A rank of FT in class A has 300 MB of fields.
    return replace(recipe, memory="1G") if _kvm() else recipe


def _kvm() -> bool:
    """Whether virtual machines run by KVM rather than in an emulator."""
    return "kvm" in guest.accelerator()


@dataclass(frozen=True)
class Guests:
    """Virtual machines with some MPI programs."""

    name: str
    vnet: Vnet | None = None
    """None: QEMU's tap, a bridge, and kernel VXLAN."""
    programs: tuple[Path, ...] = ()
    """The programs in their image, with Open MPI; empty: neither."""

    def missing(self) -> str | None:
        """The reason if NetPIPE is to be in their image, and is not installed."""
        return absent(NETPIPE, "netpipe-openmpi") if any(path.name == NETPIPE for path in self.programs) else None

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Boots the machines, and starts a shell for Open MPI in those at both ends."""
        recipe = _recipe(self.programs)
        guests = VnetGuests(self.vnet, recipe) if self.vnet else TapGuests(recipe=recipe)
        with guests.up(topology) as ends:
            for each in (ends.source, ends.destination):
                guest.open_shell(each)
            yield ends


def machines(options: EvaluateOptions) -> list[Case]:
    """Between virtual machines: kernels by MPI, MPI messages, round trips and a stream, streams in pairs at once."""
    size, kernels = chosen(options)
    applications = kernels if options.kernels or options.quick else (*kernels, ADVECT)
    programs = tuple(ranks.PROGRAMS / f"{name}-mpi" for name in applications)
    cases = [
        _between_guests(
            options, {"kernel": name.upper(), "class": size, "ranks": 2}, _application(name, size), programs
        )
        for name in applications
    ]
    if options.kernels:
        return cases
    netpipe = (Path(shutil.which(NETPIPE) or NETPIPE),)
    cases += [
        _between_guests(options, {"bytes": count}, simple(lambda ends, count=count: mpi.messages(ends, count)), netpipe)
        for count in (MESSAGE_BYTES[:1] if options.quick else MESSAGE_BYTES)
    ]
    cases += [
        _between_guests(options, {"pairs": pairs}, network.at_once(options, pairs), machines=pairs)
        for pairs in network.PAIRS[: 1 if options.quick else None]
    ]
    return [*cases, _between_guests(options, {"between": "one pair"}, simple(lambda ends: _round_trips(options, ends)))]


def _between_guests(
    options: EvaluateOptions,
    conditions: Conditions,
    load: Load,
    programs: tuple[Path, ...] = (),
    machines: int = 1,
) -> Case:
    """A case between virtual machines, which have these programs, so many on each host."""
    tap = Guests("virtual machines on tap and bridge", None, programs)
    vnet = Guests("virtual machines on vnet", Vnet(), programs)
    return case(conditions, replace(_settings(options), vms=machines), (tap, vnet), load)


def _application(name: str, size: str) -> Load:
    """A program by MPI with a rank on each of two machines."""

    def load(topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        return ranks.measure(topology, ends, name, [size], [0, 1])

    return load


def _round_trips(options: EvaluateOptions, ends: Ends) -> Sample:
    """Median round trips by size."""
    count = 50 if options.quick else PINGS_A_TURN
    return {f"ping_{size}_us": latency.pings(ends, size, count)["ping_median_us"] for size in EARLY_BYTES}


def interrupts(options: EvaluateOptions) -> list[Case]:
    """Early notifications, the bounds of the receive density between which a second one follows, and a trace."""
    rows = dict(list(EARLY.items())[:2]) if options.quick else EARLY
    running, traced = _Running(rows, options), _Traced(options)

    def turn(source: _Running | _Traced, name: str) -> Turn:
        return Turn(name, lambda: None, lambda topology: source.take(topology, name))

    between = {"between": "virtual machines"}
    cases = [Case(between, _settings(options), [turn(running, name) for name in rows])]
    steps = [turn(traced, name) for name in traced.names]
    return [*cases, Case(between | TRACE, _settings(options), steps)]


class _AtOnce:
    """Rows that are measured in the same running machines: differences between machines would hide theirs."""

    found: dict[str, Sample]
    """What a round has measured and nobody has taken yet."""

    def take(self, topology: Topology, name: str) -> Sample:
        """The sample of one row; the first one taken in a round measures all."""
        if name not in self.found:
            with VnetGuests(Vnet("vnet")).up(topology) as ends:
                workload.meet(ends)
                self.found = self._measure(topology, ends)
        return self.found.pop(name)

    def _measure(self, topology: Topology, ends: Ends) -> dict[str, Sample]:
        raise NotImplementedError


@dataclass
class _Running(_AtOnce):
    """Settings that change in turn while the machines run."""

    rows: dict[str, dict[str, str | int]]
    options: EvaluateOptions
    found: dict[str, Sample] = field(default_factory=dict)

    def _measure(self, topology: Topology, ends: Ends) -> dict[str, Sample]:
        quick = self.options.quick
        count = 50 if quick else PINGS_A_TURN
        medians: dict[str, dict[str, list[float]]] = {name: {} for name in self.rows}
        counts: dict[str, Counter[str]] = {name: Counter() for name in self.rows}
        for number in range(2 if quick else IN_TURN):
            # Forwards, then backwards: what drifts with time affects all alike.
            for name in list(self.rows)[:: -1 if number % 2 else 1]:
                with self._applied(topology, name, counts[name]):
                    for size in EARLY_BYTES:
                        found = latency.pings(ends, size, count)["ping_median_us"]
                        medians[name].setdefault(f"ping_{size}_us", []).append(found)
        samples = {}
        for name, found in medians.items():
            with self._applied(topology, name, counts[name]):
                seconds = max(2, self.options.seconds(5))
                streamed = latency.counted(topology, ends, lambda seconds=seconds: latency.stream(ends, seconds))
            pings = {key: statistics.median(values) for key, values in found.items()}
            samples[name] = pings | streamed | _early_shares(counts[name])
        return samples

    @contextlib.contextmanager
    def _applied(self, topology: Topology, name: str, counts: Counter[str]) -> Iterator[None]:
        """Applies settings to the running machines, and adds to `counts` what is counted meanwhile."""
        words = [f"{key}={value}" for key, value in self.rows[name].items()]
        for host, machine in zip(topology.hosts, topology.machines(Kind.VM), strict=True):
            daemon.vnet(host, "interface", "set", machine.name, *words)
        before = _early_counts(topology)
        yield
        counts.update({key: value - before[key] for key, value in _early_counts(topology).items()})


def _early_counts(topology: Topology) -> dict[str, int]:
    """Counters of the hosts' interfaces: early notifications, ends of coalescing, and all notifications."""
    rows = [row for host in topology.hosts for row in daemon.ask(host, "interface", "list")]
    ports = [port for host in topology.hosts for port in daemon.ask(host, "stats")["ports"]]
    counts = {name: sum(row.get(name, 0) for row in rows) for name in EARLY_COUNTS}
    return counts | {"sent": sum(port["notifications"] for port in ports if port["kind"] == "interface")}


def _early_shares(counts: Counter[str]) -> Sample:
    """Shares of early notifications: at arrival, for the wrong guest, too soon, and masked by polling guests.

    Then what alpha and beta do: shares of ends of coalescing without a notification, and of notifications at one.
    """
    early, masked = counts["early"], counts["early_discarded"]
    withheld, injected = counts["coalesced_withheld"], counts["coalesced_injected"]
    return {
        "early_share": early / max(1, counts["sent"]),
        "arrival_share": counts["early_at_arrival"] / max(1, early),
        "mispredicted_share": counts["early_mispredicted"] / max(1, counts["early_at_arrival"]),
        "premature_share": counts["early_premature"] / max(1, early),
        "masked_share": masked / max(1, early + masked),
        "withheld_share": withheld / max(1, withheld + injected),
        "injected_share": injected / max(1, counts["sent"]),
    }


@dataclass
class _Traced(_AtOnce):
    """The steps of pings to a virtual machine (`lab timeline`), by setting and size."""

    options: EvaluateOptions
    found: dict[str, Sample] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of pings."""
        return self.options.some(timeline.SIZES)

    @property
    def names(self) -> list[str]:
        """The rows."""
        return [traced_name(size, setting) for size in self.sizes for setting in timeline.SETTINGS]

    def _measure(self, topology: Topology, ends: Ends) -> dict[str, Sample]:
        rounds, pings = (1, 50) if self.options.quick else (TRACED_ROUNDS, timeline.PINGS)
        rows = timeline.run(topology, ends.source, ends.destination, self.sizes, rounds, pings)
        return {traced_name(row.bytes, row.interrupts): traced_figures(row) for row in rows}


def traced_name(size: int, setting: str) -> str:
    """Name of a row of the trace."""
    return f"{size} bytes, {TRACED[setting]}"


def traced_figures(row: timeline.Row) -> Sample:
    """The sample of a row of the trace: steps that never happened are left out."""
    times = {f"trace_{step}_us": row.median(step) for step in STEPS} | {"trace_rtt_us": row.median(timeline.RTT)}
    shares = {
        "trace_early_share": statistics.fmean(row.announced),
        "trace_late_share": statistics.fmean(row.notified),
    }
    return {name: value for name, value in times.items() if value is not None} | shares


def ablation(options: EvaluateOptions) -> list[Case]:
    """The parts of vnet switched on one by one, as in the bench of this name."""
    count = 100 if options.quick else options.pings

    def load(topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        return latency.step(topology, ends, max(2, options.seconds(5)), count)

    containers = replace(_settings(options), containers=1, vms=0)
    rows = latency.steps(guests=False)
    # Quick run: native, the forwarder without vnet, and the last step of vnet.
    rows = [rows[0], rows[2], rows[-2]] if options.quick else rows
    cases = [case({"between": "containers"}, containers, rows, load)]
    guests = latency.steps(guests=True)
    # The first and the complete configuration show in a quick run that guests work.
    guests = [guests[1], guests[-1]] if options.quick else guests
    return [*cases, case({"between": "virtual machines"}, _settings(options), guests, load)]


def _settings(options: EvaluateOptions) -> Settings:
    """Two hosts with a virtual machine each."""
    return replace(options.topology(Wire.NONE, 1500, 0, hosts=2), vms=1)
