"""The floor: vnet/examples/floor.rs, the smallest possible forwarder between a TAP device and a UDP socket."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from vnetlab import machine, process
from vnetlab.bench import vhost
from vnetlab.bench.contenders import Ends, remove_device, running, start_device
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Kind, Node, Topology

HEADERS = 42
"""Bytes of IPv4, UDP and the inner Ethernet header: one frame per datagram, one datagram per packet."""
PORT = 9900


@dataclass(frozen=True)
class Floor:
    """Containers connected by that program."""

    name: str
    blocks: bool = False
    """Whether the program sleeps until a frame arrives; otherwise it spins."""
    processor: int | None = None
    """CPU of all instances; None leaves the choice to the kernel."""

    def missing(self) -> str | None:
        """The reason if the program is not built."""
        try:
            vhost.example("floor")
        except LabError as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Runs the program on both hosts and moves its devices into the containers."""
        containers = topology.machines(Kind.CONTAINER)
        with contextlib.ExitStack() as stack:
            for host, peer, container in zip(topology.hosts, reversed(topology.hosts), containers, strict=True):
                stack.callback(remove_device, container.namespace, "eth0")
                stack.callback(process.stop, host.file(".floor.pid"))
                self._start(host, peer)
                _move(host, container, topology.settings.underlay_mtu - HEADERS)
            yield Ends(containers[0], containers[-1], running(".floor.pid", topology.hosts))

    def _start(self, host: Node, peer: Node) -> None:
        where = [f"{host.address}:{PORT}", f"{peer.address}:{PORT}"]
        words = [str(vhost.example("floor")), "floor", *where, "block" if self.blocks else "spin"]
        if self.processor is not None:
            words = ["taskset", "--cpu-list", str(self.processor), *words]
        log = host.file(".floor.log")
        process.start(machine.namespace_command(host, words), host.file(".floor.pid"), log)
        shown = ["ip", "link", "show", "floor"]
        wait_until("the forwarder's device", lambda: machine.attempt(host, *shown)[0] == 0, 10, log)


def _move(host: Node, container: Node, mtu: int) -> None:
    """Moves a host's device into a container."""
    run(f"ip -n {host.namespace} link set floor netns {container.namespace} name eth0 mtu {mtu}".split())
    start_device(container)
