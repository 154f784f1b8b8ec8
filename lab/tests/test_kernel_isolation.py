"""Isolation on the kernel's own path: of containers from the underlay, and of the underlay from containers' root."""

import ctypes
import errno
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator

import pytest
from conftest import PROGRAMS
from kernel_host import devices
from kernel_pair import ADDRESSES, FAR, MACS, ONE, TWO, UNDERLAY, WIRE_PORT, Pair, pair
from packet_count import Packets, in_namespace

from vnetlab.run import run, wait_until

STRANGER = "192.0.2.9"
"""An address on the underlay that no link leads to."""
OTHER_NETWORK = 2
"""Of the first host's second container. The links do not carry it."""
NO_NETWORK = 77
FORGED = 7009
"""UDP port of forged datagrams."""
NEW = "52:54:00:78:00:09"
"""A MAC address from which no flow is known."""
COUNT = 100
SYS_BPF, BPF_PROG_QUERY, TCX = 321, 16, (46, 47)
"""bpf(2) on x86-64, its command, and the attach types of both directions."""


@pytest.fixture(scope="module", params=[False, True], ids=["own", "device"])
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """By the datagrams that programs make, and by the wire's device."""
    options = {"second_network": OTHER_NETWORK, "link": "networks = [1]", "by_device": request.param}
    with pair(f"ki{os.getpid()}", tmp_path_factory.mktemp("kernel-isolation"), **options) as made:
        run(["ip", "-n", made.hosts[1].namespace, "address", "add", f"{STRANGER}/24", "dev", "eth0"])
        yield made


def forge(hosts: Pair, source: str, vni: int, mac: str, to: int) -> None:
    """Sends forged datagrams to the first host, from an address of the second; frames are from a MAC address."""
    words = [sys.executable, str(PROGRAMS / "forge_frames.py"), source, UNDERLAY[0], str(vni)]
    words += [mac, MACS[to], ADDRESSES[FAR], ADDRESSES[to], str(COUNT)]
    run(["ip", "netns", "exec", hosts.hosts[1].namespace, *words])


def wrong_network(hosts: Pair) -> int:
    """Frames from the link that the first host has dropped because the link does not carry their network."""
    (peer,) = (port for port in hosts.hosts[0].ask("stats")["ports"] if port["name"] == "peer")
    return peer["drops"].get("wrong_network", 0)


@pytest.mark.parametrize("mac", [MACS[FAR], NEW], ids=["known", "new"])
@pytest.mark.parametrize(
    ("source", "vni", "to", "dropped"),
    [(STRANGER, 1, ONE, 0), (UNDERLAY[1], NO_NETWORK, ONE, COUNT), (UNDERLAY[1], OTHER_NETWORK, TWO, COUNT)],
    ids=["stranger", "no-network", "other-network"],
)
def test_what_arrives_by_the_wire_belongs_to_its_link(
    hosts: Pair, source: str, vni: int, to: int, dropped: int, mac: str
):
    """Frames enter by their outer source and VNI, whether the kernel knows their flow or vnetd decides."""
    hosts.wait_for_wire()
    expression = f"udp dst port {FORGED}"
    with (
        Packets(hosts.containers[ONE], "eth0", expression) as at_one,
        Packets(hosts.containers[TWO], "eth0", expression) as at_two,
    ):
        before = wrong_network(hosts)
        forge(hosts, source, vni, mac, to)
        wait_until("vnetd to count them", lambda: wrong_network(hosts) == before + dropped, 60)
        # Like the first, but from the link's host and of its network: those arrive, so the first would have.
        forge(hosts, UNDERLAY[1], 1, mac, ONE)
        came = 0

        def have_come() -> bool:
            nonlocal came
            came += at_one.new()
            return came >= COUNT

        wait_until("frames of the link's own network", have_come, 60)
        hosts.balance()
        assert came + at_one.new() == COUNT
        assert at_two.new() == 0
        assert wrong_network(hosts) == before + dropped


def programs_at(namespace: str, device: str) -> int:
    """The number of tcx programs at a device, as root in its network namespace sees them (bpf(2), BPF_PROG_QUERY)."""

    def count(attach_type: int) -> int:
        query = ctypes.create_string_buffer(
            struct.pack("=IIIIQI", socket.if_nametoindex(device), attach_type, 0, 0, 0, 0), 64
        )
        if ctypes.CDLL(None, use_errno=True).syscall(SYS_BPF, BPF_PROG_QUERY, query, ctypes.c_size_t(len(query))):
            # Before Linux 6.6 there is no tcx.
            assert ctypes.get_errno() == errno.EINVAL, os.strerror(ctypes.get_errno())
            return 0
        return struct.unpack_from("=I", query, 24)[0]

    return in_namespace(namespace, lambda: sum(count(attach_type) for attach_type in TCX))


@pytest.mark.parametrize("number", [ONE, TWO])
def test_a_container_has_one_device_and_no_hook(hosts: Pair, number: int):
    namespace = hosts.containers[number]
    links = json.loads(run(["ip", "-n", namespace, "-details", "-json", "link"]))
    assert [link["ifname"] for link in links] == ["lo", "eth0"]
    assert links[1]["linkinfo"]["info_kind"] in ("veth", "netkit")
    tc = ["tc", "-n", namespace]
    assert {qdisc["kind"] for qdisc in json.loads(run([*tc, "-json", "qdisc"]))} == {"noqueue"}
    for hook in ("ingress", "egress"):
        assert run([*tc, "filter", "show", "dev", "eth0", hook]) == ""
    assert "xdp" not in links[1]
    assert programs_at(namespace, "eth0") == 0
    end = next(name for name in devices(hosts.hosts[0].namespace) if name.startswith("vnet-") and "wire" not in name)
    seen = run(["tc", "-n", hosts.hosts[0].namespace, "filter", "show", "dev", end, "ingress"])
    assert seen or programs_at(hosts.hosts[0].namespace, end), "the host's end has them"


def test_a_container_cannot_aim_a_tunnel(hosts: Pair):
    """Its routes may name a tunnel's VNI and remote: the wire takes the network's own VNI to the link's remote."""
    route, behind, victim = ["ip", "-n", hosts.containers[ONE], "route"], "198.51.100.1", "192.0.2.99"
    hosts.wait_for_wire()
    run([*route, *f"add {behind} encap ip id {NO_NETWORK} dst {victim} via {ADDRESSES[FAR]} dev eth0".split()])
    try:
        wire, far = f"udp dst port {WIRE_PORT}", f"dst host {UNDERLAY[1]}"
        # Packets of the link: frames of network 1, or the wire's trials, which use VNI 0.
        right = f"{far} and (udp[12:4] = 0x100 or udp[12:4] = 0)"
        wrong = f"host {victim} or ({wire} and src host {UNDERLAY[0]} and not ({right}))"
        host = hosts.hosts[0].namespace
        with (
            Packets(host, "eth0", f"{wire} and {far} and udp[12:4] = 0x100") as by_the_wire,
            Packets(host, "eth0", wrong) as aimed,
            Packets(hosts.containers[FAR], "eth0", f"icmp and dst host {behind}") as arrived,
        ):
            assert hosts.ping(ONE, behind, COUNT, "-w", "5") == 0
            assert arrived.new() >= COUNT
            assert by_the_wire.new() >= COUNT / 2
            assert aimed.new() == 0
        hosts.balance()
    finally:
        run([*route, "delete", behind])
