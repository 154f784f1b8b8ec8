"""Known flows between a container and the kernel's own VXLAN device on another host pass in the kernel."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import TOO_BIG
from kernel_host import LEASE_MS_MAX, Host, assert_none_lost, devices

from vnetlab.run import run, wait_until

PREFIX = f"kt{os.getpid()}"
HOST, FAR, CONTAINER = (f"{PREFIX}{name}" for name in ("h", "f", "c"))
UNDERLAY = {HOST: "192.0.2.1", FAR: "192.0.2.2"}
OVERLAY = {CONTAINER: "10.78.0.1", FAR: "10.78.0.2"}
MACS = {CONTAINER: "52:54:00:78:00:01", FAR: "52:54:00:78:00:02"}
MTU = 1500
"""Of the underlay and of the container: TCP segments have to be made smaller."""


def configure(host: Host, *, mtu: int = MTU, link: str = "") -> None:
    (host.directory / "vnet.toml").write_text(
        f'[host]\nname = "h1"\n[control]\nsocket = "{host.directory}/control.sock"\n'
        f'[bridge]\nlisten = "{UNDERLAY[HOST]}:9000"\nvxlan_listen = "[::]:4789"\n'
        f'[dispatch]\nbpffs = "{host.directory}/bpf"\n'
        f'[[interface]]\nname = "one"\nkind = "veth"\ndevice = "eth0"\nnetns = "{CONTAINER}"\n'
        f'mac = "{MACS[CONTAINER]}"\nmtu = {mtu}\n'
        f'[[link]]\nname = "far"\nencapsulation = "vxlan"\nremote = "{UNDERLAY[FAR]}:4789"\ntrusted = true\n{link}\n'
    )


def start(host: Host) -> None:
    """Starts vnetd and gives the container its address."""
    host.start()
    run(["ip", "-n", CONTAINER, "address", "replace", f"{OVERLAY[CONTAINER]}/24", "dev", "eth0"])


def restart(host: Host, *, mtu: int = MTU, link: str = "") -> None:
    """Stops vnetd, and starts it with another configuration."""
    assert host.end(signal.SIGTERM) == 0
    configure(host, mtu=mtu, link=link)
    start(host)
    wait_until("the VTEP to answer", lambda: ping(1, "-w", "1") == 1, 60)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    release = os.uname().release
    assert tuple(int(part) for part in release.split(".")[:2]) >= (6, 6), f"needs Linux 6.6, this is {release}"
    host = Host(HOST, tmp_path_factory.mktemp("kernel-vtep"))
    host.mount_bpffs()
    try:
        for namespace in (HOST, FAR, CONTAINER):
            run(["ip", "netns", "add", namespace])
            run(["ip", "-n", namespace, "link", "set", "lo", "up"])
        run(f"ip link add eth0 netns {HOST} mtu {MTU} type veth peer name eth0 netns {FAR} mtu {MTU}".split())
        for namespace, address in UNDERLAY.items():
            run(["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0"])
            run(["ip", "-n", namespace, "link", "set", "eth0", "up"])
        words = f"link add vxlan0 address {MACS[FAR]} type vxlan id 1 remote {UNDERLAY[HOST]} dstport 4789 dev eth0"
        run(["ip", "-n", FAR, *words.split()])
        run(["ip", "-n", FAR, "address", "add", f"{OVERLAY[FAR]}/24", "dev", "vxlan0"])
        run(["ip", "-n", FAR, "link", "set", "vxlan0", "up"])
        configure(host)
        start(host)
        wait_for_kernel(host)
        yield host
    finally:
        if host.daemon and host.daemon.poll() is None:
            host.end(signal.SIGKILL)
        host.unmount_bpffs()
        for namespace in (HOST, FAR, CONTAINER):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def ping(count: int, *options: str) -> int:
    """Answers to pings from the container to the VTEP."""
    words = ["ip", "netns", "exec", CONTAINER, "ping", "-n", "-q", "-c", str(count), "-i", "0.01", *options]
    done = subprocess.run([*words, OVERLAY[FAR]], check=False, capture_output=True, text=True)
    return int(re.search(r"(\d+) received", done.stdout)[1])


def by_vnetd(host: Host) -> int:
    """Frames that vnetd moves for 20 pings that are answered; -1: some are not."""
    before = host.frames()
    answered = ping(20, "-w", "2")
    return host.frames()[1] - before[1] if answered == 20 else -1


def wait_for_kernel(host: Host) -> None:
    """Waits until both directions of a flow pass in the kernel."""
    wait_until("the VTEP to answer", lambda: ping(1, "-w", "1") == 1, 60)
    wait_until("the kernel's path", lambda: 0 <= by_vnetd(host) < 20, 60)


def path(host: Host) -> tuple[str, str | None]:
    """The path of the host's link, and the reason why vnetd forwards all its frames."""
    (link,) = host.ask("link", "list")
    return link["path"], link.get("path_reason")


