"""The interconnect inside virtual machines whose hosts have a sealed link: vnetd's engine seals for them."""

import re

import pytest
from checks import assert_balanced, metrics
from conftest import MakeLab
from rdma_guests import assert_nothing_is_left, guest_server, rdma_metric
from rdma_perf import perf_server
from sealed_links import underlay_capture

from vnetlab import machine
from vnetlab.rdma import BOOT_S, PERF, command, figures, start_helpers
from vnetlab.topology import Node, Topology

ZEROS = bytes(64)
"""The program writes zeros."""


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> Topology:
    """Two hosts with a sealed link, each with a container and a virtual machine whose helper runs."""
    topology = make_lab(vms=1, containers=1, rdma=True, sealed=True)
    start_helpers(topology)
    return topology


def seal_drops(host: Node, guest: Node) -> dict[str, int]:
    """Packets of a guest's applications that were dropped, by reason."""
    labels = rf'netns="interface {guest.name}",reason="(\w+)"'
    found = re.findall(rf"^vnet_rdma_seal_drops_total\{{{labels}\}} (\d+)$", metrics(host), re.MULTILINE)
    return {reason: int(count) for reason, count in found}


def test_two_virtual_machines_seal_what_they_exchange(lab: Topology):
    near, far = lab.find("h1v1"), lab.find("h2v1")
    with guest_server(far) as name:
        seen = figures(machine.execute(near, *command("client", name, "1048576", "1"), timeout_s=BOOT_S))
    print(f"two virtual machines: {seen}")
    assert seen["attachment"] == "sealed"
    assert int(seen["messages"]) > 0
    for guest in (near, far):
        host = lab.hosts[guest.host - 1]
        sealed = rdma_metric(host, guest, "sealed_out_packets_total")
        others = rdma_metric(host, guest, "out_packets_total") - sealed
        assert sealed > 10
        assert others < 10, "those that make keys"
        drops = seal_drops(host, guest)
        assert (drops["clear"], drops["forged"]) == (0, 0), drops
    assert_nothing_is_left(lab)


def test_a_container_and_a_virtual_machine_show_nothing_inside_the_overlay(lab: Topology):
    container, guest = lab.find("h1c1"), lab.find("h2v1")
    with guest_server(guest) as name, underlay_capture(container) as seen:
        words = ["client", name, "65536", "0.5"]
        there = figures(machine.execute(container, PERF, *words, timeout_s=BOOT_S))
    with perf_server(container) as name, underlay_capture(container) as seen_back:
        back = figures(machine.execute(guest, *command("client", name, "65536", "0.5"), timeout_s=BOOT_S))
    print(f"container to virtual machine: {there}; back: {back}")
    assert (there["attachment"], back["attachment"]) == ("sealed", "sealed")
    for capture in (seen, seen_back):
        assert len(capture[0]) > 65_536, "the writes were captured"
        assert ZEROS not in capture[0]
    assert_nothing_is_left(lab)


def test_on_one_host_packets_stay_in_clear_text(lab: Topology):
    """No sealed link is on the way."""
    container, guest = lab.find("h2c1"), lab.find("h2v1")
    with perf_server(container) as name:
        seen = figures(machine.execute(guest, *command("client", name, "65536", "0.5"), timeout_s=BOOT_S))
    assert seen["attachment"] == "vm"
    assert_nothing_is_left(lab)


def test_two_applications_of_one_machine_need_no_link(lab: Topology):
    """The channel is opened by frames, which no link seals; then its packets bypass the network."""
    guest = lab.find("h1v1")
    with guest_server(guest) as name:
        seen = figures(machine.execute(guest, *command("client", name, "65536", "0.2"), timeout_s=BOOT_S))
    assert seen["attachment"] == "same-host"
    assert_nothing_is_left(lab)


def test_both_engines_of_one_machine_need_no_link(lab: Topology):
    """Only the helper carries their packets, so none leaves the machine."""
    host, guest = lab.hosts[0], lab.find("h1v1")
    with guest_server(guest) as name:
        words = command("client", name, "65536", "0.2", attachment="process")
        seen = figures(machine.execute(guest, *words, timeout_s=BOOT_S))
    assert seen["attachment"] == "udp"
    assert seal_drops(host, guest)["clear"] == 0
    assert_nothing_is_left(lab)


def test_every_frame_is_accounted_for(lab: Topology):
    assert_balanced(lab)
