"""Virtual machines on two hosts, connected by vnet (vhost-user) or by QEMU's tap, bridge and kernel VXLAN."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from vnetlab import guest, lab, process
from vnetlab.bench.contenders import VXLAN_HEADERS, Ends, Vnet, bridge, remove_device, running, vxlan
from vnetlab.image import GUEST, Recipe, ensure_image
from vnetlab.run import run
from vnetlab.topology import Kind, Node, Topology


@dataclass(frozen=True)
class VnetGuests:
    """Virtual machines whose network device vnetd serves."""

    vnet: Vnet
    recipe: Recipe | Callable[[], Recipe] = GUEST
    """What the machines boot. A recipe that depends on programs, which may change, is made when they boot."""

    @property
    def name(self) -> str:
        """Name of the settings."""
        return self.vnet.name

    def missing(self) -> str | None:
        """None: it needs only what the lab needs."""
        return self.vnet.missing()

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs vnetd and a virtual machine on each host."""
        topology = self.vnet.topology(topology)
        with self.vnet.daemons(topology) as daemons, _guests(topology) as stack:
            if isinstance(self.recipe, Recipe):
                image = ensure_image(lab.CACHE, self.recipe)
            else:
                image = ensure_image(lab.CACHE, self.recipe(), topology.state)
            guests = topology.machines(Kind.VM)
            for machine in guests:
                stack.callback(process.stop, machine.file(".pid"))
                guest.start(topology, machine, image)
            ends = _ready(guests, daemons)
            self.vnet.settle(guests)
            yield ends


@dataclass(frozen=True)
class TapGuests:
    """Virtual machines with a tap each, bridged to a kernel VXLAN device; MSI-X interrupts, QEMU's default."""

    name: str = "QEMU tap, bridge, kernel VXLAN"
    recipe: Recipe = GUEST
    """What the machines boot."""

    def missing(self) -> None:
        """None: it is part of the kernel and QEMU."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Creates devices and runs the virtual machines."""
        mtu = topology.settings.underlay_mtu - VXLAN_HEADERS
        topology = Topology(replace(topology.settings, mtu=mtu))
        image = ensure_image(lab.CACHE, self.recipe)
        with _guests(topology) as stack:
            guests, hosts = topology.machines(Kind.VM), topology.hosts
            for host, peer in zip(hosts, reversed(hosts), strict=True):
                for name in ("vxlan", "bridge"):
                    stack.callback(remove_device, host.namespace, name)
                vxlan(host, peer, mtu)
                bridge(host, mtu)
            for machine in guests:
                host = hosts[machine.host - 1]
                tap = self._tap(machine, host, mtu, stack)
                stack.callback(process.stop, machine.file(".pid"))
                netdev = ["-netdev", f"tap,id=net,ifname={tap},script=no,downscript=no"]
                words = guest.command(topology, machine, image, netdev, msix=True)
                guest.launch(machine, ["ip", "netns", "exec", host.namespace, *words])
            yield _ready(guests, {})

    def _tap(self, machine: Node, host: Node, mtu: int, stack: contextlib.ExitStack) -> str:
        """Creates a machine's tap in its host's bridge; returns the device's name."""
        tap = f"tap-{machine.name}"
        stack.callback(remove_device, host.namespace, tap)
        run(f"ip -n {host.namespace} tuntap add {tap} mode tap vnet_hdr".split())
        run(f"ip -n {host.namespace} link set {tap} mtu {mtu} master bridge up".split())
        return tap


@contextlib.contextmanager
def _guests(topology: Topology) -> Iterator[contextlib.ExitStack]:
    """Yields a stack of clean-ups; first removes files of earlier guests."""
    with contextlib.ExitStack() as stack:
        for machine in topology.machines(Kind.VM):
            for suffix in (".log", ".console.log"):
                machine.file(suffix).unlink(missing_ok=True)
        yield stack


def _ready(guests: list[Node], daemons: dict[str, int]) -> Ends:
    """Waits until the guests have booted; returns the two ends."""
    for machine in guests:
        guest.wait(machine)
    return Ends(guests[0], guests[-1], daemons | running(".pid", guests))
