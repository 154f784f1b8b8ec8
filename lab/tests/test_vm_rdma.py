"""The interconnect inside virtual machines: vnetd runs the engine on memory that applications of the guest share."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import assert_balanced
from conftest import PROGRAMS, MakeLab
from rdma_guests import assert_nothing_is_left, endpoints, guest_server, rdma_metric
from rdma_perf import perf_server

from vnetlab import channel, machine, process
from vnetlab.rdma import BOOT_S, HELPER, PERF, PORT, command, figures, start, start_helper, start_helpers
from vnetlab.run import run, wait_until
from vnetlab.topology import Topology


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> Topology:
    """Two hosts, each with a container and a virtual machine whose helper runs."""
    topology = make_lab(vms=1, containers=1, rdma=True)
    start_helpers(topology)
    return topology


def test_two_virtual_machines_on_two_hosts(lab: Topology):
    near, far = lab.find("h1v1"), lab.find("h2v1")
    with guest_server(far) as name:
        seen = figures(machine.execute(near, *command("client", name, "1048576", "1"), timeout_s=BOOT_S))
    print(f"two virtual machines: {seen}")
    assert seen["attachment"] == "vm"
    assert int(seen["messages"]) > 10
    assert float(seen["gbit_s"]) > 0
    for guest in (near, far):
        assert rdma_metric(lab.hosts[guest.host - 1], guest, "submissions_total") > 0
    assert_nothing_is_left(lab)


def test_the_hosts_engine_is_chosen_by_itself(lab: Topology):
    """Where the helper runs, unless the user says otherwise; without it, the machine's own network."""
    near, far = lab.find("h1v1"), lab.find("h2v1")

    def chosen(words: str) -> str:
        with guest_server(far) as name:
            seen = machine.execute(near, f"{words} {PERF} client {name} 65536 0.5", timeout_s=BOOT_S)
            return figures(seen.splitlines()[-1])["attachment"]

    assert chosen("") == "vm"
    assert chosen("VNET_RDMA_ATTACHMENT=process") == "udp"
    machine.execute(near, f"kill $(pidof {HELPER})")
    try:
        assert chosen("") == "udp"
    finally:
        start_helper(near)
    assert_nothing_is_left(lab)


def test_both_engines_meet_inside_one_machine(lab: Topology):
    """The helper passes packets on, which no network could carry."""
    guest = lab.find("h1v1")
    with guest_server(guest) as name:
        words = command("client", name, "65536", "1", attachment="process")
        seen = figures(machine.execute(guest, *words, timeout_s=BOOT_S))
    print(f"process engine to vnetd's: {seen}")
    assert (seen["attachment"], int(seen["messages"]) > 10) == ("udp", True)
    name = f"{guest.address}:{PORT}"
    start(guest, f"env VNET_RDMA_ATTACHMENT=process {PERF} server {name} once", Path("/tmp/own.log"), f"{name}/0")
    seen = figures(machine.execute(guest, *command("client", f"{name}/0", "65536", "1"), timeout_s=BOOT_S))
    print(f"vnetd's engine to that of a process: {seen}")
    assert rdma_metric(lab.hosts[0], guest, "relayed_packets_total") > 100
    assert rdma_metric(lab.hosts[0], guest, "spoofed_drops_total") == 0
    assert (seen["attachment"], int(seen["messages"]) > 10) == ("vm", True)
    assert_nothing_is_left(lab)


def test_a_container_and_a_virtual_machine(lab: Topology):
    container, guest = lab.find("h1c1"), lab.find("h2v1")
    with guest_server(guest) as name:
        seen = figures(machine.execute(container, PERF, "client", name, "1048576", "0.5", timeout_s=BOOT_S))
    assert seen["attachment"] == "udp"
    print(f"container to virtual machine: {seen}")
    # The other way round, on one host.
    with perf_server(lab.find("h2c1")) as name:
        seen = figures(machine.execute(guest, *command("client", name, "1048576", "0.5"), timeout_s=BOOT_S))
    assert seen["attachment"] == "vm"
    print(f"virtual machine to container of its host: {seen}")
    assert_nothing_is_left(lab)


