"""Every combination of offloads: work that a sender leaves to its device is done when the frame arrives.

    host 1                          host 2                          host 3
    h1c1  tap                       h2c1  tap                       h3c1  tap
    h1v1  VM, all offloads          h2v1  VM, all, one buffer a frame (no MRG_RXBUF)
    h1v2  VM, none                  h2v2  VM, checksums only

Hosts 1 and 2 have a native link, host 3 has classic links, which carry frames without offload metadata.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import assert_balanced, port, wait_for_path

from vnetlab import daemon, guest, lab, machine
from vnetlab.image import ensure_image
from vnetlab.run import wait_until
from vnetlab.topology import Node, Settings, Topology

NAME = "test-offloads"
PROGRAMS = Path(__file__).parent / "programs"
BYTES = 1_500_000
PORT = 8000
SEGMENTATION = (
    "guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off"
)
DEVICES = {
    "h1v1": "",
    "h1v2": f"csum=off,guest_csum=off,gso=off,mrg_rxbuf=off,{SEGMENTATION}",
    "h2v1": "mrg_rxbuf=off",
    "h2v2": f"gso=off,{SEGMENTATION}",
}
NODES = ("h1c1", "h1v1", "h1v2", "h2c1", "h2v1", "h2v2", "h3c1")
FINISHED = ("h1v2", "h3c1")
"""Nodes that only receive frames without pending offloads: none is negotiated, or the link carries no metadata."""
SUPER_FRAMES = [("h1v1", "h2v1"), ("h1v1", "h2c1"), ("h1c1", "h2v1"), ("h2c1", "h1v1"), ("h1v1", "h1c1")]


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    """Three hosts, with guests on two of them."""
    lab.down(NAME)
    topology = lab.prepare(Settings(name=NAME, hosts=3, vms=2))
    try:
        for host in topology.hosts:
            host.file(".toml").write_text(configuration(topology, host))
            lab.start_daemon(topology, host)
        image = ensure_image(lab.CACHE)
        guests = [topology.find(name) for name in DEVICES]
        for each in guests:
            guest.launch(each, guest.command(topology, each, image, device=DEVICES[each.name]))
        for each in guests:
            guest.wait(each)
        with ThreadPoolExecutor() as pool:
            list(pool.map(serve, map(topology.find, NODES)))
        yield topology
    finally:
        lab.down(NAME)


def configuration(topology: Topology, host: Node) -> str:
    """The lab's configuration, with classic links from and to host 3."""
    parts = daemon.configuration(topology, host).split("[[link]]")
    bare = [
        part.replace('"native"', '"vnet"') if host.host == 3 or 'name = "h3"' in part else part for part in parts[1:]
    ]
    return "[[link]]".join([parts[0], *bare])


def address6(node: Node) -> str:
    return f"fd77::{node.host}:{node.address.rpartition('.')[2]}"


def files(node: Node) -> str:
    """The folder that a node serves; containers share one file system."""
    return str(node.file(".files"))


def serve(node: Node) -> None:
    """Serves a random file over IPv4 and IPv6."""
    machine.execute(node, f"mkdir -p {files(node)} && head -c {BYTES} /dev/urandom >{files(node)}/sent")
    machine.execute(node, f"ip -6 address add {address6(node)}/64 dev eth0")
    machine.execute(node, f"busybox httpd -p {PORT} -h {files(node)}")


def sums(text: str) -> list[str]:
    return re.findall(r"\b[0-9a-f]{64}\b", text)


def fetch(node: Node, sources: list[Node], six: bool = False) -> list[str]:
    """Digests of the files that a node fetches from other nodes."""
    addresses = [f"[{address6(source)}]" if six else source.address for source in sources]
    command = f"for a in {' '.join(addresses)}; do busybox wget -q -O - http://$a:{PORT}/sent | sha256sum; done"
    return sums(machine.execute(node, command, timeout_s=60))


def counters(node: Node, protocol: str, name: str) -> int:
    """The value of one of the kernel's counters (/proc/net/snmp)."""
    lines = [line.split() for line in machine.execute(node, "cat /proc/net/snmp").splitlines()]
    titles, values = (line for line in lines if line[0] == f"{protocol}:")
    return int(values[titles.index(name)])


