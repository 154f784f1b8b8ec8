"""What the kernel's queueing disciplines and devices do to frames that it forwards for vnetd: priority, and losses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import PROGRAMS
from kernel_pair import ADDRESSES, FAR, MACS, ONE, TWO, WIRE_PORT, Pair, pair

from vnetlab.run import run, wait_until

IN_TURN = str(PROGRAMS / "in_turn.py")
LOW, HIGH = 0x20, 0xB8
"""Type of service: class selector 1 (RFC 3662), expedited forwarding (RFC 3246)."""
LOW_COUNT, HIGH_COUNT = 50, 5
RATE = "100kbit"
"""The low datagrams take four seconds; the high ones are sent long before."""
HTB = f"""
qdisc add dev eth0 root handle 1: htb default 2
class add dev eth0 parent 1: classid 1:9 htb rate {RATE} burst 2000
class add dev eth0 parent 1:9 classid 1:1 htb rate 8kbit ceil {RATE} prio 0 burst 2000
class add dev eth0 parent 1:9 classid 1:2 htb rate 8kbit ceil {RATE} prio 1 burst 2000
class add dev eth0 parent 1:9 classid 1:3 htb rate 8kbit ceil {RATE} prio 2 burst 2000
"""
"""Three priorities at a device. What no filter names is of the second: ARP, probes, the wire's trials."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(f"kd{os.getpid()}", tmp_path_factory.mktemp("kernel-devices")) as made:
        yield made


def classes(namespace: str) -> dict[str, int]:
    """Packets of each priority at a device."""
    text = run(["tc", "-n", namespace, "-statistics", "class", "show", "dev", "eth0"])
    return {
        name: int(packets)
        for name, packets in re.findall(r"class \S+ (\S+) .*? Sent \d+ bytes (\d+) pkt", text, re.DOTALL)
    }


@pytest.mark.parametrize("place", ["container", "underlay"])
def test_marked_frames_pass_first(hosts: Pair, place: str):
    """An administrator's queueing discipline where frames wait: at the container's device, or at the underlay's."""
    namespace, at, wire = hosts.containers[ONE], 1, ""
    if place == "underlay":
        # The frame's own type of service: behind IPv4, UDP, VXLAN and Ethernet headers.
        namespace, at, wire = hosts.hosts[0].namespace, 51, f"match ip dport {WIRE_PORT} 0xffff"
    hosts.wait_for_wire()
    tc = ["tc", "-n", namespace]
    try:
        for line in HTB.strip().splitlines():
            run([*tc, *line.split()])
        for tos, number in ((HIGH, 1), (LOW, 3)):
            words = f"match ip protocol 17 0xff {wire} match u8 {tos:#x} 0xfc at {at} flowid 1:{number}"
            run([*tc, *f"filter add dev eth0 parent 1: protocol ip u32 {words}".split()])
        words = hosts.inside(FAR, sys.executable, IN_TURN, "take", str(LOW_COUNT + HIGH_COUNT))
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as taker:
            try:
                assert taker.stdout.readline() == "ready\n"
                before = classes(namespace)
                sent = map(str, (LOW, HIGH, LOW_COUNT, HIGH_COUNT))
                sends = hosts.inside(ONE, sys.executable, IN_TURN, "send", ADDRESSES[FAR], *sent)
                moved = hosts.hosts[0].grows(LOW_COUNT, lambda: (run(sends), taker.wait(120)))
                order = taker.stdout.read().strip()
            finally:
                taker.kill()
        print(place, order, moved, before, classes(namespace))
        assert moved[1] < 20, "the kernel forwards"
        assert order.count("h") == HIGH_COUNT
        assert order.rindex("h") < len(order) / 2, "sent last, and delivered first"
        counted = {handle: packets - before[handle] for handle, packets in classes(namespace).items()}
        assert counted["1:1"] >= HIGH_COUNT
        assert counted["1:3"] >= LOW_COUNT
    finally:
        run([*tc, "qdisc", "del", "dev", "eth0", "root"])
    hosts.balance()


SEND = "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\nfor _ in range(100): s.sendto(bytes(1000), (%r, 9))"


def lost(namespace: str, device: str) -> int:
    """Frames that a device has dropped, as `ip -s link` shows them."""
    words = ["ip", "-n", namespace, "-json", "-statistics", "link", "show", device]
    (link,) = json.loads(run(words))
    return link["stats64"]["tx"]["dropped"]


def test_what_is_lost_after_the_verdict_is_the_devices(hosts: Pair):
    """The underlay's device has a queue for a few frames: vnet's counters balance, and the device counts the rest."""
    host = hosts.hosts[0]
    hosts.wait_for_wire()
    (port,) = (port for port in host.ask("stats")["ports"] if port["name"] == "peer")
    before, out = lost(host.namespace, "eth0"), port["out_frames"]
    bucket = "tbf rate 100kbit burst 2000 limit 5000"
    run(["tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "root", *bucket.split()])
    try:
        sends = hosts.inside(ONE, sys.executable, "-c", SEND % ADDRESSES[FAR])
        moved = host.grows(100, lambda: run(sends))
        (port,) = (port for port in host.ask("stats")["ports"] if port["name"] == "peer")
        assert moved[1] < 20, "the kernel forwards"
        assert port["out_frames"] - out >= 100, "handed over"
        # The bucket and its queue hold seven.
        assert 80 <= lost(host.namespace, "eth0") - before <= 100 + 20
        shown = ["tc", "-n", host.namespace, "-statistics", "-json", "qdisc", "show", "dev", "eth0"]

        def agree() -> bool:
            """Probes of the link are lost, too, also between the two counters."""
            return json.loads(run(shown))[0]["drops"] == lost(host.namespace, "eth0") - before

        wait_until("the counters' agreement", agree, 60)
    finally:
        run(["tc", "-n", host.namespace, "qdisc", "del", "dev", "eth0", "root"])
    hosts.wait_for_wire()
    hosts.balance()


@pytest.mark.parametrize("to", [TWO, FAR])
def test_frames_to_a_device_that_is_down_are_counted(hosts: Pair, to: int):
    """The kernel would discard them uncounted: flows to the container end, and its vnetd counts their frames."""
    ip, host = ["ip", "-n", hosts.containers[to], "link", "set", "eth0"], hosts.hosts[to == FAR]
    place = 0 if to == FAR else TWO

    def dropped() -> int:
        return sum(port["drops"].get("not_ready", 0) for port in host.ask("stats")["ports"])

    def into(flow: dict) -> bool:
        return flow["dst"] == MACS[to]

    hosts.wait_for_kernel(ONE, to)
    assert any(into(flow) for flow in host.ask("flows"))
    run([*ip, "down"])
    try:
        wait_until("the state", lambda: host.ask("interface", "list")[place]["state"] == "down", 60)
        assert "is down" in host.ask("interface", "list")[place]["reason"]
        wait_until("the flow's end", lambda: not any(into(flow) for flow in host.ask("flows")), 60)
        before = dropped()
        run(hosts.inside(ONE, sys.executable, "-c", SEND % ADDRESSES[to]))
        wait_until("the drops", lambda: dropped() - before >= 100, 60)
        hosts.balance()
    finally:
        run([*ip, "up"])
    hosts.wait_for_kernel(ONE, to)