def test_raw_ethernet_and_control_frames_share_the_wire(lab: Topology):
    """The guest's kernel has a packet socket, the helper another one: each takes its own frames of one ethertype."""
    guest, container = lab.find("h1v1"), lab.find("h2c1")
    bind = "ether://eth0:7000"
    name = f"ether://{container.mac.replace(':', '-')}:7000/0"
    words = machine.namespace_command(container, ["timeout", "120", PERF, "server", bind, "once"])
    with subprocess.Popen(words, env=machine.environment(container), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().strip() == name
        with guest_server(lab.find("h2v1")) as other:
            control = [*command("client", other, "8192", "0.5"), "&&"]
            frames = [PERF, "client", "from", "ether://eth0:0", name, "65536", "0.5"]
            text = machine.execute(guest, " ".join([*control, *frames]), timeout_s=BOOT_S)
        assert server.wait(60) == 0
    assert re.findall(r"attachment (\S+)", text) == ["vm", "ethernet"]
    assert_nothing_is_left(lab)


def test_a_killed_application_and_a_killed_helper_leave_nothing(lab: Topology):
    host, guest = lab.hosts[0], lab.find("h1v1")
    server = " ".join(command("server", f"{guest.address}:{PORT}"))
    wait_until("the servers before to be gone", lambda: endpoints(host, guest) == 0, BOOT_S)
    for victim in (PERF, HELPER):
        channel.execute(guest, [f"setsid {server} >/tmp/server.log 2>&1 </dev/null &"], BOOT_S, lambda _: None)
        wait_until("the server", lambda: rdma_metric(host, guest, "registered_bytes") > 0, BOOT_S)
        machine.execute(guest, f"kill -9 $(pidof {victim})")
        wait_until("its memory to be given back", lambda: rdma_metric(host, guest, "registered_bytes") == 0, 60)
    # The server without an engine would go on trying.
    machine.execute(guest, f"kill -9 $(pidof {PERF})")
    start_helper(guest)
    with guest_server(guest) as name:
        machine.execute(lab.find("h2c1"), PERF, "client", name, "1000", "0.1", timeout_s=BOOT_S)
    assert_nothing_is_left(lab)


def test_a_hostile_guest_harms_nobody(lab: Topology, tmp_path: Path):
    """Random entries, positions, keys, offsets, lengths, addresses and frames, while another guest is at work."""
    host, hostile, victim = lab.hosts[0], lab.find("h1v1"), lab.find("h2v1")
    program = tmp_path / "hostile_rdma_guest"
    run(["cc", "-O1", "-o", str(program), str(PROGRAMS / "hostile_rdma_guest.c")])
    machine.send(hostile, program)
    pid = process.find(host.file(".pid"))
    machine.execute(hostile, f"kill $(pidof {HELPER})")
    with ThreadPoolExecutor(1) as pool:
        words = [str(program), "eth0", hostile.address, "15", "1"]
        attack = pool.submit(machine.execute, hostile, *words, timeout_s=BOOT_S)
        while not attack.done():
            with guest_server(victim) as name:
                client = ["env", "VNET_RDMA_ATTACHMENT=daemon", PERF, "client", name, "100000", "0.5"]
                figures(machine.execute(lab.find("h1c1"), *client, timeout_s=BOOT_S))
        counts = figures(attack.result())
    print(f"hostile guest: {counts}")
    assert int(counts["opened"]) > 0
    assert process.find(host.file(".pid")) == pid, "vnetd runs on"
    wait_until("its memory to be given back", lambda: rdma_metric(host, hostile, "registered_bytes") == 0, 60)
    assert rdma_metric(host, hostile, "broken_total") > 0
    start_helper(hostile)
    with guest_server(hostile) as name:
        machine.execute(lab.find("h2c1"), PERF, "client", name, "1000", "0.1", timeout_s=BOOT_S)


def test_every_frame_is_accounted_for(lab: Topology):
    assert_balanced(lab)
