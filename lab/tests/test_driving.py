"""Modes, optimistic interrupts and isolation with real guests: changed under traffic, effective, and without loss."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import assert_balanced, ping, pinging, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, lab, machine, process
from vnetlab.run import run, wait_until
from vnetlab.topology import Node, Topology

ROUNDS = 4


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    return make_lab()


def interface(host: Node, name: str) -> dict:
    return next(each for each in daemon.ask(host, "interface", "list") if each["name"] == name)


def test_modes_change_under_traffic(topology: Topology):
    host, find = topology.hosts[0], topology.find
    with pinging((find("h1v1"), find("h2v1")), (find("h1c1"), find("h2c1")), seconds=4):
        for _ in range(ROUNDS):
            for mode in ("vmm-driven", "guest-driven", "adaptive"):
                for name in ("h1v1", "h1c1"):
                    daemon.vnet(host, "interface", "set", name, f"mode={mode}")
                    found = interface(host, name)
                    assert found["mode"] == mode
                    assert mode == "adaptive" or found["driven_by"] == mode.split("-")[0]
    assert interface(host, "h1v1")["switches"] >= ROUNDS
    assert_balanced(topology)


def test_the_mode_follows_the_rate(topology: Topology):
    host, source, destination = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    daemon.vnet(host, "interface", "set", source.name, "mode=adaptive", "rate_low=500", "rate_high=1000")
    wait_for_path(source, destination.address)
    with ThreadPoolExecutor(1) as pool:
        # A flood ping sends thousands of requests per second.
        flood = pool.submit(machine.execute, source, f"ping -n -q -f -c 20000 -w 20 {destination.address}")
        # Mode and rate are those of the last window and may differ in the next one.
        wait_until("the interface to be VMM-driven", lambda: interface(host, source.name)["driven_by"] == "vmm", 5)
        wait_until("the rate to be shown", lambda: interface(host, source.name)["rate"] > 1000, 5)
        assert "20000 received, 0% packet loss" in flood.result()
    wait_until("the interface to be guest-driven", lambda: interface(host, source.name)["driven_by"] == "guest", 5)
    wait_until("the rate to fall", lambda: interface(host, source.name)["rate"] < 500, 5)


def test_optimistic_interrupts_lose_no_ping(topology: Topology):
    """With optimistic interrupts every ping is answered, at every density bound."""
    source, destination = topology.find("h1v1"), topology.find("h2v1")
    wait_for_path(source, destination.address)
    most = 4_294_967_295
    for low, high, least in (
        (50_000_000, 1_000_000_000, 2048),
        (50_000_000, 1_000_000_000, 0),
        (most, most, 0),
        (0, most, 0),
    ):
        for host, guest in zip(topology.hosts, (source, destination), strict=True):
            bounds = [f"receive_density_low={low}", f"receive_density_high={high}", f"early_bytes={least}"]
            daemon.vnet(host, "interface", "set", guest.name, "interrupts=optimistic", *bounds)
        sent, received = ping(source, destination.address, count=300, interval_s=0.002)
        assert sent == received == 300, f"densities {low} to {high}, early from {least} bytes"
    for host, guest in zip(topology.hosts, (source, destination), strict=True):
        found = interface(host, guest.name)
        assert found["interrupts"] == "optimistic"
        assert found["early"] > 0
        assert found["coalesced_withheld"] > 0
        assert found["coalesced_injected"] > 0
        assert found["early_premature"] <= found["early"]
        assert 0 < found["notifications_per_1000_frames"] <= 3000
        daemon.vnet(host, "interface", "set", guest.name, "interrupts=direct")
    assert_balanced(topology)


def test_dispatchers_are_isolated(topology: Topology):
    """Locked memory and busy polling."""
    host = topology.hosts[1]
    config = host.file(".toml")
    text = config.read_text()
    process.stop(host.file(".pid"))
    try:
        config.write_text(text + "\n[dispatch]\nlock_memory = true\nbusy_poll_us = 50\n")
        lab.start_daemon(topology, host)
        pid = process.find(host.file(".pid"))
        locked = run(["grep", "VmLck", f"/proc/{pid}/status"]).split()[1]
        assert int(locked) > 1000, "kB of locked memory"
    finally:
        process.stop(host.file(".pid"))
        config.write_text(text)
        lab.start_daemon(topology, host)
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
