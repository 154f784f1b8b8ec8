"""The kernel's own path while paths and rules change under traffic, on one host and between two."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import PROGRAMS
from kernel_pair import ADDRESSES, FAR, MACS, ONE, TRANSLATED_PORT, TWO, WIRE_PORT, Pair, pair
from packet_count import Packets
from rule_changes import PORT, change_rules, datagrams, refused_datagrams

from vnetlab import daemon
from vnetlab.run import wait_until

CAPTURES = int(os.environ.get("VNET_TEST_CAPTURES", "5"))
FLOWS = 4
ORDER = str(PROGRAMS / "udp_flow_order.py")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(f"kc{os.getpid()}", tmp_path_factory.mktemp("kernel-changes")) as made:
        made.wait_for_kernel(TWO, FAR)
        yield made


def capture(hosts: Pair, *words: str) -> list[str]:
    """A command that captures at the first host."""
    return [str(daemon.binaries() / "vnet"), "--socket", f"{hosts.hosts[0].directory}/control.sock", "capture", *words]


def end(process: subprocess.Popen) -> None:
    """Ends a capture."""
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(60) == 0


@pytest.mark.parametrize("to", [TWO, FAR], ids=["one-host", "wire"])
def test_a_change_of_the_path_keeps_the_order(hosts: Pair, to: int):
    """A capture takes the frames of a port to vnetd and back, VNET_TEST_CAPTURES times: none is lost, none comes twice.

    Each change may swap what is under way by one path with what takes the other: once in each flow.
    """
    words = [sys.executable, ORDER]
    by_kernel = lambda: hosts.flow(0, MACS[ONE], MACS[to]).get("frames", 0)  # noqa: E731
    with (
        subprocess.Popen(hosts.inside(to, *words, "take", str(FLOWS)), stdout=subprocess.PIPE, text=True) as taker,
        subprocess.Popen(
            hosts.inside(ONE, *words, "send", str(FLOWS), ADDRESSES[to], "on"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as sender,
    ):
        try:
            for _ in range(CAPTURES):
                before = by_kernel()
                wait_until("the kernel to forward", lambda before=before: by_kernel() > before + 100 * FLOWS, 60)
                words = capture(hosts, "interface one", f"udp dst port 7007 and dst host {ADDRESSES[to]}")
                with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
                    assert " in " in process.stdout.readline(), "a frame has come up"
                    end(process)
            wait_until("the kernel to forward", lambda: by_kernel() > 100 * FLOWS, 60)
            (sent, _), (taken, _) = sender.communicate(timeout=60), taker.communicate(timeout=60)
        finally:
            sender.kill()
            taker.kill()
    taken, late, swaps = map(int, taken.split())
    print(f"{CAPTURES} captures: {sent.strip()} sent, {taken} taken, {late} late, at most {swaps} swaps in a flow")
    assert taken == int(sent)
    assert swaps <= 2 * CAPTURES
    hosts.balance()


def test_a_capture_slows_nobody_else(hosts: Pair):
    """While a port is captured, all its frames pass vnetd; the flows of another one stay in the kernel."""
    host = hosts.hosts[0]

    def moved() -> tuple[int, int]:
        """Frames of the captured port, and frames that dispatchers have forwarded."""
        stats = host.ask("stats")
        (one,) = (port for port in stats["ports"] if port["kind"] == "interface" and port["name"] == "one")
        return one["in_frames"] + one["out_frames"], sum(dispatcher["frames"] for dispatcher in stats["dispatchers"])

    words = capture(hosts, "interface one", "icmp")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:

            def is_captured() -> bool:
                """Whether the capture has begun, and shows a ping."""
                return hosts.ping(ONE, FAR, 1) == 1 and bool(select.select([process.stdout], [], [], 0.5)[0])

            wait_until("the capture to show a ping", is_captured, 60)
            assert "ICMP" in process.stdout.readline()
            # The capture's start has ended all flows.
            hosts.wait_for_kernel(TWO, FAR)
            before = moved()
            assert hosts.ping(ONE, FAR, 100) == 100
            assert hosts.ping(TWO, FAR, 300) == 300
            captured, forwarded = (now - then for now, then in zip(moved(), before, strict=True))
            assert captured >= 200
            assert forwarded >= 200, "vnetd forwards every frame of the captured port"
            assert forwarded - captured < 30, "and next to none of the other's 600"
        finally:
            end(process)
    hosts.wait_for_kernel(ONE, FAR)
    hosts.balance()


def test_no_frame_by_an_old_rule_of_the_receivers_host(hosts: Pair):
    """The far host's rules change under traffic by the wire, VNET_TEST_CHANGES times."""
    with refused_datagrams(hosts.containers[ONE], hosts.containers[FAR], ADDRESSES[FAR]) as frames:
        # Frames from the link that a rule sends back to it are dropped.
        change_rules(hosts.hosts[1], {"dst": MACS[FAR], "to": "link peer"}, frames)
    hosts.balance()


def test_no_frame_by_an_old_rule_of_the_senders_host(hosts: Pair):
    """The first host's rules change: none of the container's frames leaves the host afterwards."""
    total = 0
    address = "".join(MACS[FAR].split(":"))
    # The frame's own destination, its protocol, and its destination port, behind the wire's headers.
    flow = f"udp dst port {WIRE_PORT} and udp[16:4] = 0x{address[:8]} and udp[20:2] = 0x{address[8:]}"
    flow += f" and udp[28:2] = 0x0800 and udp[39] = 17 and udp[52:2] = {PORT}"
    # Without a tunnel: its length, and its only byte.
    flow = f"({flow}) or (udp dst port {TRANSLATED_PORT} and udp[4:2] = 9 and udp[8] = 0x78)"
    with (
        Packets(hosts.hosts[0].namespace, "eth0", flow) as packets,
        datagrams(hosts.containers[ONE], hosts.containers[FAR], ADDRESSES[FAR]),
    ):

        def left() -> int:
            nonlocal total
            total += packets.new()
            return total

        change_rules(hosts.hosts[0], {"dst": MACS[FAR], "to": "interface one"}, left)
    hosts.balance()