def link_mtu(host: Host) -> int:
    (link,) = host.ask("link", "list")
    return link["mtu"]


def transfer(*options: str, megabytes: int = 100) -> dict:
    """Sends data by iperf3 from the container to the VTEP's host; returns what iperf3 says at the end."""
    with subprocess.Popen(["ip", "netns", "exec", FAR, "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL) as server:
        listening = ["ip", "netns", "exec", FAR, "ss", "-Hltn", "sport = :5201"]
        wait_until("iperf3 to listen", lambda: run(listening) != "", 60)
        words = ["ip", "netns", "exec", CONTAINER, "iperf3", "--json", "-c", OVERLAY[FAR], "-n", f"{megabytes}M"]
        text = run([*words, *options])
        assert server.wait(60) == 0
    return json.loads(text)["end"]


def counter(namespace: str, name: str) -> int:
    """A counter of a namespace's network stack."""
    words = ["ip", "netns", "exec", namespace, "nstat", "-asz", "--json", name]
    return json.loads(run(words))["kernel"][name]


def offloads(namespace: str, state: str, *features: str) -> None:
    """Switches offloads of a device of the underlay."""
    run(["ip", "netns", "exec", namespace, "ethtool", "-K", "eth0", *(w for name in features for w in (name, state))])


SEGMENTATION = ("tso", "gso", "tx-udp_tnl-segmentation", "tx-udp_tnl-csum-segmentation")


@contextlib.contextmanager
def captured(directory: Path, what: str) -> Iterator[Path]:
    """Captures packets that arrive at the VTEP's host while the context lasts; returns the file that tcpdump writes."""
    file = directory / "capture"
    words = ["ip", "netns", "exec", FAR, "tcpdump", "-n", "-l", "--immediate-mode", "-Q", "in", "-i", "eth0", what]
    with file.open("wb") as output, subprocess.Popen(words, stdout=output, stderr=output) as process:
        try:
            wait_until("tcpdump to listen", lambda: "listening on" in file.read_text(), 60)
            yield file
        finally:
            process.terminate()


def packets(file: Path) -> list[str]:
    """The first lines of packets in tcpdump's output."""
    return [line for line in file.read_text().splitlines() if re.match(r"\d\d:\d\d:", line)]


def test_known_flows_pass_no_dispatcher(host: Host):
    # Longer than a verdict lives, so that it has to be renewed.
    moved = host.grows(300, lambda: ping(300))
    assert moved[1] < 30
    assert path(host) == ("kernel", None)
    assert "tunnel_reason" not in host.ask("link", "list")[0], "packets to a VTEP have a tunnel always"
    assert "link_reason" not in host.ask("status")["kernel"]
    trace = host.ask("trace", MACS[CONTAINER], MACS[FAR])
    assert trace["to"] == ["link far"]
    assert 0 < trace["kernel_ms"] <= LEASE_MS_MAX
    (link,) = host.ask("link", "list")
    assert link["heard_s"] <= 3, "frames that the kernel takes are signs of life"
    assert host.vnet("interface", "list").count("link far") == 0


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_streams_both_ways_without_fragments(host: Host, cut: bool):
    """Super-frames cross the underlay whole, or as segments that fit it."""
    if cut:
        offloads(HOST, "off", *SEGMENTATION)
        offloads(FAR, "off", *SEGMENTATION)
    try:
        assert ping(20) == 20
        fragments = counter(HOST, "IpFragCreates"), counter(FAR, "IpReasmReqds")
        with captured(host.directory, f"ip and greater {MTU + 14 + 1}" if cut else "ip[6:2] & 0x3fff != 0") as wrong:
            sent = host.grows(100_000_000 // 65536, transfer)
            received = host.grows(1, lambda: transfer("--reverse"))
        assert packets(wrong) == []
        assert sent[1] < sent[0] / 5
        assert received[1] < 100_000_000 // 65536 / 5
        assert (counter(HOST, "IpFragCreates"), counter(FAR, "IpReasmReqds")) == fragments
    finally:
        offloads(HOST, "on", *SEGMENTATION)
        offloads(FAR, "on", *SEGMENTATION)


@pytest.mark.parametrize("direction", [[], ["--reverse"]], ids=["out", "in"])
def test_datagrams_pass_no_dispatcher(host: Host, direction: list[str]):
    assert ping(20) == 20
    ends = []
    words = ["--udp", "--length", "1400", "--bitrate", "50M", *direction]
    moved = host.grows(0, lambda: ends.append(transfer(*words, megabytes=2)))
    # Receivers may be slow.
    assert ends[0]["sum"]["lost_percent"] < 50
    assert moved[1] < 2_000_000 // 1400 / 5


def test_what_does_not_fit_is_dropped_and_counted_by_vnetd(host: Host):
    """A VTEP gets no IP fragments (RFC 7348 section 4.3), and frames that fit stay in the kernel."""
    assert ping(20) == 20
    assert ping(20, "-s", str(MTU - 50 - 28), "-M", "do") == 20

    def drops() -> int:
        (link,) = (port for port in host.ask("stats")["ports"] if port["name"] == "far")
        return link["drops"].get("mtu_exceeded", 0)

    before = drops()
    with captured(host.directory, "ip[6:2] & 0x3fff != 0") as fragments:
        assert ping(5, "-s", str(MTU - 28), "-w", "1") == 0
        host.grows(5, lambda: ping(5, "-s", str(MTU - 50 - 28)))
    assert packets(fragments) == []
    assert drops() - before >= 5


def test_coalesced_datagrams_are_whole(host: Host):
    """With receive offload (GRO), the kernel coalesces datagrams for vnetd's socket before programs see them."""
    offloads(FAR, "off", *SEGMENTATION)
    offloads(HOST, "on", "gro")
    try:
        assert ping(20) == 20
        end = transfer("--reverse")
        assert end["sum_received"]["bytes"] >= 100_000_000
        # A packet that is taken with parts missing costs a retransmission each.
        assert end["sum_sent"]["retransmits"] < 1000
        host.balance()
    finally:
        offloads(HOST, "off", "gro")
        offloads(FAR, "on", *SEGMENTATION)
    time.sleep(1)
    wait_for_kernel(host)


def test_established_flows_outlive_vnetd(host: Host):
    assert ping(20) == 20
    words = ["ip", "netns", "exec", CONTAINER, "ping", "-n", "-q", "-i", "0.005", "-W", "5", OVERLAY[FAR]]
    pings = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        for seconds in (0, 1):
            host.end(signal.SIGKILL)
            time.sleep(seconds)
            host.start()
            wait_for_kernel(host)
    finally:
        pings.send_signal(signal.SIGINT)
        text = pings.communicate(timeout=60)[0]
    assert_none_lost(text)
    host.balance()


def test_a_smaller_path_mtu_leaves_large_segments_to_vnetd(host: Host):
    """ICMP errors about datagrams that programs have made reach the link: sockets own their source ports."""
    with captured(host.directory, "udp dst port 4789") as file:
        assert ping(20) == 20
        wait_until("a datagram", lambda: packets(file), 60)
        source = re.search(rf"{UNDERLAY[HOST]}\.(\d+) > ", file.read_text())[1]
    words = ["ip", "netns", "exec", FAR, sys.executable, "-c", TOO_BIG, UNDERLAY[FAR], UNDERLAY[HOST], source]
    try:
        run(words)
        wait_until("the link's MTU to be the path's", lambda: link_mtu(host) == 1300, 60)
        # A verdict may also end because a busy machine renews it late.
        wait_until("all pings to pass vnetd", lambda: min(by_vnetd(host) for _ in range(3)) >= 20, 60)
        assert ping(5, "-s", str(1300 - 50 - 28), "-M", "do") == 5
        offloads(HOST, "off", *SEGMENTATION)
        with captured(host.directory, f"udp and greater {1300 + 14 + 1}") as too_large:
            transfer(megabytes=10)
        assert packets(too_large) == []
        host.balance()
    finally:
        offloads(HOST, "on", *SEGMENTATION)
        run(["ip", "-n", HOST, "route", "flush", "cache"])
    wait_until("the link's MTU to be the device's", lambda: link_mtu(host) == MTU, 60)
    wait_for_kernel(host)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"link": "offload = false"}, "its offload is off"),
        ({"link": 'networks = [1]\nflood = ["192.0.2.3"]'}, "it has several VTEPs"),
        ({"mtu": 9000}, None),
    ],
    ids=["offload", "flood", "mtu"],
)
def test_where_the_kernel_cannot_vnetd_forwards(host: Host, change: dict, why: str | None):
    """Links that programs cannot serve, and containers whose segments they cannot make small enough."""
    restart(host, **change)
    try:
        if why:
            assert path(host) == ("vnetd", why)
        else:
            wait_until("the link's path", lambda: path(host) == ("kernel", None), 60)
        host.grows(20, lambda: ping(20))
        assert by_vnetd(host) >= 20
        transfer(megabytes=10)
        host.balance()
    finally:
        restart(host)
    wait_for_kernel(host)


def test_a_vnetd_that_stops_leaves_nothing(host: Host):
    assert list((host.directory / "bpf" / "vnet").glob("*/underlay-*"))
    assert host.end(signal.SIGTERM) == 0
    assert devices(HOST) == ["lo", "eth0"]
    assert list((host.directory / "bpf" / "vnet").glob("*")) == []
    start(host)
    wait_for_kernel(host)
