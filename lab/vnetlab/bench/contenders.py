"""Contenders between two hosts: the bare underlay, kernel VXLAN, user-level overlays, and vnet in several settings.

Each contender is brought up on hosts h1 and h2 of a lab with a running underlay, returns the two ends to measure
between, and removes everything afterwards. Its processes carry the lab's mark, so that `lab down` finds them after a
crash.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from vnetlab import daemon, lab, machine, measure, process, remote
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import TAP_MTU_MAX, Kind, Node, Topology

VXLAN_HEADERS = 50
"""Bytes of the underlay's MTU that VXLAN over IPv4 takes (RFC 7348)."""
TINC_MTU_MAX = 1500
"""Debian builds tinc without its jumbogram option: Ethernet frames of at most 1518 bytes."""
NEBULA_HEADERS = 60
"""Bytes of IPv4 and UDP headers, Nebula's header and AES-GCM tag."""
NEBULA_MTU_MAX = 8900
"""Nebula's buffers hold 9001 bytes, including headers."""
START_S = 20
USER_LEVEL_PORT = 4242


class OnHost(Node):
    """A host with the overlay address of a device on the host itself."""

    @property
    def address(self) -> str:
        """IPv4 address."""
        return f"10.77.{self.host}.250"


@dataclass(frozen=True)
class Ends:
    """Two machines to measure between, and the processes that carry their frames, by name."""

    source: Node
    destination: Node
    processes: dict[str, int] = field(default_factory=dict)


class Contender(Protocol):
    """A means to connect two machines on two hosts."""

    name: str

    def missing(self) -> str | None:
        """Why the contender cannot run on this machine; None if it can."""

    def up(self, topology: Topology) -> contextlib.AbstractContextManager[Ends]:
        """Connects two machines while the context lasts. Raises LabError if that fails."""


@dataclass(frozen=True)
class Bare:
    """The underlay itself, between hosts."""

    name: str = "native"

    def missing(self) -> None:
        """None: it is part of the kernel."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Returns the hosts themselves."""
        yield Ends(topology.hosts[0], topology.hosts[-1])


@dataclass(frozen=True)
class VxlanDevice:
    """A kernel VXLAN device on each host, with its own overlay address."""

    name: str = "kernel VXLAN, device"

    def missing(self) -> None:
        """None: it is part of the kernel."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Creates the devices, and removes them."""
        with _vxlan(topology) as _:
            ends = [OnHost(host.lab, Kind.HOST, host.host) for host in topology.hosts]
            for end in ends:
                run(["ip", "-n", end.namespace, "address", "add", f"{end.address}/16", "dev", "vxlan"])
            yield Ends(*ends)


@dataclass(frozen=True)
class VxlanContainers:
    """The usual container network: a veth pair per container, and on each host a bridge with a kernel VXLAN device."""

    name: str = "kernel VXLAN, containers"

    def missing(self) -> None:
        """None: it is part of the kernel."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Creates bridges, VXLAN devices and veth pairs, and removes them."""
        with _vxlan(topology) as mtu, contextlib.ExitStack() as stack:
            for host in topology.hosts:
                stack.enter_context(_bridged(host, topology.machines(Kind.CONTAINER, host.host), mtu))
            containers = topology.machines(Kind.CONTAINER)
            yield Ends(containers[0], containers[-1])


@dataclass(frozen=True)
class VxlanMixed:
    """A container behind a bridge and a kernel VXLAN device on one host, the device itself on the other."""

    name: str = "kernel VXLAN, container to device"
    reverse: bool = False
    """True if the end with the device sends."""

    def missing(self) -> None:
        """None: it is part of the kernel."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Creates both ends, and removes them."""
        near, far = topology.hosts
        container = topology.machines(Kind.CONTAINER, near.host)[0]
        end = OnHost(far.lab, Kind.HOST, far.host)
        with _vxlan(topology) as mtu, _bridged(near, [container], mtu):
            run(["ip", "-n", far.namespace, "address", "add", f"{end.address}/16", "dev", "vxlan"])
            yield Ends(end, container) if self.reverse else Ends(container, end)


