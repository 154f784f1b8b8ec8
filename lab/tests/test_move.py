"""A virtual machine that stops on one host and starts on another: traffic follows its first frame."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from capture_command import capturing
from checks import assert_balanced, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, guest, lab, machine, process
from vnetlab.image import ensure_image
from vnetlab.run import run, wait_until
from vnetlab.topology import Kind, Node, Topology

FOLLOWS_S = 0.2
AWAY_S = 1
"""Between its end here and its start there; pings go on."""
AFTER_S = 2
"""How long pings go on when all know."""
INTERVAL_S = 0.005
GAP_S = 0.2
"""The longest time in which no ping arrives, on a machine that others use as well."""


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Three hosts that find each other by a store, with a container and a virtual machine each."""
    return make_lab(hosts=3, vms=1, store=True)


def frames(file: Path, direction: str, mac: str) -> list[float]:
    """When frames with this source ("src") or destination ("dst") passed, by the capture's clock."""
    lines = run(["tcpdump", "-nn", "-tt", "-r", str(file), f"ether {direction} {mac}"]).splitlines()
    return [float(line.split()[0]) for line in lines if line[:1].isdigit()]


def place(host: Node, source: Node, mac: str) -> list[str]:
    """Where a host sends frames for an address."""
    return daemon.ask(host, "trace", source.mac, mac, "--from", f"interface {source.name}")["to"]


def test_traffic_follows_a_virtual_machine(topology: Topology, tmp_path: Path):
    """From h1 to h2: 200 ms after its first frame there all hosts send to it there, nowhere else, and all arrives."""
    vm, pinger = topology.find("h1v1"), topology.find("h3c1")
    here, there, _ = topology.hosts
    wait_for_path(pinger, vm.address)
    file = tmp_path / "c.pcapng"
    interface = ["--kind", "vhost-user", "--socket", str(vm.file(".vhost")), "--mac", vm.mac, "--mtu", "1500"]
    views = list(zip(topology.hosts, topology.machines(Kind.CONTAINER), strict=True))

    def known() -> float:
        """Waits until all hosts know, and gives the time."""

        def all_know() -> bool:
            expected = {host.name: f"link {there.name}" for host, _ in views} | {there.name: f"interface {vm.name}"}
            return all(place(host, source, vm.mac) == [expected[host.name]] for host, source in views)

        wait_until(f"all hosts to know that {vm.name} is on {there.name}", all_know, 30, poll_s=0.005)
        return time.time()

    words = ["ping", "-n", "-q", "-i", str(INTERVAL_S), vm.address]
    pings = pinger.file(".ping")
    process.start(machine.namespace_command(pinger, words), pings, pinger.file(".ping-log"))
    with ThreadPoolExecutor() as pool:
        process.stop(vm.file(".pid"))
        daemon.vnet(here, "interface", "del", vm.name)
        time.sleep(AWAY_S)
        daemon.vnet(there, "interface", "add", vm.name, *interface)
        knowing = pool.submit(known)
        with capturing(there, vm.name, "-w", str(file)):
            guest.start(topology, vm, ensure_image(lab.CACHE))
            guest.wait(vm)
            wait_for_path(pinger, vm.address)
            known_at = knowing.result()
            time.sleep(AFTER_S)
            process.stop(pings)
    first, arrived = frames(file, "src", vm.mac)[0], frames(file, "dst", vm.mac)
    assert known_at - first <= FOLLOWS_S
    after = [at for at in arrived if at >= first + FOLLOWS_S]
    gaps = [later - earlier for earlier, later in itertools.pairwise([first + FOLLOWS_S, *after])]
    assert len(gaps) > 100, "pings went on"
    assert max(gaps) < GAP_S
    assert_balanced(topology)
