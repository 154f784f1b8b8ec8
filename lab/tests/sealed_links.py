"""Helpers of tests with sealed links: reloading certificates, and captures of the underlay."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from checks import ping

from vnetlab import machine, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology

MARK = "never-in-clear-text"
"""Payload that no capture may contain."""


def hang_up(host: Node) -> None:
    """Sends SIGHUP to a host's vnetd, which then rereads its files."""
    pid = process.find(host.file(".pid"))
    assert pid
    os.kill(pid, signal.SIGHUP)


@contextlib.contextmanager
def underlay_capture(host: Node) -> Iterator[list[bytes]]:
    """Captures a host's underlay device while the context lasts; afterwards the list holds the capture file's bytes."""
    found: list[bytes] = []
    path = host.file(".pcap")
    # A file of an earlier capture does not show that this one has begun.
    path.unlink(missing_ok=True)
    words = ["tcpdump", "--immediate-mode", "-U", "-n", "-i", "eth0", "-s", "0", "-w", str(path)]
    capture = subprocess.Popen(machine.namespace_command(host, words), stderr=subprocess.DEVNULL)
    try:
        wait_until("tcpdump to begin", lambda: path.exists() and path.stat().st_size > 0, 30)
        yield found
        # Packets that have been sent reach the capture a moment later.
        time.sleep(0.5)
    finally:
        capture.terminate()
        capture.wait(30)
    found.append(path.read_bytes())


def assert_hidden(topology: Topology) -> None:
    """Asserts that the underlay shows neither the payload between two containers nor their addresses."""
    one, other = topology.find("h1c1"), topology.find("h2c1")
    pattern = MARK.encode().hex()[:32]
    with underlay_capture(topology.hosts[0]) as seen:
        assert ping(one, other.address, "-p", pattern, "-s", "1000", count=20) == (20, 20)
    assert len(seen[0]) > 40 * 1000, "the pings were captured"
    assert bytes.fromhex(pattern)[:8] not in seen[0]
    for mac in (one.mac, other.mac):
        assert bytes.fromhex(mac.replace(":", "")) not in seen[0], "a container's address in clear text"
