"""The interconnect in raw Ethernet frames, between containers of two hosts and of one, by vnetd and by the kernel."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checks import assert_balanced
from conftest import PROGRAMS, MakeLab
from sealed_links import underlay_capture

from vnetlab import daemon, machine
from vnetlab.daemon import REPOSITORY
from vnetlab.run import run
from vnetlab.topology import Node, Topology

PERF = "vnet-rdma-perf"
DEVICE = "ether://eth0"
PORT = 7000
FREE_FROM = 49152
"""First port that port 0 stands for."""
DISSECTOR = REPOSITORY / "wireshark" / "vnet.lua"
HELLO, WELCOME, MESSAGE, WRITE = 0, 1, 5, 6
"""Kinds of packets."""
ROUNDS = 64
ATTACHMENT_ETHERNET = 4
CONTROL = "03766e657401" + "525400010001" + "88b5" + b"vrdm\x01\x01".hex() + "00" * 58
"""A control frame of a virtual machine, from a container."""
RESET = 2
INSIDE = (
    "03766e657401" + "525400010001" + "88b5" + b"vrdm\x01\x0b".hex() + "00" * 26 + "00" * 23 + "0010" + "12" + "00" * 15
)
"""A control frame with a datagram between two applications of a virtual machine: a packet of the kind RESET."""


@pytest.fixture(scope="module", params=["tap", "veth"])
def lab(make_lab: MakeLab, request: pytest.FixtureRequest) -> Topology:
    """Two hosts with two containers each, whose frames pass vnetd or, if their flow is known, only the kernel."""
    return make_lab(vms=0, containers=2, container=request.param)


def name_of(node: Node) -> str:
    """The name of a node's endpoint."""
    return f"ether://{node.mac.replace(':', '-')}:{PORT}/0"


@contextmanager
def serving(node: Node, *command: str) -> Iterator[list[str]]:
    """Runs a server that says when it is ready and ends after its client; yields its lines, later ones afterwards."""
    words = machine.namespace_command(node, ["timeout", "120", *command])
    with subprocess.Popen(words, env=machine.environment(node), stdout=subprocess.PIPE, text=True) as server:
        lines = [server.stdout.readline().strip()]
        yield lines
        assert server.wait(60) == 0
        lines += server.stdout.read().splitlines()


def measured(near: Node, far: Node, *prefix: str) -> dict[str, str]:
    """The figures of vnet-rdma-perf between two containers by raw Ethernet."""
    with serving(far, PERF, "server", f"{DEVICE}:{PORT}", "once") as lines:
        assert lines == [name_of(far)]
        words = [*prefix, PERF, "client", "from", f"{DEVICE}:0", name_of(far), "1048576", "0.2"]
        words = machine.execute(near, *words, timeout_s=120).split()
        return dict(zip(words[::2], words[1::2], strict=True))


def test_every_byte_between_two_hosts_arrives(lab: Topology, tmp_path: Path):
    """By the C interface, which says how the packets travelled."""
    program, built = str(tmp_path / "ether_bytes"), daemon.binaries()
    words = ["cc", "-O1", "-Wall", "-Werror", "-o", program, str(PROGRAMS / "ether_bytes.c")]
    run([*words, "-I", str(REPOSITORY / "interconnect/include"), f"-L{built}", f"-Wl,-rpath,{built}", "-lvnet_rdma"])
    near, far = lab.find("h1c1"), lab.find("h2c1")
    before = daemon.ask(lab.hosts[0], "stats")["balance"]["in"]
    with serving(far, program, "serve", f"{DEVICE}:{PORT}") as lines:
        text = machine.execute(near, program, "write", f"{DEVICE}:0", name_of(far), str(ROUNDS), timeout_s=120)
    assert text == f"attachment {ATTACHMENT_ETHERNET}\n"
    assert lines == ["ready", f"rounds {ROUNDS} wrong 0"]
    assert daemon.ask(lab.hosts[0], "stats")["balance"]["in"] > before, "the frames passed the overlay"
    assert_balanced(lab)


def test_containers_of_one_host_take_shared_memory(lab: Topology):
    one, other = lab.find("h1c1"), lab.find("h1c2")
    assert measured(one, lab.find("h2c1"))["attachment"] == "ethernet", "another host has another daemon"
    assert measured(one, other)["attachment"] == "same-host"
    assert measured(one, other, "env", "VNET_RDMA_MEETING=")["attachment"] == "ethernet"


