"""Splits a ping between virtual machines into the overlay's round trip and the machines' processing time.

Frames are captured where they leave and enter a machine: at QEMU's tap by tcpdump, at vnetd's port by `vnet capture`.
Both use the same clock, so four timestamps per ping separate the overlay's round trip from the processing time.
"""

import contextlib
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from vnetlab import daemon, machine, measure
from vnetlab.bench.contenders import Ends
from vnetlab.bench.result import Sample
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Node, Topology

PINGS = 300
INTERVAL_S = 0.01
"""Long enough for a ping to finish before the next one, even on a machine at half speed."""
LINE = re.compile(r"^([\d.]+) .*ICMP echo (request|reply), id \d+, seq (\d+),", re.MULTILINE)
Times = dict[tuple[str, int], float]
"""Seconds at which the request and the reply of each sequence number passed."""


def of_pings(topology: Topology, ends: Ends) -> Sample:
    """Medians of the overlay's round trip, and of the rest of a ping: the machines' processing time."""
    near, far = topology.hosts[0], topology.hosts[-1]
    options = ("-i", str(INTERVAL_S))
    with _watched(near, ends.source) as at_near, _watched(far, ends.destination) as at_far:
        _, whole = measure.ping(ends.source, ends.destination.address, *options, count=PINGS, timeout_s=60)
        # Captures are flushed with a delay.
        time.sleep(0.5)
    here, there = _read(at_near), _read(at_far)
    ways = [way for number in range(1, PINGS + 1) if (way := way_us(here, there, number)) is not None]
    if len(ways) < PINGS / 2:
        raise LabError(f"only {len(ways)} of {PINGS} pings were seen at all four points")
    way = statistics.median(ways)
    return {"way_us": way, "machines_us": statistics.median(whole) - way}


def way_us(here: Times, there: Times, number: int) -> float | None:
    """A ping's time between the machines, the sum of both directions; None if a capture missed a frame of it."""
    try:
        forth = there["request", number] - here["request", number]
        back = here["reply", number] - there["reply", number]
    except KeyError:
        return None
    return 1e6 * (forth + back)


@contextlib.contextmanager
def _watched(host: Node, guest: Node) -> Iterator[Path]:
    """Captures at a machine's port while the context lasts; returns the file."""
    file = guest.file(".capture")
    file.unlink(missing_ok=True)
    if host.file(".sock").exists():
        words = [str(daemon.binaries() / "vnet"), "--socket", str(host.file(".sock"))]
        words += ["capture", guest.name, "icmp", "--write", str(file)]
    else:
        # Immediate mode: otherwise tcpdump loses buffered frames when it exits.
        words = ["tcpdump", "-i", "tap", "--immediate-mode", "-U", "-w", str(file), "icmp"]
        words = machine.namespace_command(host, words)
    capture = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until("the capture to start", lambda: file.exists() and file.stat().st_size > 0, 10)
        yield file
    finally:
        with contextlib.suppress(ProcessLookupError):
            capture.send_signal(signal.SIGINT)
        try:
            capture.wait(10)
        except subprocess.TimeoutExpired:
            capture.kill()


def _read(file: Path) -> Times:
    """The timestamps of a capture file."""
    text = run(["tcpdump", "-ntt", "--time-stamp-precision=nano", "-r", str(file)])
    file.unlink()
    return times(text)


def times(text: str) -> Times:
    """The timestamps in tcpdump's output."""
    return {(kind, int(number)): float(seconds) for seconds, kind, number in LINE.findall(text)}
