"""Kinds of container interfaces as contenders on one host: vnet/examples/kinds/, and a kernel bridge."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from vnetlab import machine, measure, process
from vnetlab.bench import vhost, workload
from vnetlab.bench.contenders import Ends, remove_device, running, start_device
from vnetlab.bench.result import Sample
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Kind, Node, Topology

SMALL_BYTES = 64
TAPS = ("tap", "uring")
DEVICES = ("kinds1", "kinds2", "kinds3")
"""Names in the host's namespace: TAP devices before they are moved, or the host's ends of veth pairs."""


@dataclass(frozen=True)
class Between:
    """The first host's first two containers behind the forwarder or, if `kind` is None, all of them behind a bridge."""

    name: str
    kind: str | None
    blocks: bool = False
    """Whether the program sleeps until a frame arrives; otherwise it spins."""

    def missing(self) -> str | None:
        """The reason if the program is needed and not built."""
        if self.kind is None:
            return None
        try:
            vhost.example("kinds")
        except LabError as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def up(self, topology: Topology) -> Iterator[Ends]:
        """Creates the devices, with the program or the bridge between them."""
        host = topology.hosts[0]
        containers = topology.machines(Kind.CONTAINER, 1)[: None if self.kind is None else 2]
        ends = dict(zip(DEVICES, containers, strict=False))
        with contextlib.ExitStack() as stack:
            for device, container in ends.items():
                stack.callback(remove_device, container.namespace, "eth0")
                if self.kind not in TAPS:
                    words = f"ip -n {host.namespace} link add {device} type veth peer name eth0"
                    run([*words.split(), "netns", container.namespace])
                    run(["ip", "-n", host.namespace, "link", "set", device, "up"])
            if self.kind is None:
                stack.callback(remove_device, host.namespace, "kinds")
                run(["ip", "-n", host.namespace, "link", "add", "kinds", "up", "type", "bridge"])
                for device in ends:
                    run(["ip", "-n", host.namespace, "link", "set", device, "master", "kinds"])
            else:
                stack.callback(process.stop, host.file(".kinds.pid"))
                self._start(host)
            for device, container in ends.items():
                if self.kind in TAPS:
                    run(f"ip -n {host.namespace} link set {device} netns {container.namespace} name eth0".split())
                start_device(container)
            processes = {} if self.kind is None else running(".kinds.pid", [host])
            yield Ends(containers[0], containers[-1], processes)

    def _start(self, host: Node) -> None:
        words = [str(vhost.example("kinds")), str(self.kind), *DEVICES[:2], "block" if self.blocks else "spin"]
        log = host.file(".kinds.log")
        process.start(machine.namespace_command(host, words), host.file(".kinds.pid"), log)
        shown = ["ip", "link", "show", DEVICES[1]]
        wait_until("the forwarder's devices", lambda: machine.attempt(host, *shown)[0] == 0, 10, log)


TAP = Between("TAP, spinning", "tap")
BRIDGE = Between("kernel bridge, veth", None)
CONTENDERS = [
    BRIDGE,
    *(
        Between(f"{name}, {'blocking' if blocks else 'spinning'}", kind, blocks)
        for blocks in (False, True)
        for name, kind in (
            ("TAP", "tap"),
            ("TAP by io_uring", "uring"),
            ("packet socket, veth", "packet"),
            ("packet ring, veth", "ring"),
            ("packet rings both ways, veth", "rings"),
        )
    ),
]


def load(ends: Ends, seconds: float) -> Sample:
    """A TCP stream, small datagrams at full rate, and pings, one per millisecond and back to back."""
    workload.meet(ends)
    sample = workload.tcp(ends, seconds)
    words = ("--udp", "--bitrate", "0", "--length", str(SMALL_BYTES))
    rate = measure.throughput(ends.source, ends.destination, *words, seconds=seconds)
    sample["small_frames_per_s"] = rate / 8 / SMALL_BYTES
    return sample | workload.pings(ends, seconds) | workload.flood(ends, round(1000 * seconds))
