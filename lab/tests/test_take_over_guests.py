"""`vnetd --take-over` with virtual machines: their front ends stay connected, and no frame is lost.

VNET_TEST_TAKE_OVERS=100 runs the long test, and afterwards the same traffic for as long without a take-over: emulated
guests and a busy machine stand still at times by themselves.
"""

import os
import time

import pytest
from checks import assert_balanced, reaches, wait_for_path
from conftest import MakeLab
from take_overs import assert_none_lost_between, both, take_over
from traffic import Pings, Stream, longest_silence, silences, under_traffic

from vnetlab import daemon, machine
from vnetlab.topology import Node, Topology

TAKE_OVERS = int(os.environ.get("VNET_TEST_TAKE_OVERS", "4"))
GAP_S = float(os.environ.get("VNET_TEST_TAKE_OVER_GAP_S", "60"))
"""Longest time between two answers during a take-over; on an idle machine it is below 50 ms."""
INTERVAL_S = 0.02
"""Between two pings of a path. In the last 10 ms before the next one, ping(8) spins, which takes an emulated guest's
processor from its answers."""
PATHS = [("h1v1", "h2v1"), ("h2c1", "h1v1"), ("h2v1", "h1c1"), ("h1c1", "h2c1")]
"""Source and destination of pings."""
CHUNK = 32 << 10
"""Bytes that a guest sends every 50 ms."""


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab()


def test_no_frame_of_a_guest_is_lost(topology: Topology):
    boots = [machine.execute(vm, "cat /proc/sys/kernel/random/boot_id") for vm in vms(topology)]
    carrier = [machine.execute(vm, "cat /sys/class/net/eth0/carrier_changes") for vm in vms(topology)]
    for source, destination in PATHS:
        wait_for_path(topology.find(source), topology.find(destination).address, 60)
    counted, dropped = both(topology), drops(topology)
    pings, spans = traffic(topology), []
    with under_traffic(pings, [stream(topology)]):
        for number in range(TAKE_OVERS):
            begin = time.time()
            take_over(topology, topology.hosts[number % 2])
            spans.append((begin, time.time()))
            time.sleep(0.3)
    report(f"{TAKE_OVERS} take-overs in {spans[-1][1] - spans[0][0]:.0f} s", pings, spans)
    assert [ping.lost() for ping in pings] == [0] * len(pings)
    assert_none_lost_between(topology, counted)
    assert drops(topology) == dropped
    if "VNET_TEST_TAKE_OVERS" in os.environ:
        idle = traffic(topology)
        with under_traffic(idle, [stream(topology)]):
            later = time.time() - spans[0][0]
            time.sleep(spans[-1][1] + 0.3 - spans[0][0])
        report("as long without a take-over", idle, [(begin + later, end + later) for begin, end in spans])
    assert [machine.execute(vm, "cat /proc/sys/kernel/random/boot_id") for vm in vms(topology)] == boots
    changes = [machine.execute(vm, "cat /sys/class/net/eth0/carrier_changes") for vm in vms(topology)]
    assert changes == carrier, "the guests' links stay up"
    assert_balanced(topology)
    assert max(silence for ping in pings for silence in (ping.silence_s(*span) for span in spans)) < GAP_S


def traffic(topology: Topology) -> list[Pings]:
    return [Pings(topology.find(source), topology.find(destination), INTERVAL_S) for source, destination in PATHS]


def stream(topology: Topology) -> Stream:
    return Stream(*vms(topology), CHUNK)


def drops(topology: Topology) -> list[int]:
    """Frames that each host has counted as dropped."""
    return [daemon.ask(host, "stats")["balance"]["drops"] for host in topology.hosts]


def report(what: str, pings: list[Pings], spans: list[tuple[float, float]]) -> None:
    """Prints for how long the paths were silent in each span, and at any time."""
    times = [[at for at, _ in ping.answers] for ping in pings]
    print(f"\n{what}: longest silence of any path in each {silences(times, spans)}")
    for ping, path in zip(pings, times, strict=True):
        print(f"  {ping.name}: {silences([path], spans)}; at any time {longest_silence(path) * 1000:.0f} ms; ", end="")
        print(f"{ping.lost()} of {ping.sent} pings lost")


def vms(topology: Topology) -> list[Node]:
    return [topology.find("h1v1"), topology.find("h2v1")]


def test_guests_go_on_after_their_driver_and_vnetd_change(topology: Topology):
    """The front end's connection works on: a driver that is loaded again negotiates over it."""
    host, vm = topology.hosts[0], topology.find("h1v1")
    take_over(topology, host)
    machine.execute(vm, "rmmod virtio_net && ! ip link show eth0 2>/dev/null && modprobe virtio_net && configure")
    wait_for_path(vm, topology.find("h2v1").address, 10)
    take_over(topology, host)
    assert reaches(vm, topology.find("h2v1").address)
    assert reaches(topology.find("h2c1"), vm.address)
    assert_balanced(topology)
