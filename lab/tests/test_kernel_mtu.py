"""Containers' MTUs over other MTUs of the underlay, on the kernel's own path between hosts.

Each by both ways: by the wire's device, and by the datagrams that programs make where the kernel has them.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import PROGRAMS
from kernel_pair import ADDRESSES, ADDRESSES_6, FAR, MAKES_DATAGRAMS, ONE, WIRE_PORT, Pair, pair
from packet_count import Packets

from vnetlab.run import run

TO = {"IPv4": ADDRESSES[FAR], "IPv6": ADDRESSES_6[FAR]}
PROGRAM = str(PROGRAMS / "checked_content.py")
BYTES = 40_000_000
SUPER_FRAMES = BYTES // 65536
FRAGMENTS_MAX = BYTES // 1400 // 100
"""One for a hundred segments of an underlay of 1500; each segment would be two without fitting."""
OVERHEAD = 50
"""Of VXLAN: Ethernet, IPv4 and UDP headers, and its own."""
SEGMENTATION = ("tso", "gso", "tx-udp_tnl-segmentation", "tx-udp_tnl-csum-segmentation")
MTUS = [(1500, 1500), (9000, 1500), (1500, 9000)]
"""Of containers and underlay."""


@pytest.fixture(
    scope="module",
    params=[(*mtus, by_device) for mtus in MTUS for by_device in (False, True)],
    ids=lambda params: f"{params[0]}-over-{params[1]}-{'device' if params[2] else 'own'}",
)
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    mtu, underlay_mtu, by_device = request.param
    directory = tmp_path_factory.mktemp("kernel-mtu")
    with (
        pair(f"km{os.getpid()}", directory, mtu=mtu, underlay_mtu=underlay_mtu, by_device=by_device) as made,
        taking(made),
    ):
        yield made


@contextlib.contextmanager
def taking(hosts: Pair) -> Iterator[None]:
    """The far container answers at all its addresses."""
    with contextlib.ExitStack() as running:
        for address in TO.values():
            words = hosts.inside(FAR, sys.executable, PROGRAM, "take", address)
            process = running.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            running.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
        yield


def send(hosts: Pair, what: str, address: str, *numbers: int) -> None:
    """Sends a stream or datagrams from the first host's container; fails if anything arrives damaged or not at all."""
    words = hosts.inside(ONE, sys.executable, PROGRAM, what, address, *map(str, numbers))
    run(words, timeout_s=300)


@contextlib.contextmanager
def segments_cut(hosts: Pair) -> Iterator[None]:
    """Super-frames leave both hosts as segments: a virtual underlay would pass them whole, of whatever size."""

    def switch(state: str) -> None:
        for host in hosts.hosts:
            words = ["ip", "netns", "exec", host.namespace, "ethtool", "-K", "eth0"]
            run([*words, *(word for name in SEGMENTATION for word in (name, state))])

    switch("off")
    try:
        yield
    finally:
        switch("on")


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("to", TO)
def test_streams_fit_the_path(hosts: Pair, to: str, cut: bool):
    """TCP segments are made to fit: no fragments, and nothing that exceeds the underlay's MTU."""
    hosts.wait_for_kernel(ONE, ADDRESSES[FAR])
    sender, receiver = hosts.hosts
    made = hosts.counter(sender.namespace, "IpFragCreates")
    by_device = hosts.carried(0)
    too_long = f"udp dst port {WIRE_PORT} and greater {hosts.options.underlay_mtu + 14 + 1}"
    with (
        segments_cut(hosts) if cut else contextlib.nullcontext(),
        Packets(receiver.namespace, "eth0", too_long) as wrong,
    ):
        moved = sender.grows(SUPER_FRAMES, lambda: send(hosts, "stream", TO[to], BYTES))
        assert wrong.new() == 0 or not cut
    assert moved[1] < moved[0] / 4, "the kernel forwards"
    by_device = hosts.carried(0) - by_device
    is_own = MAKES_DATAGRAMS and not hosts.options.by_device
    # The headers of own datagrams make segments smaller by their own length, and by no more.
    if not is_own or hosts.options.mtu > hosts.options.underlay_mtu:
        assert by_device >= moved[0] / 2
    elif to == "IPv4":
        # Acknowledgements of IPv6 are the device's to receive.
        assert by_device < moved[0] / 4
    # A frame of a single full segment, such as a stream's last one, cannot be made smaller.
    assert hosts.counter(sender.namespace, "IpFragCreates") - made < FRAGMENTS_MAX
    hosts.balance()


@pytest.mark.parametrize("to", TO)
def test_datagrams_of_any_size_arrive(hosts: Pair, to: str):
    """Around every limit: the path's, the container's, and the largest of IP."""
    headers = 48 if to.startswith("IPv6") else 28
    limits = {hosts.options.mtu, hosts.options.underlay_mtu - OVERHEAD, hosts.options.underlay_mtu}
    largest = 65535 - (8 if to.startswith("IPv6") else 28)
    sizes = {1, 1000, 20_000, largest} | {limit - headers + more for limit in limits for more in (-4, 0, 1)}
    hosts.wait_for_kernel(ONE, ADDRESSES[FAR])
    moved = hosts.hosts[0].grows(5 * len(sizes), lambda: send(hosts, "datagrams", TO[to], 5, *sorted(sizes)))
    assert moved[1] < moved[0] / 2
    hosts.balance()
