"""The kernel's own path: known flows between containers bypass dispatchers; other frames behave as with TAPs."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vnetlab import daemon
from vnetlab.run import run, wait_until

PREFIX = f"kp{os.getpid()}"
HOST, ONE, TWO = (f"{PREFIX}{name}" for name in ("h", "a", "b"))
ADDRESSES = {ONE: "10.77.0.1", TWO: "10.77.0.2"}
MACS = {ONE: "52:54:00:77:00:01", TWO: "52:54:00:77:00:02"}


@dataclass
class Host:
    """A vnetd with two containers of kind veth, in a separate network namespace."""

    directory: Path
    daemon: subprocess.Popen | None = field(default=None)

    def start(self) -> None:
        """Starts vnetd and waits until it is ready."""
        log = self.directory / "log"
        with log.open("wb") as output:
            words = ["ip", "netns", "exec", HOST, str(daemon.binaries() / "vnetd")]
            words += ["--config", str(self.directory / "vnet.toml")]
            self.daemon = subprocess.Popen(words, stdout=output, stderr=output)
        wait_until("vnetd to run", lambda: " ready: " in log.read_text() or self.daemon.poll(), 20, log)
        assert self.daemon.poll() is None, log.read_text()

    def end(self, by: signal.Signals) -> int:
        """Stops vnetd by a signal; returns its exit status."""
        self.daemon.send_signal(by)
        return self.daemon.wait(10)

    def vnet(self, *arguments: str) -> str:
        """The output of a `vnet` command."""
        socket = f"{self.directory}/control.sock"
        return run([str(daemon.binaries() / "vnet"), "--socket", socket, *arguments])

    def ask(self, *arguments: str) -> dict | list:
        """The JSON answer to a `vnet` command."""
        return json.loads(self.vnet("--json", *arguments))

    def frames(self) -> tuple[int, int]:
        """Frames received from the first container, and frames that dispatchers have forwarded."""
        stats = self.ask("stats")
        (one,) = (port for port in stats["ports"] if port["name"] == "one")
        return one["in_frames"], sum(dispatcher["frames"] for dispatcher in stats["dispatchers"])

    def balance(self) -> None:
        """Asserts that in + copies = out + drops, exactly."""
        stats = self.ask("stats")
        total = {key: sum(port[key] for port in stats["ports"]) for key in ("in_frames", "copies", "out_frames")}
        drops = sum(sum(port["drops"].values()) for port in stats["ports"])
        assert total["in_frames"] + total["copies"] == total["out_frames"] + drops


def ping(count: int, *options: str) -> str:
    words = ["ip", "netns", "exec", ONE, "ping", "-n", "-q", "-c", str(count), "-i", "0.01", *options]
    return run([*words, ADDRESSES[TWO]])


def received(text: str) -> int:
    return int(re.search(r"(\d+) received", text)[1])


def devices(namespace: str) -> list[str]:
    return [link["ifname"] for link in json.loads(run(["ip", "-n", namespace, "-json", "link"]))]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("kernel-path")
    parts = [f'[host]\nname = "h1"\n[control]\nsocket = "{directory}/control.sock"\n[bridge]\nlisten = "127.0.0.1:0"\n']
    for name, namespace in (("one", ONE), ("two", TWO)):
        parts.append(
            f'[[interface]]\nname = "{name}"\nkind = "veth"\ndevice = "eth0"\nnetns = "{namespace}"\n'
            f'mac = "{MACS[namespace]}"\n'
        )
    (directory / "vnet.toml").write_text("\n".join(parts))
    host = Host(directory)
    try:
        for namespace in (HOST, ONE, TWO):
            run(["ip", "netns", "add", namespace])
        run(["ip", "-n", HOST, "link", "set", "lo", "up"])
        host.start()
        for namespace in (ONE, TWO):
            run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
        wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)
        yield host
    finally:
        if host.daemon and host.daemon.poll() is None:
            host.end(signal.SIGKILL)
        for namespace in (HOST, ONE, TWO):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def grows(host: Host, by: int, work: Callable[[], object]) -> tuple[int, int]:
    """Increase of the first container's and the dispatchers' frames during `work`; the first is at least `by`."""
    before = host.frames()
    work()
    after = host.frames()
    moved = after[0] - before[0], after[1] - before[1]
    assert moved[0] >= by
    host.balance()
    return moved


def test_known_flows_pass_no_dispatcher(host: Host):
    assert {port["path"] for port in host.ask("interface", "list")} == {"kernel"}
    # Pings for longer than a verdict's lease, so that the verdict has to be renewed.
    moved = grows(host, 300, lambda: ping(300))
    assert moved[1] < 30, "what ARP and IPv6 need, and no more"
    trace = host.ask("trace", MACS[ONE], MACS[TWO])
    assert 0 < trace["kernel_ms"] <= 2000
    assert trace["to"] == ["interface two"]
    # Pings above the MTU: fragments are forwarded like other frames.
    assert received(ping(10, "-s", "8000")) == 10


def test_tcp_passes_no_dispatcher(host: Host):
    server = ["ip", "netns", "exec", TWO, "iperf3", "--server", "--one-off"]
    with subprocess.Popen(server, stdout=subprocess.DEVNULL) as process:
        listening = ["ip", "netns", "exec", TWO, "ss", "-Hltn", "sport = :5201"]
        wait_until("iperf3 to listen", lambda: run(listening) != "", 20)
        client = ["ip", "netns", "exec", ONE, "iperf3", "--client", ADDRESSES[TWO], "--bytes", "100M"]
        moved = grows(host, 100_000_000 // 65536, lambda: run(client))
        assert process.wait(20) == 0
    assert moved[1] < moved[0] / 10


def test_a_captured_ports_frames_come_up(host: Host):
    words = [str(daemon.binaries() / "vnet"), "--socket", f"{host.directory}/control.sock"]
    words += ["capture", "interface one", "--count", "20", "icmp"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as capture:
        end = time.monotonic() + 60
        while capture.poll() is None and time.monotonic() < end:
            ping(20)
        assert capture.wait(1) == 0, capture.stderr.read()
    moved = grows(host, 50, lambda: (ping(20), ping(50)))
    assert moved[1] < 60, "the kernel forwards again"


def test_a_rule_holds_once_it_is_acknowledged(host: Host):
    """Once the command that adds a misdirecting rule has ended, no ping passes, although the flow was in the kernel."""
    assert received(ping(20)) == 20
    host.vnet("route", "add", "--dst", MACS[TWO], "--to", "interface one")
    rule = max(route["index"] for route in host.ask("route", "list"))
    counted = json.loads(run(["ip", "-n", TWO, "-json", "-statistics", "link", "show", "eth0"]))
    try:
        text = subprocess.run(
            ["ip", "netns", "exec", ONE, "ping", "-n", "-c", "5", "-i", "0.01", "-w", "1", ADDRESSES[TWO]],
            check=False,
            capture_output=True,
            text=True,
        ).stdout
        assert received(text) == 0, counted
    finally:
        host.vnet("route", "del", str(rule))
    assert received(ping(5)) == 5
    host.balance()


def test_after_a_crash_the_container_has_its_addresses(host: Host):
    host.end(signal.SIGKILL)
    host.start()
    wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)
    assert {port["path"] for port in host.ask("interface", "list")} == {"kernel"}
    assert grows(host, 100, lambda: ping(100))[1] < 30


def test_off_is_a_tap(host: Host):
    """Must be the last test: it stops vnetd and checks that nothing is left behind."""
    assert len(devices(HOST)) == 5, "the loopback, and two devices for each container"
    assert host.end(signal.SIGTERM) == 0
    assert devices(HOST) == ["lo"]
    assert devices(ONE) == ["lo"]
    config = host.directory / "vnet.toml"
    config.write_text(config.read_text().replace("[control]", '[dispatch]\nkernel_path = "off"\n[control]'))
    host.start()
    for namespace in (ONE, TWO):
        run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
    (one, two) = host.ask("interface", "list")
    assert one["path"] == two["path"] == "vnetd"
    assert one["path_reason"] == "kernel_path is off"
    wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)
    moved = grows(host, 50, lambda: ping(50))
    assert moved[1] >= 100
