"""Experiments with virtual machines: Open MPI between them, early notifications, and which part of vnet buys what."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vnetlab import daemon, machine
from vnetlab.bench import latency, workload
from vnetlab.bench.contenders import Contender, Ends, Vnet
from vnetlab.bench.guests import TapGuests, VnetGuests
from vnetlab.bench.mpi import SHELL_PORT
from vnetlab.bench.result import EARLY_BYTES, Sample
from vnetlab.bench.suite import Case
from vnetlab.evaluate import ranks
from vnetlab.evaluate.options import EvaluateOptions, case
from vnetlab.image import GUEST, Recipe
from vnetlab.run import run
from vnetlab.topology import Settings, Topology, Wire

KERNELS = ("is", "ep", "cg", "mg")
SIZE = "S"
"""Without KVM, larger classes would measure the emulator only."""
PACKAGES = ("openmpi-bin", "openmpi-common", "libopenmpi3", "libpmix2")
LEFT_OUT = ("/doc/", "/man/", "/man1/", "/include/", "libmpi_", "libmca_common_ofi", "ofi", "psm", "ucx", "uct", "java")
"""Parts of paths of files that guests do not need: bindings, and transports of other hardware."""
EARLY = (
    Vnet("no early notification"),
    Vnet("early, always", interface=(("interrupts", "optimistic"), ("early_bytes", 0))),
    Vnet("early from 2 048 bytes", interface=(("interrupts", "optimistic"),)),
)
DENSITIES = ((0, 0), (0, 4_294_967_295), (1_000_000, 100_000_000), (500_000_000, 1_000_000_000))
"""Bounds alpha and beta of the receive density in bytes/s; the default is 50 MB/s to 1 GB/s."""


def _recipe() -> Recipe:
    """The guests' image with Open MPI and the kernels."""
    listed = [Path(line) for line in run(["dpkg", "-L", *PACKAGES]).splitlines() if line.startswith("/")]
    files = [path for path in listed if path.is_file() and not any(part in str(path) for part in LEFT_OUT)]
    programs = (Path("/usr/bin/mpirun"), *(ranks.PROGRAMS / f"{kernel}-mpi" for kernel in KERNELS))
    return replace(GUEST, files=tuple(files), programs=programs, memory="512M")


@dataclass(frozen=True)
class Ranks:
    """Virtual machines that can run MPI programs."""

    name: str
    vnet: Vnet | None = None
    """None: QEMU's tap, a bridge, and kernel VXLAN."""

    def missing(self) -> None:
        """None: it needs only what the lab needs."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Boots the machines, and starts a shell for Open MPI in each."""
        recipe = _recipe()
        guests = VnetGuests(self.vnet, recipe) if self.vnet else TapGuests(recipe=recipe)
        with guests.up(topology) as ends:
            for each in (ends.source, ends.destination):
                machine.execute(each, f"setsid nc -ll -p {SHELL_PORT} -e /bin/sh >/dev/null 2>&1 </dev/null &")
            yield ends


def machines(options: EvaluateOptions) -> list[Case]:
    """Kernels by MPI between two virtual machines."""
    kinds = (Ranks("virtual machines on tap and bridge"), Ranks("virtual machines on vnet", Vnet()))
    cases = []
    for kernel in KERNELS[:1] if options.quick else KERNELS:

        def load(topology: Topology, ends: Ends, _kind: Contender, kernel: str = kernel) -> Sample:
            return ranks.measure(topology, ends, kernel, [SIZE], [0, 1])

        conditions = {"kernel": kernel.upper(), "class": SIZE, "ranks": 2}
        cases.append(case(conditions, _settings(options), kinds, load))
    return cases


def interrupts(options: EvaluateOptions) -> list[Case]:
    """Early notifications, and the bounds of the receive density between which a second one follows (paper 001)."""
    early = EARLY[1].interface
    swept = [
        Vnet(
            f"early, alpha {low / 1e6:g} MB/s, beta {high / 1e6:g} MB/s",
            interface=(*early, ("receive_density_low", low), ("receive_density_high", high)),
        )
        for low, high in DENSITIES
    ]
    kinds = [VnetGuests(vnet) for vnet in (EARLY[:2] if options.quick else (*EARLY, *swept))]
    count = 100 if options.quick else options.pings

    def load(topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        workload.meet(ends)
        sample: Sample = {}
        for size in EARLY_BYTES:
            sample[f"ping_{size}_us"] = latency.pings(ends, size, count)["ping_median_us"]
        streamed = latency.counted(topology, ends, lambda: latency.stream(ends, max(2, options.seconds(5))))
        return sample | streamed | _early_shares(topology)

    return [case({"between": "virtual machines"}, _settings(options), kinds, load)]


def _early_shares(topology: Topology) -> Sample:
    """Shares of early notifications, of those that came too soon, and of those suppressed by polling guests."""
    rows = [row for host in topology.hosts for row in daemon.ask(host, "interface", "list")]
    ports = [port for host in topology.hosts for port in daemon.ask(host, "stats")["ports"]]
    early, premature, masked = (
        sum(row.get(name, 0) for row in rows) for name in ("early", "early_premature", "early_discarded")
    )
    sent = sum(port["notifications"] for port in ports if port["kind"] == "interface")
    return {
        "early_share": early / max(1, sent),
        "premature_share": premature / max(1, early),
        "masked_share": masked / max(1, early + masked),
    }


def ablation(options: EvaluateOptions) -> list[Case]:
    """The parts of vnet switched on one by one, as in the bench of this name."""
    count = 100 if options.quick else options.pings

    def load(topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        return latency.step(topology, ends, max(2, options.seconds(5)), count)

    containers = replace(_settings(options), containers=1, vms=0)
    cases = [case({"between": "containers"}, containers, latency.steps(guests=False), load)]
    guests = latency.steps(guests=True)
    # The first and the complete configuration show in a quick run that guests work.
    guests = [guests[1], guests[-1]] if options.quick else guests
    return [*cases, case({"between": "virtual machines"}, _settings(options), guests, load)]


def _settings(options: EvaluateOptions) -> Settings:
    """Two hosts with a virtual machine each."""
    return replace(options.topology(Wire.NONE, 1500, 0, hosts=2), vms=1)