@contextlib.contextmanager
def _bridged(host: Node, containers: list[Node], mtu: int) -> Iterator[None]:
    """Connects containers to their host's VXLAN device by veth pairs and a bridge while the context lasts."""
    with contextlib.ExitStack() as stack:
        stack.callback(remove_device, host.namespace, "bridge")
        bridge(host, mtu)
        for container in containers:
            here = f"{container.name} mtu {mtu} master bridge up"
            there = f"{container.namespace} mtu {mtu}"
            run(f"ip -n {host.namespace} link add {here} type veth peer name eth0 netns {there}".split())
            stack.callback(remove_device, host.namespace, container.name)
            start_device(container)
        yield


@contextlib.contextmanager
def _vxlan(topology: Topology) -> Iterator[int]:
    """Creates a VXLAN device on all hosts while the context lasts; returns its MTU."""
    mtu = topology.settings.underlay_mtu - VXLAN_HEADERS
    with contextlib.ExitStack() as stack:
        for host in topology.hosts:
            peer, *others = (each for each in topology.hosts if each != host)
            vxlan(host, peer, mtu)
            stack.callback(remove_device, host.namespace, "vxlan")
            for other in others:
                # Frames for unknown addresses go to every peer.
                entry = f"fdb append 00:00:00:00:00:00 dev vxlan dst {other.address}"
                run(["bridge", "-n", host.namespace, *entry.split()])
        yield mtu


def vxlan(host: Node, peer: Node, mtu: int) -> None:
    """Creates a kernel VXLAN device that leads to another host."""
    tunnel = f"id 77 dstport 4789 local {host.address} remote {peer.address} dev eth0"
    run(f"ip -n {host.namespace} link add vxlan mtu {mtu} up type vxlan {tunnel}".split())


def bridge(host: Node, mtu: int) -> None:
    """Creates a bridge that contains the host's VXLAN device."""
    run(f"ip -n {host.namespace} link add bridge mtu {mtu} up type bridge".split())
    run(f"ip -n {host.namespace} link set vxlan master bridge".split())


def start_device(container: Node) -> None:
    """Assigns the container's address to its device `eth0` and sets it up."""
    inside = ["ip", "-n", container.namespace]
    run([*inside, "address", "add", f"{container.address}/16", "dev", "eth0"])
    run([*inside, "link", "set", "eth0", "up"])


def remove_device(namespace: str, name: str) -> None:
    """Removes a device; a missing one is no error."""
    with contextlib.suppress(LabError):
        run(["ip", "-n", namespace, "link", "delete", name])


@dataclass(frozen=True)
class Tinc:
    """tinc 1.0 in switch mode, without cipher and digest."""

    name: str = "tinc"

    def missing(self) -> str | None:
        """The reason if its Debian package is not installed."""
        return absent("tincd", "tinc")

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs a daemon on each host."""
        with _user_level(topology, "tinc") as ends:
            mtu = min(topology.settings.underlay_mtu - VXLAN_HEADERS, TINC_MTU_MAX)
            folders = {end.name: self._configure(end) for end in ends}
            for host in topology.hosts:
                for folder in folders.values():
                    # Every host needs the public keys of all others.
                    own = folders[host.name] / "hosts" / host.name
                    if folder != folders[host.name]:
                        shutil.copy(own, folder / "hosts" / host.name)
            for end in ends:
                folder = folders[end.name]
                for path in folder.rglob("*"):
                    if path.is_file():
                        machine.share(end, path)
                pid = folder / "tinc.pid"
                _start(end, "tinc", ["tincd", "--config", str(folder), "--no-detach", "--pidfile", str(pid)])
                _address(end, "tinc0", mtu)
            yield _meet("tinc", ends)

    def _configure(self, end: Node) -> Path:
        """Writes a host's configuration and generates its keys."""
        folder = end.file(".tinc")
        (folder / "hosts").mkdir(parents=True)
        peer = "h2" if end.host == 1 else "h1"
        lines = [f"Name = {end.name}", "Mode = switch", "Interface = tinc0", f"ConnectTo = {peer}"]
        (folder / "tinc.conf").write_text("\n".join([*lines, "AddressFamily = ipv4", ""]))
        underlay = Node(end.lab, Kind.HOST, end.host).address
        text = f"Address = {underlay}\nCipher = none\nDigest = none\nCompression = 0\n"
        (folder / "hosts" / end.name).write_text(text)
        run(["tincd", "--config", str(folder), "--generate-keys=2048"])
        return folder


