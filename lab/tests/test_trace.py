"""`vnet trace`: the decision about a frame, on one host and on all hosts along its path."""

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest
from checks import port, settled, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    topology = make_lab(hosts=3, vms=0)
    for name in ("h2c1", "h3c1"):
        wait_for_path(topology.find("h1c1"), topology.find(name).address)
    return topology


def trace(host: Node, *arguments: str) -> dict:
    return daemon.ask(host, "trace", *arguments)


@pytest.fixture
def relay(topology: Topology) -> Iterator[None]:
    """Routes frames from the first host to the third through the second."""
    h1, h2, _ = topology.hosts
    target = topology.find("h3c1").mac
    rules = [(h1, "link h2", "interface h1c1"), (h2, "link h3", "link h1")]
    indices = []
    for host, to, origin in rules:
        answer = daemon.vnet(host, "--json", "route", "add", "--dst", target, "--to", to, "--from", origin)
        indices.append((host, str(json.loads(answer)["index"])))
    yield
    for host, index in indices:
        daemon.vnet(host, "route", "del", index)


def test_one_host_explains_its_decision(topology: Topology):
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    found = trace(host, source.mac, target.mac)
    assert (found["by"], found["guard"], found["to"], found["from"]) == (
        "learned",
        "admitted",
        ["link h2"],
        "interface h1c1",
    )
    assert found["cached_by"] == [0], "pings should have filled the route cache"
    (copy,) = found["copies"]
    assert (copy["state"], copy["mtu"], copy["remote"]) == ("up", 1500, f"{topology.hosts[1].address}:9000")
    flooded = trace(host, source.mac, "ff:ff:ff:ff:ff:ff")
    assert flooded["by"] == "flood"
    assert {copy["to"] for copy in flooded["copies"]} == {"link h2", "link h3"}
    refused = trace(host, "03:00:00:00:00:01", target.mac, "--from", "interface h1c1")
    assert (refused["by"], refused["guard"], refused["drop"]) == ("guard", "bad_source", "bad_source")
    assert refused["copies"] == []


@pytest.mark.usefixtures("relay")
def test_a_trace_follows_a_relay_hop_by_hop(topology: Topology):
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h3c1")
    found = trace(host, source.mac, target.mac, "--follow")
    assert (found["by"], found["priority"]) == ("rules", 6)
    (first,) = found["copies"]
    second = first["next"]
    assert (second["host"], second["from"]) == ("h2", "link h1")
    (copy,) = second["copies"]
    assert copy["to"] == "link h3"
    third = copy["next"]
    assert (third["host"], third["from"]) == ("h3", "link h2")
    assert [copy["to"] for copy in third["copies"]] == ["interface h3c1"]
    text = daemon.vnet(host, "trace", source.mac, target.mac, "--follow")
    assert "\n    host h2, from link h1: to link h3, because route " in text
    because = f"because {target.mac} is configured or published there"
    assert f"\n      host h3, from link h2: to interface h3c1, {because}\n" in text


def test_a_trace_follows_a_broadcast_along_every_link(topology: Topology):
    found = trace(topology.hosts[0], topology.find("h1c1").mac, "ff:ff:ff:ff:ff:ff", "--follow")
    hops = {copy["to"]: copy["next"] for copy in found["copies"]}
    assert {link: hop["host"] for link, hop in hops.items()} == {"link h2": "h2", "link h3": "h3"}
    assert [copy["to"] for copy in hops["link h3"]["copies"]] == ["interface h3c1"]


def test_a_trace_names_silent_hosts(topology: Topology):
    host, source, target = topology.hosts[0], topology.find("h1c1"), topology.find("h2c1")
    daemon.vnet(host, "link", "add", "old", "--remote", "10.78.0.99:9000", "--encapsulation", "vnet", "--trusted")
    other = topology.hosts[1]
    process.stop(other.file(".pid"))
    try:
        found = trace(host, source.mac, target.mac, "--follow")
        assert found["copies"][0]["silent"] == "no answer came"
        flooded = trace(host, source.mac, "ff:ff:ff:ff:ff:ff", "--follow")
        silent = {copy["to"]: copy.get("silent") for copy in flooded["copies"]}
        assert silent["link h3"] is None
        assert "encapsulation native" in silent["link old"]
    finally:
        daemon.vnet(host, "link", "del", "old")
        daemon.start(topology, other)


def test_inquiries_are_datagrams_without_frames(topology: Topology):
    """A trace sends no frame: a capture of its flow stays empty."""
    host, source, target = topology.hosts[2], topology.find("h1c1").mac, topology.find("h3c1").mac
    before = port(settled(host), "link", "h1")
    vnet = [str(daemon.binaries() / "vnet"), "--socket", str(host.file(".sock"))]
    about = f"ether src {source} and ether dst {target}"
    capture = subprocess.Popen([*vnet, "capture", "any", about], stderr=subprocess.PIPE, text=True)
    started = lambda: "capture at any started" in host.file(".log").read_text()  # noqa: E731
    wait_until("the capture to start", started, 10)
    for _ in range(3):
        trace(topology.hosts[0], source, target, "--follow")
    capture.send_signal(signal.SIGINT)
    assert capture.communicate(timeout=60)[1] == "0 frames captured, 0 missed\n"
    after = port(settled(host), "link", "h1")
    assert after["in_datagrams"] - before["in_datagrams"] >= 3
    assert after["out_datagrams"] - before["out_datagrams"] >= 3
