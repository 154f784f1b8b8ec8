"""ARP and neighbour discovery on the kernel's own path: vnetd decides about them, and the kernel when it has died."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from kernel_pair import ADDRESSES, ADDRESSES_6, FAR, MACS, ONE, TWO, Pair, pair

from vnetlab.run import run, wait_until

PROBES = 10
DEAD_S = 2
"""Longer than it takes the host's programs, and the other vnetd, to take a vnetd for dead."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(f"kn{os.getpid()}", tmp_path_factory.mktemp("kernel-neighbours")) as made:
        made.wait_for_kernel(TWO, FAR)
        made.wait_for_kernel(ONE, TWO)
        yield made


def probe(hosts: Pair, source: int, to: int, version: int) -> None:
    """Has a container ask a known neighbour, at its MAC address, whether it is still there. Waits for the answer."""
    ip = ["ip", "-n", hosts.containers[source]]
    address = {4: ADDRESSES, 6: ADDRESSES_6}[version][to]

    def ask() -> None:
        run([*ip, "neigh", "replace", address, "lladdr", MACS[to], "dev", "eth0", "nud", "probe"])

    def answered() -> bool:
        (neighbour,) = json.loads(run([*ip, "-json", "neigh", "show", address]))
        if neighbour["state"] == ["FAILED"]:
            # Linux sends three probes, a second apart.
            ask()
        return neighbour["state"] == ["REACHABLE"]

    ask()

    wait_until(f"an answer of {address}", answered, 30)


@contextlib.contextmanager
def pings(hosts: Pair) -> Iterator[None]:
    """Keeps the flows between both hosts' containers in use while the context lasts."""
    words = hosts.inside(ONE, "ping", "-n", "-q", "-i", "0.01", ADDRESSES[FAR])
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            time.sleep(0.5)
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("to", [TWO, FAR], ids=["one-host", "wire"])
def test_a_living_vnetd_decides_about_probes(hosts: Pair, to: int, version: int):
    """Each dispatcher on the way forwards both question and answer, although the kernel knows their flow."""
    with pings(hosts):
        places = hosts.hosts if to == FAR else hosts.hosts[:1]
        hosts.wait_for_kernel(ONE, to)
        before = [host.frames()[1] for host in places]
        for _ in range(PROBES):
            probe(hosts, ONE, to, version)
        for host, moved in zip(places, before, strict=True):
            assert host.frames()[1] - moved >= 2 * PROBES
        # Other frames of the flow pass in the kernel.
        hosts.wait_for_kernel(ONE, to)
    hosts.balance()


@pytest.mark.parametrize("dead", [0, 1], ids=["own", "other"])
def test_neighbours_answer_although_a_vnetd_is_dead(hosts: Pair, dead: int):
    """The questions and answers of a host whose vnetd lives take the wire: the other host's vnetd receives nothing."""
    with pings(hosts):
        hosts.wait_for_wire()
        hosts.hosts[dead].end(signal.SIGKILL)
        try:
            time.sleep(DEAD_S)
            for version in (4, 6):
                for source, to in ((ONE, FAR), (FAR, ONE)):
                    probe(hosts, source, to, version)
        finally:
            hosts.hosts[dead].start()
        hosts.wait_for_wire()
    hosts.balance()