def test_what_cannot_be_is_refused_with_one_line(lab: Topology):
    near, far = lab.find("h1c1"), lab.find("h2c1")
    without = ("setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw")
    for words, why in (
        ([PERF, "server", "ether://absent:7000"], "Ethernet device absent: there is no such device"),
        ([PERF, "server", "ether://lo:7000"], "Ethernet device lo: it is no Ethernet device"),
        ([*without, PERF, "server", f"{DEVICE}:7000"], "Ethernet device eth0: packet sockets need CAP_NET_RAW"),
        ([PERF, "server", DEVICE], "'ether://eth0' is no address to bind: write ADDRESS:PORT"),
        ([PERF, "client", name_of(far)], "is an Ethernet station: write client from ether://DEVICE:0"),
        ([PERF, "client", "from", f"{DEVICE}:0", f"{far.address}:7000/0"], "a node at an Ethernet device reaches only"),
        ([PERF, "client", "from", "0.0.0.0:0", name_of(far)], "one at a UDP address none of them"),
        ([PERF, "client", "from", f"{DEVICE}:0", name_of(near)], "it is at the same Ethernet device"),
        (["env", "VNET_RDMA_ATTACHMENT=daemon", PERF, "server", f"{DEVICE}:7000"], "it has no raw Ethernet"),
    ):
        status, text = machine.attempt(near, *words)
        assert (status, text.count("\n")) == (1, 1), text
        assert why in text
    with serving(far, PERF, "server", f"{DEVICE}:{PORT}", "once"):
        status, text = machine.attempt(far, PERF, "server", f"{DEVICE}:{PORT}")
        assert (status, "another process has port 7000 there" in text) == (1, True), text
        machine.execute(near, PERF, "client", "from", f"{DEVICE}:0", name_of(far), "8", "0.1", timeout_s=120)


def test_wireshark_shows_the_frames_in_containers_and_inside_links(lab: Topology, tmp_path: Path):
    near, far = lab.find("h1c1"), lab.find("h2c1")
    with underlay_capture(near) as inside, underlay_capture(lab.hosts[0]) as outside:
        assert measured(near, far)["attachment"] == "ethernet"
        send(near, CONTROL)
        send(near, INSIDE)
    fields = ["-e", "vnet_rdma.kind", "-e", "vnet_rdma_ether.to", "-e", "vnet_rdma_ether.from", "-e", "eth.dst"]
    lines = dissected(tmp_path, inside[0], "vnet_rdma_ether", *fields)
    assert {int(kind) for kind, *_ in lines} >= {HELLO, WELCOME, MESSAGE, WRITE}
    ports = {(int(to), int(source)) for _, to, source, mac in lines if mac == far.mac}
    ((to, source),) = ports
    assert to == PORT
    assert source >= FREE_FROM, "the client has any free port"
    assert dissected(tmp_path, inside[0], "_ws.malformed", "-e", "frame.number") == []
    assert dissected(tmp_path, inside[0], "vnet_rdma_vm", "-e", "vnet_rdma_vm.kind", "-e", "vnet_rdma.kind") == [
        ["1", ""],
        ["11", str(RESET)],
    ]
    if lab.settings.container == "tap":
        lines = dissected(tmp_path, outside[0], "vnet && vnet_rdma_ether", "-e", "vnet_rdma.kind")
        assert {int(kind) for line in lines for kind in line[0].split(",")} >= {HELLO, WELCOME, MESSAGE, WRITE}


def dissected(folder: Path, capture: bytes, shown: str, *fields: str) -> list[list[str]]:
    """The fields of the frames of a capture that a display filter shows."""
    file = folder / "capture.pcap"
    file.write_bytes(capture)
    words = ["tshark", "-X", f"lua_script:{DISSECTOR}", "-r", str(file), "-Y", shown, "-T", "fields", *fields]
    return [line.split("\t") for line in run(words).splitlines()]


def send(node: Node, frame: str) -> None:
    """Sends a frame, in hexadecimal digits, from a container."""
    sends = f"s.bind(('eth0', 0)); s.send(bytes.fromhex('{frame}'))"
    machine.execute(node, "python3", "-c", f"from socket import *; s = socket(AF_PACKET, SOCK_RAW); {sends}")


def test_control_frames_of_a_container_are_frames_like_others(lab: Topology):
    """They are taken up only from vhost-user interfaces; another container sees them."""
    near, far = lab.find("h1c1"), lab.find("h2c1")
    with underlay_capture(far) as seen:
        send(near, CONTROL)
    assert bytes.fromhex(CONTROL) in seen[0]
    assert_balanced(lab)
