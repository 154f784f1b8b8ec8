"""The local network: stations on the user's LAN and the overlay's machines reach each other, without duplicates."""

import re
import time
from collections.abc import Callable

import pytest
from checks import port, reaches, settled, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, lab, machine, measure, process, underlay
from vnetlab.run import run, wait_until
from vnetlab.topology import Kind, Node, Topology

TCP_BPS_MIN = 100e6
UNKNOWN = "52:54:00:ff:ff:01"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Two hosts; the first one has a veth to a LAN with one station, h1c77."""
    topology = make_lab(vms=0, container="veth")
    host, station = topology.hosts[0], lan(topology)
    underlay.add_namespace(station.namespace)
    inside = ["ip", "-n", station.namespace]
    run(f"ip -n {host.namespace} link add eth1 up type veth peer name eth0 netns {station.namespace}".split())
    run([*inside, "link", "set", "eth0", "up"])
    run([*inside, "address", "add", f"{station.address}/16", "dev", "eth0"])
    daemon.vnet(host, "interface", "add", "lan", "--kind", "local", "--device", "eth1")
    return topology


def lan(topology: Topology) -> Node:
    """The station on the LAN."""
    return Node(topology.settings.name, Kind.CONTAINER, 1, 77)


@pytest.mark.parametrize("name", ["h1c1", "h2c1"])
def test_station_and_guest_reach_each_other(topology: Topology, name: str):
    station, guest = lan(topology), topology.find(name)
    wait_for_path(station, guest.address)
    assert reaches(guest, station.address, "-s", "1472", "-M", "do")
    assert measure.throughput(station, guest, seconds=1) > TCP_BPS_MIN
    assert measure.throughput(guest, station, seconds=1) > TCP_BPS_MIN


def test_known_flows_pass_no_dispatcher(topology: Topology):
    """The kernel forwards between the LAN and this host's container; the host keeps its own address on the LAN."""
    host, station, guest = topology.hosts[0], lan(topology), topology.find("h1c1")
    (port_is,) = (each for each in daemon.ask(host, "interface", "list") if each["name"] == "lan")
    assert port_is["path"] == "kernel", port_is
    wait_for_path(station, guest.address)
    assert reaches(guest, station.address)
    forwarded = lambda: sum(each["frames"] for each in settled(host)["dispatchers"])  # noqa: E731
    before, came = forwarded(), port(settled(host), "interface", "lan")["in_frames"]
    for source, destination in ((station, guest), (guest, station)):
        assert "100 received" in machine.execute(source, "ping", "-n", "-c", "100", "-i", "0.01", destination.address)
        assert frames_seen(source, destination, own_mac(destination), count=20, vlan=5) == 20
    assert forwarded() - before < 120, "the kernel forwards"
    assert port(settled(host), "interface", "lan")["in_frames"] - came >= 220
    run(["ip", "-n", host.namespace, "address", "add", "10.79.0.1/24", "dev", "eth1"])
    run(["ip", "-n", station.namespace, "address", "add", "10.79.0.2/24", "dev", "eth0"])
    assert reaches(station, "10.79.0.1")


def test_no_frame_is_duplicated(topology: Topology):
    station, guest = lan(topology), topology.find("h2c1")
    wait_for_path(station, guest.address)
    for source, destination in ((station, guest), (guest, station)):
        words = ["ping", "-n", "-c", "50", "-i", "0.01", "-w", "3", destination.address]
        text = machine.execute(source, *words)
        assert "50 received" in text
        assert "duplicates" not in text
    # Test broadcasts as well, counted at the receiver.
    for source, destination in ((station, guest), (guest, station)):
        assert broadcasts_seen(source, destination, count=20) == 20


def test_frames_to_other_stations_stay_on_the_lan(topology: Topology):
    host, station = topology.hosts[0], lan(topology)
    before = port(settled(host), "interface", "lan")
    send(station, UNKNOWN, count=50)
    wait_for(lambda: unsubscribed(host) - before["discards"]["not_asked"] >= 50)
    after = port(settled(host), "interface", "lan")
    assert after["discards"]["not_asked"] - before["discards"]["not_asked"] == 50
    # The stations' own kernels may send a frame of IPv6 meanwhile.
    assert after["in_frames"] - before["in_frames"] < 10, "frames flooded into the overlay"


def test_reflected_frames_are_dropped(topology: Topology):
    """A LAN in hairpin mode: vnetd must drop the reflected frames of its own guest."""
    host, station, guest = topology.hosts[0], lan(topology), topology.find("h2c1")
    wait_for_path(guest, station.address)
    before = port(settled(host), "interface", "lan")["drops"].get("hairpin", 0)
    inside = ["ip", "-n", station.namespace]
    run([*inside, "link", "add", "mirror", "up", "type", "bridge"])
    run([*inside, "link", "set", "eth0", "master", "mirror"])
    run(["bridge", "-n", station.namespace, "link", "set", "dev", "eth0", "hairpin", "on"])
    try:
        send(guest, "ff:ff:ff:ff:ff:ff", count=30)
        wait_for(lambda: port(settled(host), "interface", "lan")["drops"].get("hairpin", 0) - before >= 30)
    finally:
        run([*inside, "link", "delete", "mirror"])
    wait_for_path(station, guest.address)


