"""The interconnect between virtual machines of one host: packets bypass the network where the configuration allows."""

import pytest
from checks import assert_balanced
from conftest import MakeLab
from rdma_guests import assert_nothing_is_left, guest_server, rdma_metric
from rdma_perf import perf_server

from vnetlab import channel, daemon, machine
from vnetlab.rdma import BOOT_S, PERF, PORT, command, figures, start_helpers
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> Topology:
    """A host with two virtual machines, whose helpers run, and a container."""
    topology = make_lab(hosts=1, vms=2, containers=1, rdma=True)
    start_helpers(topology)
    return topology


def between(near: Node, far: Node) -> dict[str, str]:
    """Figures of writes from one virtual machine to another one."""
    with guest_server(far) as name:
        return figures(machine.execute(near, *command("client", name, "1048576", "1"), timeout_s=BOOT_S))


def test_two_virtual_machines_of_a_host(lab: Topology):
    near, far = lab.find("h1v1"), lab.find("h1v2")
    seen = between(near, far)
    print(f"two virtual machines of a host: {seen}")
    assert seen["attachment"] == "same-host"
    for guest in (near, far):
        assert rdma_metric(lab.hosts[0], guest, "same_host_packets_total") > 10
    assert rdma_metric(lab.hosts[0], near, "same_host_bytes_total") >= int(seen["messages"]) << 20
    assert_nothing_is_left(lab)


def test_a_container_with_the_daemons_engine(lab: Topology):
    container, guest = lab.find("h1c1"), lab.find("h1v1")
    with guest_server(guest) as name:
        words = ["env", "VNET_RDMA_ATTACHMENT=daemon", PERF, "client", name, "1048576", "0.5"]
        seen = figures(machine.execute(container, *words, timeout_s=BOOT_S))
    print(f"container to virtual machine of its host: {seen}")
    assert seen["attachment"] == "same-host"
    # The process engine of the container is reached by the network.
    with perf_server(container) as name:
        seen = figures(machine.execute(guest, *command("client", name, "65536", "0.5"), timeout_s=BOOT_S))
    assert seen["attachment"] == "vm"
    assert_nothing_is_left(lab)


def test_an_interface_with_a_limit_lends_its_network_to_nobody(lab: Topology):
    near, far = lab.find("h1v1"), lab.find("h1v2")
    daemon.vnet(lab.hosts[0], "interface", "set", near.name, "rate_limit=1000")
    try:
        wait_until("the limit to be followed", lambda: between(near, far)["attachment"] == "vm", 60)
    finally:
        daemon.vnet(lab.hosts[0], "interface", "set", near.name, "rate_limit=0")
    wait_until("the limit to be gone", lambda: between(near, far)["attachment"] == "same-host", 60)
    assert_nothing_is_left(lab)


def test_a_change_of_port_security_ends_attachments(lab: Topology):
    """Packets that bypass the network are not compared with it: their channels begin anew, by frames."""
    host, guest = lab.hosts[0], lab.find("h1v1")
    server = " ".join(command("server", f"{guest.address}:{PORT}"))
    channel.execute(guest, [f"setsid {server} >/tmp/server.log 2>&1 </dev/null &"], BOOT_S, lambda _: None)
    wait_until("the server", lambda: rdma_metric(host, guest, "registered_bytes") > 0, BOOT_S)
    daemon.vnet(host, "interface", "set", guest.name, "port_security=true")
    try:
        wait_until("its memory to be given back", lambda: rdma_metric(host, guest, "registered_bytes") == 0, 60)
        machine.execute(guest, f"if pid=$(pidof {PERF}); then kill -9 $pid; fi")
        assert between(guest, lab.find("h1v2"))["attachment"] == "same-host"
    finally:
        daemon.vnet(host, "interface", "set", guest.name, "port_security=false")
    assert_nothing_is_left(lab)


def test_every_frame_is_accounted_for(lab: Topology):
    assert_balanced(lab)
