"""Nothing is silent: a million frames of mixed sizes, and every one is delivered or counted under one reason."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import MakeLab
from traffic import port, settled, wait_for_path

from vnetlab import machine
from vnetlab.run import run
from vnetlab.topology import Kind, Node, Topology

FRAMES = 1_000_000
SCRIPT = Path(__file__).parent / "frames.py"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab(containers=2)


def packets(container: Node) -> tuple[int, int, int]:
    """The kernel's counts at a container's device: given to vnetd, dropped before it, and got from vnetd."""
    (link,) = json.loads(run(["ip", "-n", container.namespace, "-json", "-statistics", "link", "show", "eth0"]))
    counts = link["stats64"]
    return counts["tx"]["packets"], counts["tx"]["dropped"], counts["rx"]["packets"]


def counts(topology: Topology) -> tuple[dict[Node, tuple[int, int, int]], dict[int, dict]]:
    """The kernel's and vnetd's counts at one moment: kernels send frames of their own (IPv6's multicast)."""
    containers = topology.machines(Kind.CONTAINER)
    while True:
        kernel = {node: packets(node) for node in containers}
        # Waits until in + copies = out + drops, exactly.
        vnetd = {host.host: settled(host) for host in topology.hosts}
        if kernel == {node: packets(node) for node in containers}:
            return kernel, vnetd


def send(source: Node, destinations: list[Node]) -> None:
    macs = [node.mac for node in destinations]
    machine.execute(source, sys.executable, str(SCRIPT), "eth0", str(FRAMES // 2), *macs, timeout_s=120)


def test_a_million_frames(topology: Topology):
    """On each host, in + copies = out + drops; and each count is the kernel's on the other side of the device."""
    containers = topology.machines(Kind.CONTAINER)
    senders = [topology.find("h1c1"), topology.find("h2c1")]
    for node in topology.machines():
        for sender in senders:
            if node != sender:
                wait_for_path(node, sender.address)
    kernel_before, before = counts(topology)

    with ThreadPoolExecutor() as pool:
        everyone = topology.machines()
        jobs = [pool.submit(send, node, [other for other in everyone if other != node]) for node in senders]
        for job in jobs:
            job.result()

    kernel_after, after = counts(topology)
    entered = 0
    for node in containers:
        given, dropped, got = (now - then for now, then in zip(kernel_after[node], kernel_before[node], strict=True))
        new, old = (port(stats[node.host], "interface", node.name) for stats in (after, before))
        assert new["in_frames"] - old["in_frames"] == given, f"every frame that {node.name} gave was seen"
        assert new["out_frames"] - old["out_frames"] == got, f"every frame counted as delivered came to {node.name}"
        if node in senders:
            assert given + dropped >= FRAMES // 2
            assert new["drops"]["bad_source"] - old["drops"]["bad_source"] > given / 32, "group addresses are refused"
        entered += given
    assert entered > FRAMES / 2, "most frames came as far as vnetd"
