"""Names and addresses of all nodes of a lab: plain data, derived from the settings alone.

Hosts are `h1`, `h2`, …; host 2's first container is `h2c1`, its first virtual machine `h2v1`. Underlay addresses are
10.78.0.HOST and fd78::HOST, overlay addresses 10.77.HOST.N for containers and 10.77.HOST.(100+N) for virtual machines.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vnetlab.run import LabError

STATE = Path("/run/vnet-lab")
"""Parent of the labs' directories."""
TAP_MTU_MAX = 65521
"""The kernel's MTU limit for a TAP device: 65535 minus an Ethernet header."""
PORT = 9000
"""UDP port of [bridge] listen on each host."""


class Kind(StrEnum):
    """Kinds of nodes; the value is the letter in names."""

    HOST = "h"
    CONTAINER = "c"
    VM = "v"


class Wire(StrEnum):
    """Speed of the underlay."""

    NONE = "none"
    GIGABIT = "1g"
    TEN_GIGABIT = "10g"


@dataclass(frozen=True)
class Settings:
    """The settings of a lab."""

    name: str = "lab"
    hosts: int = 2
    vms: int = 1
    containers: int = 1
    mtu: int = 1500
    underlay_mtu: int = 1500
    wire: str = Wire.NONE
    tun: bool = False
    """Whether the underlay's devices carry IP packets without Ethernet headers; only between two hosts."""
    encapsulation: str = "native"
    ipv6: bool = False
    store: bool = False
    """Whether hosts find each other through a store instead of links in their files."""
    dispatchers: int = 1
    """Dispatchers of each vnetd, and its number of ports."""
    queues: int = 1
    """Queue pairs of each container and virtual machine, and vCPUs of the latter."""
    container: str = "tap"
    """Kind of the containers' interfaces: tap, which tests use because every frame passes a dispatcher, or veth.

    "both": tap for each host's first container, veth for the others.
    """
    mpi: bool = False
    """Whether virtual machines have Open MPI, and a shell by which its daemons start."""
    rdma: bool = False
    """Whether virtual machines have the interconnect's programs, and network 1 allows vnetd's engine."""
    sealed: bool = False
    """Whether links are sealed, with certificates of the lab's own authority."""

    def __post_init__(self) -> None:
        """Raises LabError for invalid settings."""
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", self.name):
            raise LabError(f"lab name '{self.name}': use at most 32 of a-z, 0-9 and -, beginning with a letter")
        for what, value, low, high in (
            ("hosts", self.hosts, 1, 99),
            ("vms", self.vms, 0, 99),
            ("containers", self.containers, 0, 99),
            ("mtu", self.mtu, 68, 65535),
            ("dispatchers", self.dispatchers, 1, 64),
            ("queues", self.queues, 1, 16),
            ("underlay-mtu", self.underlay_mtu, 1280 if self.ipv6 else 576, 65535),
        ):
            if not low <= value <= high:
                raise LabError(f"--{what} {value}: choose {low} to {high}")


@dataclass(frozen=True)
class Node:
    """A host, a container or a virtual machine."""

    lab: str
    kind: Kind
    host: int
    number: int = 0
    """Counted from 1 per host and kind; 0 for the host itself."""

    @property
    def name(self) -> str:
        """Name on the command line: h1, h1c1, h1v1."""
        return f"h{self.host}" if self.kind is Kind.HOST else f"h{self.host}{self.kind}{self.number}"

    @property
    def address(self) -> str:
        """IPv4 address: on the underlay for hosts, on the overlay for others."""
        if self.kind is Kind.HOST:
            return f"10.78.0.{self.host}"
        return f"10.77.{self.host}.{self.number + (100 if self.kind is Kind.VM else 0)}"

    @property
    def address6(self) -> str:
        """A host's IPv6 address on the underlay."""
        return f"fd78::{self.host}"

    @property
    def mac(self) -> str:
        """Locally administered MAC address of a container or virtual machine."""
        return f"52:54:00:{self.host:02x}:{1 if self.kind is Kind.VM else 0:02x}:{self.number:02x}"

    @property
    def namespace(self) -> str:
        """The network namespace of a host or container."""
        return f"{self.lab}-{self.name}"

    @property
    def state(self) -> Path:
        """The lab's directory."""
        return STATE / self.lab

    def file(self, suffix: str) -> Path:
        """A file of this node in the lab's directory, such as .log, .sock or .pid."""
        return self.state / f"{self.name}{suffix}"


@dataclass(frozen=True)
class Topology:
    """All nodes of a lab."""

    settings: Settings

    @property
    def state(self) -> Path:
        """The lab's directory."""
        return STATE / self.settings.name

    @property
    def switch(self) -> str:
        """Namespace of the bridge that connects the hosts, used unless there are exactly two."""
        return f"{self.settings.name}-underlay"

    @property
    def hosts(self) -> list[Node]:
        """All hosts."""
        return [Node(self.settings.name, Kind.HOST, host) for host in range(1, self.settings.hosts + 1)]

    def machines(self, kind: Kind | None = None, host: int | None = None) -> list[Node]:
        """Containers and virtual machines, optionally of one kind or one host."""
        counts = {Kind.CONTAINER: self.settings.containers, Kind.VM: self.settings.vms}
        return [
            Node(self.settings.name, each, home.host, number)
            for home in self.hosts
            if host in (None, home.host)
            for each, count in counts.items()
            if kind in (None, each)
            for number in range(1, count + 1)
        ]

    def find(self, name: str) -> Node:
        """The node of that name; raises LabError if there is none."""
        nodes = [*self.hosts, *self.machines()]
        for node in nodes:
            if node.name == name:
                return node
        raise LabError(f"lab {self.settings.name} has no '{name}'; it has {' '.join(node.name for node in nodes)}")

    def container_kind(self, node: Node) -> str:
        """Kind of a container's interface: tap or veth."""
        if self.settings.container == "both":
            return "tap" if node.number == 1 else "veth"
        return self.settings.container

    def mtu(self, node: Node) -> int:
        """MTU of a container or virtual machine, within a TAP device's limit."""
        return self.settings.mtu if node.kind is Kind.VM else min(self.settings.mtu, TAP_MTU_MAX)
