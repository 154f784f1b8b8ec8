"""Accounting: each of a million frames of mixed sizes is delivered or counted under exactly one reason."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import port, settled, wait_for_path
from conftest import PROGRAMS, MakeLab

from vnetlab import machine
from vnetlab.run import run
from vnetlab.topology import Kind, Node, Topology

FRAMES = 1_000_000
SCRIPT = PROGRAMS / "mixed_frames.py"
FLOOD = PROGRAMS / "udp_flood.py"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab(containers=2)


def packets(container: Node) -> tuple[int, int, int]:
    """The kernel's counters of a container's device: sent to vnetd, dropped before vnetd, received from vnetd."""
    (link,) = json.loads(run(["ip", "-n", container.namespace, "-json", "-statistics", "link", "show", "eth0"]))
    counts = link["stats64"]
    return counts["tx"]["packets"], counts["tx"]["dropped"], counts["rx"]["packets"]


def counts(topology: Topology) -> tuple[dict[Node, tuple[int, int, int]], dict[int, dict]]:
    """The kernel's and vnetd's counters, read while they are constant: kernels send IPv6 multicast at any time."""
    containers = topology.machines(Kind.CONTAINER)
    while True:
        kernel = {node: packets(node) for node in containers}
        # Waits until in + copies = out + drops, exactly.
        vnetd = {host.host: settled(host) for host in topology.hosts}
        if kernel == {node: packets(node) for node in containers}:
            return kernel, vnetd


def send(source: Node, destinations: list[Node]) -> int:
    """Sends until vnetd has received half of the frames: it may get less processor time than the sender.

    Returns the number of frames sent.
    """
    macs, sent, before = [node.mac for node in destinations], 0, packets(source)[0]
    while packets(source)[0] - before < FRAMES // 2:
        assert sent < 10 * FRAMES, f"vnetd receives hardly any frame of {source.name}"
        machine.execute(source, sys.executable, str(SCRIPT), "eth0", str(FRAMES // 4), *macs, timeout_s=120)
        sent += FRAMES // 4
    return sent


def test_a_million_frames(topology: Topology):
    """On each host in + copies = out + drops, and each counter equals the kernel's counter at the other end."""
    containers = topology.machines(Kind.CONTAINER)
    senders = [topology.find("h1c1"), topology.find("h2c1")]
    for node in topology.machines():
        for sender in senders:
            if node != sender:
                wait_for_path(node, sender.address)
    kernel_before, before = counts(topology)

    with ThreadPoolExecutor() as pool:
        everyone = topology.machines()
        jobs = {node: pool.submit(send, node, [other for other in everyone if other != node]) for node in senders}
        sent = {node: job.result() for node, job in jobs.items()}

    kernel_after, after = counts(topology)
    entered = 0
    for node in containers:
        given, dropped, got = (now - then for now, then in zip(kernel_after[node], kernel_before[node], strict=True))
        new, old = (port(stats[node.host], "interface", node.name) for stats in (after, before))
        assert new["in_frames"] - old["in_frames"] == given, f"frames sent by {node.name}"
        assert new["out_frames"] - old["out_frames"] == got, f"frames delivered to {node.name}"
        if node in senders:
            assert given + dropped >= sent[node]
            assert new["drops"]["bad_source"] - old["drops"]["bad_source"] > given / 32, (
                "group addresses are no valid sources"
            )
        entered += given
    assert entered >= FRAMES


def test_an_overloaded_guest(topology: Topology):
    """Two containers flood a guest: frames that find its ring full are dropped, and counted exactly."""
    senders, victim = [topology.find("h1c1"), topology.find("h1c2")], topology.find("h1v1")
    for sender in senders:
        wait_for_path(sender, victim.address)
    kernel_before, before = counts(topology)

    with ThreadPoolExecutor() as pool:
        words = [sys.executable, str(FLOOD), victim.address]
        list(pool.map(lambda sender: machine.execute(sender, *words, timeout_s=30), senders))

    kernel_after, after = counts(topology)
    entered = 0
    for node in senders:
        given = kernel_after[node][0] - kernel_before[node][0]
        new, old = (port(stats[node.host], "interface", node.name) for stats in (after, before))
        assert new["in_frames"] - old["in_frames"] == given, f"frames sent by {node.name}"
        entered += given
    new, old = (port(stats[victim.host], "interface", victim.name) for stats in (after, before))
    delivered, refused = (
        new["out_frames"] - old["out_frames"],
        {reason: new["drops"][reason] - old["drops"][reason] for reason in new["drops"]},
    )
    assert refused["no_buffer"] > 0, "the guest kept up"
    assert {reason for reason, count in refused.items() if count} == {"no_buffer"}
    assert abs(entered - delivered - refused["no_buffer"]) < entered / 100, "more than the kernels' own multicast"
    wait_for_path(senders[0], victim.address)