@pytest.mark.parametrize("name", NODES)
def test_content_is_right_from_everyone(topology: Topology, name: str):
    """TCP over IPv4 and IPv6 from all other nodes, without a wrong checksum."""
    node = topology.find(name)
    others = [topology.find(other) for other in NODES if other != name]
    for other in others:
        wait_for_path(node, other.address)
    digests = [sums(machine.execute(other, f"sha256sum <{files(other)}/sent"))[0] for other in others]
    assert len(set(digests)) == len(others)
    assert fetch(node, others) == digests
    assert fetch(node, others, six=True) == digests
    assert counters(node, "Tcp", "InCsumErrors") == 0
    assert counters(node, "Udp", "InCsumErrors") == 0


def capture(node: Node, seconds: int, count: int, seen: str) -> str:
    words = ["timeout", str(seconds), "tcpdump", "-nn", "-vv", "-s", "0", "-i", "eth0", "-c", str(count), seen]
    return machine.attempt(node, *words, timeout_s=seconds + 20)[1]


@pytest.mark.parametrize("name", FINISHED)
def test_frames_without_offloads_have_good_checksums(topology: Topology, name: str):
    """Where no offload can be pending, each frame has a legal size and correct checksums."""
    node = topology.find(name)
    others = [topology.find(other) for other in NODES if other != name]
    # tcpdump must see the frames as they arrived, before the kernel merges them.
    machine.execute(node, "ethtool -K eth0 gro off")
    for other in others:
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(capture, node, 60, 100, f"tcp and src {other.address} and greater 100")
            while not seen.done():
                fetch(node, [other])
        text = seen.result()
        assert text.count("(correct)") >= 100, f"from {other.name}: {text[-500:]}"
        assert "incorrect" not in text, f"from {other.name}"
        lengths = [int(length) for length in re.findall(r"length (\d+)\)", text)]
        assert lengths
        assert max(lengths) <= 1500, f"from {other.name}"


@pytest.mark.parametrize(("source", "destination"), SUPER_FRAMES)
def test_super_frames_cross_whole(topology: Topology, source: str, destination: str):
    """Frames between two nodes that accept super-frames are not segmented."""
    node, other = topology.find(destination), topology.find(source)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(capture, node, 60, 5, f"tcp and src {other.address} and greater 3000")
        while not seen.done():
            fetch(node, [other])
    assert len(re.findall(r"length \d{4,5}\)", seen.result())) >= 5, seen.result()[-500:]


def test_a_guest_turns_offloads_off(topology: Topology):
    """A guest turns segmentation offload off, then checksum offload: the same content arrives."""
    source = topology.find("h1v1")
    receivers = [topology.find(name) for name in NODES if name != source.name]
    digest = sums(machine.execute(source, f"sha256sum <{files(source)}/sent"))[0]
    for setting in ("tso off", "tx off", "tx on tso on"):
        machine.execute(source, f"ethtool -K eth0 {setting}")
        for node in receivers:
            assert fetch(node, [source]) == [digest], f"{setting}, to {node.name}"
            assert counters(node, "Tcp", "InCsumErrors") == 0, f"{setting}, to {node.name}"


def test_bursts_of_the_largest_datagrams_arrive(topology: Topology):
    """A burst of 64 datagrams of 64 000 bytes is sent as 2 816 fragments; one lost fragment loses a datagram."""
    source, destination = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(source, destination.address)
    program = [sys.executable, str(PROGRAMS / "udp_bursts.py")]
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(machine.execute, destination, *program, "receive", timeout_s=60)
        machine.execute(source, *program, "send", destination.address, timeout_s=60)
        assert receiving.result().split() == ["256", "of", "256"]


def test_a_flood_of_the_largest_datagrams(topology: Topology):
    """A sender faster than vnetd fills the TAP's queue: datagrams still arrive, and drops have a name."""
    source, destination = topology.find("h1c1"), topology.find("h2c1")
    wait_for_path(source, destination.address)
    program = [sys.executable, str(PROGRAMS / "udp_bursts.py")]
    host = topology.hosts[0]

    def dropped() -> int:
        return port(daemon.ask(host, "stats"), "interface", source.name)["drops"]["incomplete"]

    before = dropped()
    words = machine.namespace_command(source, [*program, "flood", destination.address])
    with subprocess.Popen(words) as flood:
        try:
            # More than a burst, which the queue can hold.
            machine.execute(destination, *program, "await", "100", timeout_s=120)
            wait_until("an overflow", lambda: dropped() > before, 60)
        finally:
            flood.kill()


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