@dataclass(frozen=True)
class Nebula:
    """Nebula with its own certificate authority; it always encrypts, and carries only IP."""

    name: str = "Nebula"

    def missing(self) -> str | None:
        """The reason if its Debian package is not installed."""
        return absent("nebula", "nebula") or absent("nebula-cert", "nebula")

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs a daemon on each host."""
        with _user_level(topology, "nebula") as ends:
            mtu = min(topology.settings.underlay_mtu - NEBULA_HEADERS, NEBULA_MTU_MAX)
            folder = topology.state / "nebula"
            folder.mkdir()
            run(["nebula-cert", "ca", "-name", "bench"], cwd=folder)
            for end in ends:
                run(["nebula-cert", "sign", "-name", end.name, "-ip", f"{end.address}/16"], cwd=folder)
            for end, peer in ((ends[0], ends[1]), (ends[1], ends[0])):
                config = folder / f"{end.name}.yml"
                config.write_text(self._configuration(folder, end, peer, mtu))
                _start(end, "nebula", ["nebula", "-config", str(config)])
                wait_until(f"Nebula's device on {end.name}", lambda end=end: _has(end, "nebula0"), START_S)
            yield _meet("nebula", ends)

    def _configuration(self, folder: Path, end: Node, peer: Node, mtu: int) -> str:
        underlay = Node(peer.lab, Kind.HOST, peer.host).address
        anybody = "[{port: any, proto: any, host: any}]"
        return f"""\
pki: {{ca: {folder}/ca.crt, cert: {folder}/{end.name}.crt, key: {folder}/{end.name}.key}}
static_host_map: {{"{peer.address}": ["{underlay}:{USER_LEVEL_PORT}"]}}
lighthouse: {{am_lighthouse: false, hosts: []}}
listen: {{host: 0.0.0.0, port: {USER_LEVEL_PORT}}}
cipher: aes
tun: {{dev: nebula0, mtu: {mtu}}}
firewall: {{outbound: {anybody}, inbound: {anybody}}}
"""


def absent(program: str, package: str) -> str | None:
    """An error text if a program is not installed, else None."""
    there = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    return None if there else f"{program} is not installed (Debian package {package}): run 'make bench-packages'"


@contextlib.contextmanager
def _user_level(topology: Topology, name: str) -> Iterator[list[Node]]:
    """Returns the hosts with overlay addresses; afterwards stops the daemons `name` and removes their files."""
    ends = [OnHost(host.lab, Kind.HOST, host.host) for host in topology.hosts]
    folders = [topology.state / name, *(end.file(f".{name}") for end in ends)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        yield ends
    finally:
        for end in ends:
            process.stop(end.file(f".{name}.pid"))


def _start(end: Node, name: str, command: list[str]) -> None:
    """Starts a daemon on a host."""
    words = ["ip", "netns", "exec", end.namespace, *command]
    process.start(words, end.file(f".{name}.pid"), end.file(f".{name}.log"))


def _has(end: Node, device: str) -> bool:
    try:
        return bool(run(["ip", "-n", end.namespace, "link", "show", device]))
    except LabError:
        return False


def _address(end: Node, device: str, mtu: int) -> None:
    """Waits for a daemon's device and configures it."""
    wait_until(f"{device} on {end.name}", lambda: _has(end, device), START_S)
    run(["ip", "-n", end.namespace, "link", "set", device, "mtu", str(mtu), "up"])
    run(["ip", "-n", end.namespace, "address", "add", f"{end.address}/16", "dev", device])


