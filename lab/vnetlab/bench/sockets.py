"""The bench `sockets`: plain UDP sockets between two machines, by vnet/examples/sockets.rs.

It shows what a data path leaves to an application with its own protocol, such as the interconnect: large messages by
segmentation offload, and small ones to and fro.
"""

import json

from vnetlab import machine, process
from vnetlab.bench import vhost, workload
from vnetlab.bench.contenders import TAP, VNET, Bare, Contender, Ends, VxlanContainers, VxlanDevice
from vnetlab.bench.result import Sample
from vnetlab.run import LabError, wait_until
from vnetlab.topology import Node

CONTENDERS: tuple[Contender, ...] = (Bare(), VxlanDevice(), VxlanContainers(), VNET, TAP)
PORT = 9099
TUNNEL_BYTES = 52
"""Bytes that datagrams leave free so that an overlay need not fragment them: the interconnect leaves as many."""
WAIT_S = 40
"""Allowance for the first datagram, which the receiver awaits for 30 s."""


def load(ends: Ends, seconds: float) -> Sample:
    """Messages of 64 KB in one direction, in datagrams of two sizes, then 8 bytes to and fro."""
    workload.meet(ends)
    fitting = {"fitting_bps": messages(ends, seconds, TUNNEL_BYTES)["messages_bps"]}
    return messages(ends, seconds) | fitting | round_trips(ends, seconds)


def messages(ends: Ends, seconds: float, spared: int = 0) -> Sample:
    """Messages that the kernel segments and coalesces, in datagrams that leave `spared` bytes of the device's MTU.

    Counts the bytes that arrive.
    """
    options = ["--mtu", str(mtu(ends.source, ends.destination.address) - spared), "--seconds"]
    words = [str(vhost.example("sockets")), "take", _where(ends), *options, str(seconds)]
    pid, log = ends.source.file(".sockets.pid"), ends.source.file(".sockets.log")
    with vhost.spawn(machine.namespace_command(ends.destination, words)) as taking:
        _await_socket(ends.destination)
        words = [str(vhost.example("sockets")), "send", _where(ends), *options, str(seconds + 1)]
        # The sender fails when the receiver has ended.
        process.start(machine.namespace_command(ends.source, words), pid, log)
        try:
            return {"messages_bps": vhost.receiver_report(taking, seconds + WAIT_S)["bps"]}
        finally:
            process.stop(pid)


def round_trips(ends: Ends, seconds: float) -> Sample:
    """Median time of 8 bytes in one direction."""
    pid, log = ends.destination.file(".sockets.pid"), ends.destination.file(".sockets.log")
    words = [str(vhost.example("sockets")), "answer", _where(ends)]
    process.start(machine.namespace_command(ends.destination, words), pid, log)
    try:
        _await_socket(ends.destination)
        words = [str(vhost.example("sockets")), "ask", _where(ends), "--seconds", str(seconds)]
        report = json.loads(machine.execute(ends.source, *words, timeout_s=seconds + WAIT_S))
    finally:
        process.stop(pid)
    if not report["count"]:
        raise LabError(f"{ends.destination.name} returned no datagram", log)
    return {"datagram_oneway_us": report["median_us"]}


def mtu(node: Node, address: str) -> int:
    """MTU of a node's device towards an address."""
    (route,) = json.loads(machine.execute(node, "ip", "-json", "route", "get", address))
    (link,) = json.loads(machine.execute(node, "ip", "-json", "link", "show", "dev", route["dev"]))
    return link["mtu"]


def _where(ends: Ends) -> str:
    return f"{ends.destination.address}:{PORT}"


def _await_socket(node: Node) -> None:
    bound = ["ss", "-Hlun", f"sport = :{PORT}"]
    wait_until(f"{node.name} to listen", lambda: machine.execute(node, *bound).strip(), 10)
