"""A virtual machine that stops on one host and starts on another: traffic follows it after its first frame."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from capture_command import capturing
from checks import assert_balanced, sent_to, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, guest, lab, machine, process
from vnetlab.image import ensure_image
from vnetlab.run import run, wait_until
from vnetlab.topology import Kind, Topology

FOLLOWS_S = 0.2
AWAY_S = 1
"""Pause between the machine's stop on one host and its start on the other; the pings continue."""
AFTER_S = 2
"""How long the pings continue after all hosts know the new location."""
INTERVAL_S = 0.005
GAP_S = 0.2
"""Maximum gap between pings that arrive, on a machine that may be busy."""


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Three hosts that find each other through a store, each with a container and a virtual machine."""
    return make_lab(hosts=3, vms=1, store=True)


def frames(file: Path, direction: str, mac: str) -> list[float]:
    """Times at which frames with this source ("src") or destination ("dst") were captured, by the capture's clock."""
    lines = run(["tcpdump", "-nn", "-tt", "-r", str(file), f"ether {direction} {mac}"]).splitlines()
    return [float(line.split()[0]) for line in lines if line[:1].isdigit()]


def test_traffic_follows_a_virtual_machine(topology: Topology, tmp_path: Path):
    """From h1 to h2: 200 ms after its first frame there, all hosts send to h2 only, and no further ping is lost."""
    vm, pinger = topology.find("h1v1"), topology.find("h3c1")
    here, there, _ = topology.hosts
    wait_for_path(pinger, vm.address)
    file = tmp_path / "c.pcapng"
    interface = ["--kind", "vhost-user", "--socket", str(vm.file(".vhost")), "--mac", vm.mac, "--mtu", "1500"]
    views = list(zip(topology.hosts, topology.machines(Kind.CONTAINER), strict=True))

    def known() -> float:
        """Waits until all hosts know the new location; returns the time."""

        def all_know() -> bool:
            expected = {host.name: f"link {there.name}" for host, _ in views} | {there.name: f"interface {vm.name}"}
            return all(sent_to(host, source, vm.mac) == [expected[host.name]] for host, source in views)

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
    assert len(gaps) > 100, "too few pings arrived"
    assert max(gaps) < GAP_S
    assert_balanced(topology)