def _meet(name: str, ends: list[Node]) -> Ends:
    """Waits until the two ends can ping each other."""
    log = ends[0].file(f".{name}.log")
    wait_until(f"{name} to connect the hosts", lambda: reach(*ends), START_S, log)
    return Ends(*ends, running(f".{name}.pid", ends))


def reach(source: Node, destination: Node) -> bool:
    """Whether a ping is answered."""
    return bool(measure.ping(source, destination.address, "-w", "1", count=1)[1])


def _has_wire(host: Node) -> bool:
    """Whether sealed packets of applications take the kernel's own path to the other hosts."""
    return all("applications" in (link.get("path_reason") or "") for link in daemon.ask(host, "link", "list"))


def running(suffix: str, nodes: list[Node]) -> dict[str, int]:
    """Running processes of this machine by node name, from pid files with this suffix."""
    here = [node for node in nodes if not remote.machine_of(node.namespace)]
    found = {node.name: process.find(node.file(suffix)) for node in here}
    return {name: pid for name, pid in found.items() if pid is not None}


Lines = tuple[tuple[str, str | int | list[int]], ...]
"""Keys of a configuration and their values."""


def _lines(keys: Lines) -> list[str]:
    """The keys as TOML lines."""
    return [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in keys]


class Pinned(Enum):
    """CPUs of dispatchers, where several hosts share a machine."""

    APART = "apart"
    """One CPU per host, as far as the machine has enough; guests share the CPUs."""
    TOGETHER = "together"
    """All dispatchers on the first CPU, which leaves the others to guests."""