def test_vlan_tags_cross(topology: Topology):
    """The kernel strips the VLAN tag of a received frame: vnetd has to restore it."""
    station, guest = lan(topology), topology.find("h2c1")
    for source, destination in ((station, guest), (guest, station)):
        assert broadcasts_seen(source, destination, count=20, vlan=5) == 20


def test_a_device_goes_down_and_comes_back(topology: Topology):
    host, station, guest = topology.hosts[0], lan(topology), topology.find("h1c1")
    run(["ip", "-n", host.namespace, "link", "set", "eth1", "down"])
    state = next(each for each in daemon.ask(host, "interface", "list") if each["name"] == "lan")
    assert state["state"] == "down"
    assert "is down" in state["reason"]
    run(["ip", "-n", host.namespace, "link", "set", "eth1", "up"])
    wait_for_path(station, guest.address)


def test_every_frame_is_accounted_for(topology: Topology):
    for host in topology.hosts:
        assert settled(host)["balance"]["in"] > 0


def test_bursts_of_the_lan_obey_the_limit(topology: Topology):
    """With `burst = 1` every batch has one frame, however many are queued. vnetd forwards all frames of the LAN."""
    host, station, guest = topology.hosts[0], lan(topology), topology.find("h1c1")
    config = host.file(".toml")
    config.write_text(config.read_text() + "\n[dispatch]\nburst = 1\n")
    process.stop(host.file(".pid"))
    lab.start_daemon(topology, host)
    daemon.vnet(host, "interface", "add", "lan", "--kind", "local", "--device", "eth1", "--kernel-path", "off")
    (lan_is,) = (each for each in daemon.ask(host, "interface", "list") if each["name"] == "lan")
    assert (lan_is["path"], lan_is["path_reason"]) == ("vnetd", "its kernel_path is off")
    run(["ip", "-n", guest.namespace, "address", "replace", f"{guest.address}/16", "dev", "eth0"])
    wait_for_path(station, guest.address)
    assert measure.throughput(station, guest, seconds=1) > TCP_BPS_MIN / 10, "one frame a system call"
    assert broadcasts_seen(station, guest, count=100) == 100
    assert settled(host)["balance"]["in"] > 0


def unsubscribed(host: Node) -> int:
    """Number of the LAN's frames to MAC addresses that are not subscribed."""
    return port(daemon.ask(host, "stats"), "interface", "lan")["discards"].get("not_asked", 0)


def broadcasts_seen(source: Node, destination: Node, count: int, vlan: int = 0) -> int:
    """Sends broadcasts as `frames_seen` does."""
    return frames_seen(source, destination, "ff:ff:ff:ff:ff:ff", count, vlan)


def frames_seen(source: Node, destination: Node, to: str, count: int, vlan: int = 0) -> int:
    """Sends frames from one node, tagged or not; returns how many another node receives with that tag."""
    capture = destination.file(".capture")
    tag = f"vlan {vlan} and " if vlan else ""
    # Use a short snap length: with the default one, tcpdump's buffer has room for only 32 frames.
    words = ["tcpdump", "-n", "-e", "-l", "-s", "96", "--immediate-mode", "-i", "eth0", f"{tag}ether proto 0x88b5"]
    process.start(machine.namespace_command(destination, words), destination.file(".tcpdump"), capture)
    wait_for(lambda: "listening on" in capture.read_text())
    send(source, to, count, vlan)
    wait_for(lambda: capture.read_text().count(f"> {to}") >= count)
    time.sleep(0.2)
    process.stop(destination.file(".tcpdump"))
    seen = capture.read_text().count(f"> {to}")
    capture.unlink()
    return seen


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds."""
    wait_until("the test's condition", condition, 5)


def own_mac(node: Node) -> str:
    """MAC address of a node's device."""
    found = re.search(r"link/ether (\S+)", machine.execute(node, "ip", "link", "show", "eth0"))
    assert found
    return found[1]


def send(node: Node, destination: str, count: int, vlan: int = 0) -> None:
    """Sends frames of an experimental EtherType from a node's device."""
    addresses = bytes.fromhex((destination + own_mac(node)).replace(":", ""))
    tag = b"\x81\x00" + vlan.to_bytes(2) if vlan else b""
    frame = (addresses + tag + b"\x88\xb5").ljust(64, b"\xa5")
    script = (
        "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(('eth0', 0)); "
        f"[s.send({frame!r}) for _ in range({count})]"
    )
    machine.execute(node, "python3", "-c", script)
