"""Modes, optimistic interrupts and isolation with real guests: changed under traffic, effective, and without loss."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import assert_balanced, metrics, ping, pinging, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, lab, machine, measure, process, timeline
from vnetlab.run import LabError, run, wait_until
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
    """With optimistic interrupts every ping is answered, at every density bound, and whoever the next data is for.

    Frames of the containers come by the same link, so that machines are notified of data that is not theirs.
    """
    source, destination = topology.find("h1v1"), topology.find("h2v1")
    wait_for_path(source, destination.address)
    most = 4_294_967_295
    with pinging((topology.find("h1c1"), topology.find("h2c1")), seconds=1):
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
    found = [interface(host, guest.name) for host, guest in zip(topology.hosts, (source, destination), strict=True)]
    assert sum(each["early_mispredicted"] for each in found) > 0
    for host, guest in zip(topology.hosts, (source, destination), strict=True):
        found = interface(host, guest.name)
        assert found["interrupts"] == "optimistic"
        assert found["early"] >= found["early_at_arrival"] > 0
        assert found["early_mispredicted"] <= found["early_at_arrival"]
        assert found["coalesced_withheld"] > 0
        assert found["coalesced_injected"] > 0
        assert found["early_premature"] <= found["early"]
        assert 0 < found["notifications_per_1000_frames"] <= 3000
        daemon.vnet(host, "interface", "set", guest.name, "interrupts=direct")
    assert_balanced(topology)


def test_a_timeline_shows_early_notifications(topology: Topology):
    """Steps come in their order; with early notifications, most pings are announced before they are received."""
    source, guest = topology.find("h1v1"), topology.find("h2v1")
    wait_for_path(source, guest.address)
    direct, early, from_2048 = timeline.run(topology, source, guest, (56,), rounds=2, pings=100)
    for row in (direct, early, from_2048):
        assert len(row.rounds) == 2
        for found in row.rounds:
            assert 0 < found["received"] <= found["delivered"] <= found["reacted"] < found[timeline.RTT]
    assert direct.announced == [0, 0]
    assert min(direct.notified) > 0.5
    assert all(found["delivered"] <= found["notified"] <= found["reacted"] for found in direct.rounds)
    assert min(early.announced) > 0.5, "mostly predicted"
    # Both medians are of the same receptions only if every reception was announced; a busy machine misses some.
    shares = zip(early.announced, early.rounds, strict=True)
    assert all(found["announced"] <= found["received"] for share, found in shares if share == 1)
    assert max(from_2048.announced) < 0.5, "a small ping is not announced"
    # Header, and a row for each setting.
    assert len(timeline.table([direct, early, from_2048]).splitlines()) == 4
    assert_balanced(topology)


def test_a_timeline_of_no_interface_is_refused(topology: Topology):
    with pytest.raises(LabError, match="there is no interface nobody"):
        daemon.vnet(topology.hosts[0], "interface", "timeline", "nobody")


@contextlib.contextmanager
def dispatch(topology: Topology, host: Node, lines: str) -> Iterator[None]:
    """The host's vnetd with other lines in [dispatch]."""
    config = host.file(".toml")
    text = config.read_text()
    process.stop(host.file(".pid"))
    try:
        config.write_text(f"{text}\n[dispatch]\n{lines}\n")
        lab.start_daemon(topology, host)
        yield
    finally:
        process.stop(host.file(".pid"))
        config.write_text(text)
        lab.start_daemon(topology, host)
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)


def test_dispatchers_are_isolated(topology: Topology):
    """Locked memory and busy polling."""
    host = topology.hosts[1]
    with dispatch(topology, host, "lock_memory = true\nbusy_poll_us = 50"):
        pid = process.find(host.file(".pid"))
        locked = run(["grep", "VmLck", f"/proc/{pid}/status"]).split()[1]
        assert int(locked) > 1000, "kB of locked memory"


def test_threads_are_recruited_under_load_and_released_when_idle(topology: Topology):
    """UDP keeps its order, TCP flows, and frames are accounted for, while dispatchers move; any traffic is a load."""
    host, source, destination = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    other = topology.find("h1v1"), topology.find("h2v1")
    settings = "threads = 4\nthreads_min = 1\nload_high = 2\nload_low = 1\nspare_cpu = 0"

    def threads() -> dict:
        return daemon.ask(host, "status")["threads"]

    with dispatch(topology, host, settings):
        wait_for_path(source, destination.address)
        wait_for_path(other[0], other[1].address)
        assert (threads()["min"], threads()["max"]) == (1, 4)
        for port in (5301, 5302):
            measure.iperf3_server(destination, port)
        with ThreadPoolExecutor() as pool, pinging(other, seconds=4):
            udp = pool.submit(measure.iperf3_client, source, destination, "-u", "-b", "20M", seconds=4, port=5302)
            tcp = pool.submit(measure.iperf3_client, source, destination, seconds=4, port=5301)
            assert tcp.result()["end"]["sum_received"]["bytes"] > 0
            (stream,) = udp.result()["end"]["streams"]
            assert stream["udp"]["packets"] > 1000
            assert stream["udp"]["out_of_order"] == 0
        busy = threads()
        assert busy["recruited"] > 0
        assert busy["moves"] >= busy["recruited"]
        wait_until("all but one thread to be released", lambda: threads()["now"] == 1, 60)
        wait_until("the release to be counted", lambda: threads()["released"] == threads()["recruited"], 60)
        assert "vnet_dispatch_threads{} 1" in metrics(host)
        # The least number of threads changes at once.
        config = host.file(".toml")
        config.write_text(config.read_text().replace("threads_min = 1", "threads_min = 3"))
        daemon.vnet(host, "apply", str(config))
        wait_until("three threads", lambda: threads()["now"] >= 3, 60)
        assert len({each["thread"] for each in daemon.ask(host, "stats")["dispatchers"]}) >= 3
        assert ping(source, destination.address, count=100) == (100, 100)
        assert_balanced(topology)