@dataclass(frozen=True)
class Vnet:
    """vnet between containers."""

    name: str = "vnet"
    dispatch: Lines = ()
    """Lines of [dispatch] that differ from the defaults."""
    encapsulation: str = "native"
    dispatchers: int = 1
    """Number of dispatchers, of ports, and of queues per interface."""
    sealed: bool = False
    container: str = "tap"
    """Kind of the containers' interfaces: tap or veth."""
    mtu: int = 0
    """The interfaces' MTU; 0 means the underlay's."""
    binaries: Path | None = None
    """Directory of vnetd and vnet; None means the default directory."""
    interface: Lines = ()
    """Lines of every [[interface]] that differ from the defaults."""
    bridge: Lines = ()
    """Lines of [bridge] that differ from the defaults."""
    direct: bool = False
    """Whether virtual machines have their own underlay ports."""
    offloads: bool = True
    """Whether guests leave checksums and segmentation to their devices."""
    pinned: Pinned | None = None
    """CPUs of the dispatchers; None leaves the choice to the kernel."""
    lan: bool = False
    """Whether the underlay's device itself joins the hosts, by an interface of kind local, instead of links."""

    def missing(self) -> None:
        """None: `up` fails if vnet is not built."""

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs vnetd on both hosts."""
        topology = self.topology(topology)
        with self.daemons(topology) as processes:
            containers = topology.machines(Kind.CONTAINER)
            self.settle(containers)
            if self.sealed:
                # The handshake must finish before any measurement.
                wait_until(f"{self.name} to connect the hosts", lambda: reach(containers[0], containers[-1]), START_S)
            if self.sealed and self.container == "veth":
                wait_until("the wire to work", lambda: all(map(_has_wire, topology.hosts)), START_S)
            elif self.container == "veth":
                # A host where the kernel cannot forward is measured as it is.
                with contextlib.suppress(LabError):
                    ends = containers[0], containers[-1]
                    wait_until("the kernel to forward", lambda: self._forwarded(topology, *ends), START_S)
            yield Ends(containers[0], containers[-1], processes)

    def _forwarded(self, topology: Topology, source: Node, destination: Node) -> bool:
        """Whether the kernel forwards frames between two containers, in both directions."""
        reach(source, destination)
        hosts = {host.host: host for host in topology.hosts}
        ways = (source, destination), (destination, source)
        return all(daemon.ask(hosts[one.host], "trace", one.mac, other.mac).get("kernel_ms") for one, other in ways)

    def topology(self, topology: Topology) -> Topology:
        """The lab's topology with this contender's settings."""
        mtu = self.mtu or topology.settings.underlay_mtu
        wide = {"dispatchers": self.dispatchers, "queues": self.dispatchers}
        links = {"encapsulation": self.encapsulation, "sealed": self.sealed}
        return Topology(replace(topology.settings, mtu=mtu, container=self.container, **links, **wide))

    @contextlib.contextmanager
    def daemons(self, topology: Topology, more: str = "") -> Iterator[dict[str, int]]:
        """Runs vnetd on all hosts, with `more` appended to the configuration; returns process ids by host."""
        with self.own_binaries():
            try:
                for host in topology.hosts:
                    interface = "".join(f"{line}\n" for line in _lines(self.interface))
                    section = replace(self, dispatch=self._pinned(host)).section()
                    bridge = "".join(f"{line}\n" for line in ["[bridge]", *_lines(self.bridge)])
                    text = daemon.configuration(topology, host, interface).replace("[bridge]\n", bridge)
                    text = daemon.on_the_lan(text, topology.settings.underlay_mtu) if self.lan else text
                    if self.direct:
                        text = daemon.with_direct_ports(text, topology, host)
                    text += section + more
                    host.file(".toml").write_text(text)
                    lab.start_daemon(topology, host)
                yield running(".pid", topology.hosts)
            finally:
                for host in topology.hosts:
                    process.stop(host.file(".pid"))
                    daemon.remove_taps(host)
                    host.file(".toml").unlink(missing_ok=True)

    def settle(self, machines: list[Node]) -> None:
        """Turns off offloads in containers or virtual machines if this contender runs without them."""
        for each in machines if not self.offloads else []:
            machine.execute(each, "ethtool", "-K", "eth0", "tx", "off", "tso", "off", "gso", "off")

    def section(self) -> str:
        """The [dispatch] section."""
        lines = _lines(self.dispatch)
        return "\n".join(["", "[dispatch]", *lines, ""]) if lines else ""

    def _pinned(self, host: Node) -> Lines:
        """A host's lines of [dispatch], pinning included."""
        match self.pinned:
            case None:
                return self.dispatch
            case Pinned.APART:
                processor = (host.host - 1) % (os.cpu_count() or 1)
            case Pinned.TOGETHER:
                processor = 0
        return (*self.dispatch, ("cpus", [processor]))

    @contextlib.contextmanager
    def own_binaries(self) -> Iterator[None]:
        """Uses this contender's programs while the context lasts."""
        before = os.environ.get("VNET_BINARIES")
        if self.binaries:
            os.environ["VNET_BINARIES"] = str(self.binaries)
        try:
            yield
        finally:
            if self.binaries and before is not None:
                os.environ["VNET_BINARIES"] = before
            elif self.binaries:
                del os.environ["VNET_BINARIES"]


VNET = Vnet(container="veth")
"""What a user gets who follows docs/containers.md."""
TAP = Vnet("vnet, TAP")
"""The same with a TAP, as all other settings below: every frame passes a dispatcher."""
BLOCK = Vnet("vnet, yield=block", (("yield", "block"),))
TOGETHER = Vnet("vnet, dispatchers on one processor", pinned=Pinned.TOGETHER)
TWO = Vnet("vnet, 2 dispatchers", dispatchers=2)
SEALED = Vnet("vnet, sealed", sealed=True)
SETTINGS = [
    VNET,
    TAP,
    BLOCK,
    TWO,
    TOGETHER,
    Vnet("vnet, encapsulation=vnet", encapsulation="vnet"),
    Vnet("vnet, interface MTU 65521", mtu=TAP_MTU_MAX),
]
"""Settings of vnet between containers."""
HOST_TO_HOST: list[Contender] = [Bare(), VxlanDevice(), VxlanContainers(), *SETTINGS, Tinc(), Nebula()]
"""All contenders between containers or hosts."""
