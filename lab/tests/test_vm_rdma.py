"""The interconnect inside virtual machines: vnetd runs the engine on memory that applications of the guest share."""

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from checks import assert_balanced, metrics
from conftest import PROGRAMS, MakeLab
from rdma_perf import perf_server

from vnetlab import channel, machine, process
from vnetlab.run import run, wait_until
from vnetlab.topology import Kind, Node, Topology

HELPER, PERF = "vnet-rdma-guest", "vnet-rdma-perf"
PORT = 7000
BOOT_S = 120
"""Emulated guests take their time."""
LARGER_PIECES = "echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled || true"


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> Topology:
    """Two hosts, each with a container and a virtual machine whose helper runs."""
    topology = make_lab(vms=1, containers=1, rdma=True)
    for guest in topology.machines(Kind.VM):
        machine.execute(guest, LARGER_PIECES)
        start_helper(guest)
    return topology


def start_helper(guest: Node) -> None:
    """Starts the helper in a guest and waits until it listens."""
    log = "/tmp/helper.log"
    words = f"setsid {HELPER} >{log} 2>&1 </dev/null &"
    channel.execute(guest, [words], BOOT_S, lambda _: None)
    wait_until(f"{HELPER} in {guest.name}", lambda: "ready" in machine.read(guest, Path(log)), BOOT_S)


def command(*words: str) -> list[str]:
    """Words that run the measuring program in a guest with vnetd's engine."""
    return ["env", "VNET_RDMA_ATTACHMENT=vm", PERF, *words]


@contextmanager
def guest_server(guest: Node) -> Iterator[str]:
    """Serves one client in a guest; yields the endpoint's name."""
    name = f"{guest.address}:{PORT}"
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(machine.execute, guest, *command("server", name, "once"), timeout_s=BOOT_S)
        host = Node(guest.lab, Kind.HOST, guest.host)
        wait_until(f"the server in {guest.name}", lambda: served.done() or endpoints(host, guest) > 0, BOOT_S)
        yield f"{name}/0"
        assert served.result().startswith(f"{name}/0")


def figures(text: str) -> dict[str, str]:
    """What the measuring program prints."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def rdma_metric(host: Node, guest: Node, name: str) -> int:
    """A value of vnetd's engine for the applications of a virtual machine."""
    found = re.search(rf'^vnet_rdma_{name}\{{netns="interface {guest.name}"\}} (\d+)$', metrics(host), re.MULTILINE)
    return int(found[1]) if found else 0


def endpoints(host: Node, guest: Node) -> int:
    """Open endpoints of a guest's applications."""
    return rdma_metric(host, guest, "endpoints")


def assert_nothing_is_left(lab: Topology) -> None:
    """No attachment, no memory, and nobody was cut off."""
    for guest in lab.machines(Kind.VM):
        host = lab.hosts[guest.host - 1]
        wait_until(
            f"the memory of {guest.name} to be given back",
            lambda host=host, guest=guest: rdma_metric(host, guest, "registered_bytes") == 0,
            60,
        )
        assert rdma_metric(host, guest, "processes") == 0
        assert (rdma_metric(host, guest, "refusals_total"), rdma_metric(host, guest, "broken_total")) == (0, 0)


def test_two_virtual_machines_on_two_hosts(lab: Topology):
    near, far = lab.find("h1v1"), lab.find("h2v1")
    with guest_server(far) as name:
        seen = figures(machine.execute(near, *command("client", name, "1048576", "1"), timeout_s=BOOT_S))
    print(f"two virtual machines: {seen}")
    assert seen["attachment"] == "daemon"
    assert int(seen["messages"]) > 10
    assert float(seen["gbit_s"]) > 0
    for guest in (near, far):
        assert rdma_metric(lab.hosts[guest.host - 1], guest, "submissions_total") > 0
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
    assert seen["attachment"] == "daemon"
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
    assert re.findall(r"attachment (\S+)", text) == ["daemon", "ethernet"]
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
