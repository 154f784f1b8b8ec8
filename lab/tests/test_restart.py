"""Restarts: of vnetd by SIGTERM and SIGKILL, of a guest's driver, of a guest."""

import os
import signal
from collections.abc import Callable

import pytest
from checks import assert_balanced, pinging, reaches, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, guest, lab, machine, process
from vnetlab.image import ensure_image
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology

RESUME_S = 10


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab()


def send(host: Node, number: signal.Signals) -> None:
    """Sends a signal to a host's vnetd."""
    pid = process.find(host.file(".pid"))
    assert pid, f"vnetd on {host.name} runs"
    os.kill(pid, number)


def wait_for_end(host: Node) -> None:
    wait_until(f"vnetd on {host.name} to end", lambda: process.find(host.file(".pid")) is None, 5)


def carrier(node: Node) -> Callable[[], bool]:
    """A function that checks whether a guest's driver sees its link up."""
    return lambda: machine.execute(node, "cat /sys/class/net/eth0/carrier").strip() == "1"


def assert_resumes(topology: Topology) -> None:
    for source, destination in (("h1v1", "h2v1"), ("h2c1", "h1c1"), ("h2v1", "h1c1"), ("h2v1", "h2c1")):
        wait_for_path(topology.find(source), topology.find(destination).address, RESUME_S)
        assert reaches(topology.find(source), topology.find(destination).address)


def test_vnetd_killed_and_started_again(topology: Topology):
    """The guests stay up; QEMU reconnects, and frames are forwarded again."""
    host, vm = topology.hosts[1], topology.find("h2v1")
    boot = machine.execute(vm, "cat /proc/sys/kernel/random/boot_id")
    for _ in range(3):
        send(host, signal.SIGKILL)
        wait_for_end(host)
        assert host.file(".sock").is_socket(), "a killed vnetd leaves its sockets; the next one replaces them"
        lab.start_daemon(topology, host)
        assert_resumes(topology)
    assert machine.execute(vm, "cat /proc/sys/kernel/random/boot_id") == boot


def test_vnetd_stopped(topology: Topology):
    """On SIGTERM the guest's link goes down and sockets are removed, until the next start. A container's TAP stays."""
    host, vm, container = topology.hosts[1], topology.find("h2v1"), topology.find("h2c1")
    assert carrier(vm)()
    send(host, signal.SIGTERM)
    wait_for_end(host)
    wait_until("the guest to see its link go down", lambda: not carrier(vm)(), 5)
    assert "NO-CARRIER" in machine.execute(container, "ip link show eth0")
    assert not host.file(".sock").exists()
    assert not vm.file(".vhost").exists()
    # Sets nothing at the container, unlike `lab.start_daemon`.
    daemon.start(topology, host)
    wait_until("the guest to see its link come up", carrier(vm), RESUME_S)
    assert carrier(container)()
    assert_resumes(topology)


def test_driver_reloaded(topology: Topology):
    vm = topology.find("h1v1")
    for _ in range(3):
        machine.execute(vm, "rmmod virtio_net && ! ip link show eth0 2>/dev/null && modprobe virtio_net && configure")
        assert_resumes(topology)


def test_guest_killed_and_rebooted(topology: Topology):
    vm = topology.find("h1v1")
    pid = process.find(vm.file(".pid"))
    assert pid
    os.kill(pid, signal.SIGKILL)
    wait_until("QEMU to end", lambda: process.find(vm.file(".pid")) is None, 5)
    guest.start(topology, vm, ensure_image(lab.CACHE))
    guest.wait(vm)
    assert_resumes(topology)


def test_configuration_reloaded(topology: Topology):
    """SIGHUP applies the difference under traffic; a file with an error changes nothing."""
    host = topology.hosts[0]
    file, log = host.file(".toml"), host.file(".log")
    before = file.read_text()
    paths = [(topology.find("h1v1"), topology.find("h2v1")), (topology.find("h1c1"), topology.find("h2c1"))]

    def links() -> set[str]:
        return {row["name"] for row in daemon.ask(host, "link", "list")}

    def reload(text: str) -> None:
        file.write_text(text)
        send(host, signal.SIGHUP)

    with pinging(*paths, seconds=8):
        reload(before + '\n[[link]]\nname = "h9"\nremote = "10.78.0.9:9000"\ntrusted = true\n')
        wait_until("the new link", lambda: links() == {"h2", "h9"}, 5)
        begin = len(log.read_text())
        reload(before.replace("[[link]]", '[[link]]\ncolour = "red"'))
        wait_until("the mistake to be logged", lambda: "colour" in log.read_text()[begin:], 5)
        assert f"{file}:{before[: before.index('[[link]]')].count(chr(10)) + 2}" in log.read_text()[begin:]
        assert links() == {"h2", "h9"}
        reload(before)
        wait_until("the link to go", lambda: links() == {"h2"}, 5)


def test_every_frame_is_accounted_for(topology: Topology):
    assert_resumes(topology)
    assert_balanced(topology)
