"""`vnetd --take-over` with virtual machines: their front ends stay connected, and no frame is lost.

VNET_TEST_TAKE_OVERS=100 runs the long test.
"""

import os
import time

import pytest
from checks import assert_balanced, pinging, reaches, wait_for_path
from conftest import MakeLab
from take_overs import take_over

from vnetlab import machine
from vnetlab.topology import Node, Topology

TAKE_OVERS = int(os.environ.get("VNET_TEST_TAKE_OVERS", "4"))


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab()


def test_no_frame_of_a_guest_is_lost(topology: Topology):
    boots = [machine.execute(vm, "cat /proc/sys/kernel/random/boot_id") for vm in vms(topology)]
    drops = [machine.execute(vm, "cat /sys/class/net/eth0/carrier_changes") for vm in vms(topology)]
    names = [("h1v1", "h2v1"), ("h2c1", "h1v1"), ("h2v1", "h1c1")]
    paths = [(topology.find(source), topology.find(destination)) for source, destination in names]
    with pinging(*paths, interval_s=0.005, seconds=3):
        for number in range(TAKE_OVERS):
            take_over(topology, topology.hosts[number % 2])
            time.sleep(0.3)
    assert [machine.execute(vm, "cat /proc/sys/kernel/random/boot_id") for vm in vms(topology)] == boots
    changes = [machine.execute(vm, "cat /sys/class/net/eth0/carrier_changes") for vm in vms(topology)]
    assert changes == drops, "the guests' links stay up"
    assert_balanced(topology)


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
