"""vnetd killed by SIGKILL under pings and TCP, with virtual machines and containers of both kinds.

VNET_TEST_KILLS=100 runs the long test, and asserts for how long a machine may be silent.

    h1v1, h1c1 (tap), h1c2 (veth) ── h1 ── underlay ── h2 ── h2v1, h2c1 (tap), h2c2 (veth)

After each kill the test starts vnetd again at once, as a service manager does, and measures the *gap* of each path: its
longest silence, from one answer to a ping until the next. Nothing is subtracted: it contains the end of the killed
process, vnetd's start, QEMU's wait until it connects again, and the interval of the pings. Nothing is set at a
container's device: it waits for the next vnetd with its addresses and routes.

QEMU takes the guest's link down until it has connected again, and a Linux guest forgets its neighbours then. An ARP
request that it makes before it notices that the link is up again is lost inside the guest, and the next one follows
after `retrans_time_ms`, by default 1 s. That is the guest's own wait, so guests wait for 20 ms here;
VNET_TEST_KILLS_ARP_MS=1000 measures them as they come.
"""

import json
import os
import signal
import statistics
import time
from dataclasses import dataclass

import pytest
from checks import assert_balanced, wait_for_path
from conftest import MakeLab
from traffic import Pings, Stream, under_traffic

from vnetlab import daemon, machine, process
from vnetlab.run import wait_until
from vnetlab.topology import Kind, Node, Topology

KILLS = int(os.environ.get("VNET_TEST_KILLS", "2"))
RECONNECT_S = 1
"""After this time QEMU connects again (`reconnect` in vnetlab/guest.py)."""
GAP_S = RECONNECT_S + 0.2
ARP_MS = int(os.environ.get("VNET_TEST_KILLS_ARP_MS", "20"))
"""After this time a guest repeats an ARP request."""
INTERVAL_S = 0.01
APART_S = 0.3
"""From one measurement to the next kill, so that no silence counts for two kills, even if guests' clocks drift."""
PATHS = [("h1v1", "h2v1"), ("h1c1", "h2c1"), ("h1c2", "h2c2"), ("h1c2", "h2v1")]
STREAMS = [("h1v1", "h2v1", 32 << 10), ("h1c1", "h2c1", 128 << 10), ("h1c2", "h2c2", 128 << 10)]
"""Source, destination and bytes every 50 ms: what guests on an emulated processor can take."""


@dataclass(frozen=True)
class Kill:
    """When a vnetd was killed and started again, on this machine's clock."""

    host: str
    killed: float
    started: float
    """When the killed process had ended, and the next one was started."""
    ready: float
    """When that one answered."""


LIMIT_S = max(600, 12 * KILLS)
"""A kill takes 3 s, or more on a busy machine."""


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab(containers=2, container="both")


def kill(topology: Topology, host: Node) -> Kill:
    """Kills a host's vnetd and starts it again."""
    pid = process.find(host.file(".pid"))
    assert pid, f"vnetd on {host.name} runs"
    before = {node.name: network(node) for node in containers(topology)}
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    wait_until("vnetd to end", lambda: process.find(host.file(".pid")) is None, 60, poll_s=0.001)
    started = time.time()
    daemon.start(topology, host)
    ready = time.time()
    assert {node.name: network(node) for node in containers(topology)} == before
    return Kill(host.name, killed, started, ready)


def containers(topology: Topology) -> list[Node]:
    return topology.machines(Kind.CONTAINER)


def network(node: Node) -> tuple:
    """What a machine's device is: its index, MAC address and MTU, its IP addresses, and all routes."""
    if node.kind is Kind.VM:
        # A slow guest may give itself its link-local address after the first look.
        addresses = "ip address show eth0 | grep inet | grep -v 'scope link'"
        words = f"cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu; {addresses}; ip route"
        return tuple(machine.execute(node, words).splitlines())
    inside = ["ip", "-json"]
    (device,) = json.loads(machine.execute(node, *inside, "address", "show", "eth0"))
    routes = [route for family in "46" for route in json.loads(machine.execute(node, *inside, f"-{family}", "route"))]
    for route in routes:
        # Such as "linkdown": no vnetd holds the device.
        route.pop("flags")
    addresses = [(entry["local"], entry["prefixlen"], entry["scope"]) for entry in device["addr_info"]]
    return device["ifindex"], device["address"], device["mtu"], addresses, routes


