"""What tests of sealed links look at: states of links, and what passes on the underlay."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from checks import ping

from vnetlab import daemon, machine, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology

MARK = "never-in-clear-text"
"""What no capture may show."""


def link(host: Node) -> dict:
    """A host's only link."""
    return daemon.ask(host, "link", "list")[0]


def wait_for_state(host: Node, state: str, timeout_s: float = 10) -> None:
    """Waits until a host's link is up, degraded or down."""
    wait_until(f"{host.name}'s link to be {state}", lambda: link(host)["state"] == state, timeout_s, poll_s=0.05)


def hang_up(host: Node) -> None:
    """Has a vnetd read its files again."""
    pid = process.find(host.file(".pid"))
    assert pid
    os.kill(pid, signal.SIGHUP)


@contextlib.contextmanager
def underlay_capture(host: Node) -> Iterator[list[bytes]]:
    """What passes a host's underlay device while the context lasts: one string of bytes, when it has ended."""
    found: list[bytes] = []
    path = host.file(".pcap")
    words = ["timeout", "4", "tcpdump", "-U", "-n", "-i", "eth0", "-s", "0", "-w", str(path)]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(machine.attempt, host, *words)
        wait_until("tcpdump to begin", path.exists, 5)
        time.sleep(0.3)
        yield found
        running.result()
    found.append(path.read_bytes())


def assert_hidden(topology: Topology) -> None:
    """Nothing of what two containers say is seen on the underlay, nor who they are."""
    one, other = topology.find("h1c1"), topology.find("h2c1")
    pattern = MARK.encode().hex()[:32]
    with underlay_capture(topology.hosts[0]) as seen:
        assert ping(one, other.address, "-p", pattern, "-s", "1000", count=20) == (20, 20)
    assert len(seen[0]) > 40 * 1000, "the pings were captured"
    assert bytes.fromhex(pattern)[:8] not in seen[0]
    for mac in (one.mac, other.mac):
        assert bytes.fromhex(mac.replace(":", "")) not in seen[0], "nor are the containers' addresses"