@pytest.mark.timeout(LIMIT_S)
def test_connections_survive_kills(topology: Topology):
    """Kills in turn on both hosts: each path answers again, no ping twice, TCP goes on and its bytes arrive intact."""
    pings = [Pings(topology.find(a), topology.find(b), INTERVAL_S) for a, b in PATHS]
    streams = [Stream(topology.find(a), topology.find(b), chunk) for a, b, chunk in STREAMS]
    for ping in pings:
        wait_for_path(ping.source, ping.destination.address, 60)
    vms = topology.machines(Kind.VM)
    for vm in vms:
        machine.execute(vm, f"echo {ARP_MS} >/proc/sys/net/ipv4/neigh/eth0/retrans_time_ms")
    boots = [machine.execute(vm, "cat /proc/sys/kernel/random/boot_id") for vm in vms]
    before = [network(node) for node in topology.machines()]
    kills, ends, drops = [], [], []
    with under_traffic(pings, streams):
        for number in range(KILLS):
            kills.append(kill(topology, topology.hosts[number % 2]))
            for ping in pings:
                ping.wait_for_answer()
            for stream in streams:
                stream.wait_for_progress()
            ends.append(time.time())
            drops.append(dropped(topology.hosts[number % 2]))
            time.sleep(APART_S)
    assert [machine.execute(vm, "cat /proc/sys/kernel/random/boot_id") for vm in vms] == boots
    assert [network(node) for node in topology.machines()] == before
    gaps = report(kills, ends, drops, pings)
    if "VNET_TEST_KILLS" in os.environ:
        # A run at length, on a quiet machine.
        assert max(max(each) for each in gaps.values()) <= GAP_S
    assert_balanced(topology)


def dropped(host: Node) -> str:
    """What a host's vnetd has dropped since it started, and why."""
    ports = daemon.ask(host, "stats")["ports"]
    found = {port["name"]: {why: count for why, count in port["drops"].items() if count} for port in ports}
    return json.dumps({name: drops for name, drops in found.items() if drops})


def report(kills: list[Kill], ends: list[float], drops: list[str], pings: list[Pings]) -> dict[str, list[float]]:
    """Prints what was measured until each kill was over; returns each path's gaps, kill by kill."""
    gaps = {
        ping.name: [ping.silence_s(kill.killed, end) for kill, end in zip(kills, ends, strict=True)] for ping in pings
    }
    ended = [kill.started - kill.killed for kill in kills]
    start = [kill.ready - kill.started for kill in kills]
    print(f"\n{len(kills)} kills in {ends[-1] - kills[0].killed:.0f} s")
    print(f"until vnetd had ended {spread(ended)}; until the next one was ready {spread(start)}")
    for ping in pings:
        print(
            f"{ping.name}: gap {spread(gaps[ping.name])}; {ping.lost()} of {ping.sent} pings lost, none answered twice"
        )
    for kill, drop, until_ended, until_ready, *each in zip(kills, drops, ended, start, *gaps.values(), strict=True):
        at = time.strftime("%H:%M:%S", time.gmtime(kill.killed)) + f"{kill.killed % 1:.3f}"[1:]
        steps = f"ended in {until_ended * 1000:.0f} ms, ready in {until_ready * 1000:.0f} ms"
        late = f"; too long; dropped {drop}" if max(each) > GAP_S else ""
        print(f"{kill.host} killed at {at}: {steps}; gaps {[round(gap * 1000) for gap in each]} ms{late}")
    return gaps


def spread(seconds: list[float]) -> str:
    """Smallest, median and largest of some times."""
    low, middle, high = (1000 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{low:.0f} to {high:.0f} ms, median {middle:.0f} ms"
