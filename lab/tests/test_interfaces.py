"""Interfaces whose namespace, device, process or directory is missing, disappears or reappears."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from standalone import Remote, vnetd

from vnetlab import daemon, underlay
from vnetlab.run import run, wait_until

PREFIX = f"test-if-{os.getpid() % 100_000}"
BOX, MATE = f"{PREFIX}-box", f"{PREFIX}-mate"
LAN = f"vl{os.getpid() % 100_000}"
BACK_S = 60
"""Timeout for events that take tens of milliseconds on an idle machine."""
AGAIN_S = 1
"""Bar from a namespace's return until its interface is up; the best of several rounds counts."""
START_S = 2
"""Bar from the start of a host with a thousand interfaces until it delivers frames; the best round counts."""
MANY, TAPS, MISSING = 1000, 60, 100
"""Number of interfaces, of TAPs that exist and of TAPs that do not. The others are vhost-user, which close faster."""
SEND_FROM_EACH = """
import socket, sys
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as out:
    for pair in sys.stdin.read().split():
        device, source, destination = pair.split(",")
        out.sendto(bytes.fromhex(destination + source + "88b5") + bytes(50), (device, 0))
"""


def tap(name: str, netns: str, more: str = "") -> str:
    """The configuration of a TAP `eth0` in a namespace."""
    return f'[[interface]]\nname = "{name}"\nkind = "tap"\ndevice = "eth0"\nnetns = "{netns}"\n{more}'


def interfaces(remote: Remote) -> dict[str, dict]:
    """All interfaces by name."""
    return {interface["name"]: interface for interface in remote.get("/v1/interfaces")}


def wait_for(remote: Remote, name: str, state: str, reason: str = "") -> None:
    """Waits until an interface has this state, with a reason that contains `reason`."""

    def reached() -> bool:
        shown = interfaces(remote).get(name, {})
        return shown.get("state") == state and reason in shown.get("reason", "")

    wait_until(f"interface {name} to be {state} ({reason})", reached, BACK_S, remote.directory / "log", 0.01)


def device_mac(netns: str) -> str:
    """The MAC address of a namespace's eth0."""
    return json.loads(run(["ip", "-n", netns, "-j", "link", "show", "eth0"]))[0]["address"]


def address(netns: str, number: int) -> None:
    """Gives a namespace's eth0 an address."""
    run(["ip", "-n", netns, "address", "add", f"10.99.0.{number}/24", "dev", "eth0"])


def pings(netns: str, number: int) -> bool:
    """Whether one namespace reaches the address of another one."""
    words = ["ip", "netns", "exec", netns, "ping", "-n", "-c", "1", "-W", "1", f"10.99.0.{number}"]
    return subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode == 0


def remove(*names: str) -> None:
    """Removes those of the namespaces that exist."""
    for name in names:
        if name in underlay.namespaces():
            run(["ip", "netns", "delete", name])


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Removes everything that a test leaves behind."""
    yield
    remove(BOX, MATE)
    subprocess.run(["ip", "link", "delete", LAN], check=False, capture_output=True)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Remote]:
    """Two containers of one host that can ping each other."""
    underlay.add_namespace(BOX)
    underlay.add_namespace(MATE)
    with vnetd(tmp_path, more=tap("box", BOX) + tap("mate", MATE)) as remote:
        address(BOX, 1)
        address(MATE, 2)
        wait_until("the first ping", lambda: pings(MATE, 1), BACK_S)
        yield remote


def test_a_host_starts_without_what_is_missing_and_has_it_when_it_comes(tmp_path: Path):
    underlay.add_namespace(MATE)
    folder = tmp_path / "sockets"
    lan = f'[[interface]]\nname = "lan"\nkind = "local"\ndevice = "{LAN}"\n'
    vm = f'[[interface]]\nname = "vm"\nkind = "vhost-user"\nsocket = "{folder}/vm"\n'
    text = tap("box", BOX) + tap("mate", MATE) + lan + vm
    with vnetd(tmp_path, more=text) as remote:
        shown = interfaces(remote)
        assert {name: interface["state"] for name, interface in shown.items()} == {
            "box": "down",
            "mate": "up",
            "lan": "down",
            "vm": "down",
        }
        waits = {"box": f"waiting for netns {BOX}", "lan": f"waiting for device '{LAN}'", "vm": f"mkdir -p {folder}"}
        listed, doctor = remote.vnet("interface", "list").stdout, remote.vnet("doctor").stdout
        metrics = remote.request("GET", "/metrics")[1].decode()
        for name, reason in waits.items():
            assert reason in shown[name]["reason"]
            assert reason in listed
            assert f"interface {name} is down: " in remote.log
            assert f'vnet_interface_up{{interface="{name}"}} 0' in metrics
        assert f"interface box is down: {waits['box']}" in doctor
        # A reload applies the rest of the file, too; an interface that can never be opened still refuses the change.
        file = tmp_path / "vnet.toml"
        good = file.read_text() + tap("late", f"{MATE}-late") + tap("two", MATE).replace("eth0", "eth1")
        file.write_text(good)
        os.kill(remote.pid, signal.SIGHUP)
        wait_for(remote, "two", "up")
        wait_for(remote, "late", "down", f"waiting for netns {MATE}-late")
        bad = tap("bad", MATE).replace("eth0", "lo") + tap("three", MATE).replace("eth0", "eth2")
        file.write_text(good + bad)
        refused = remote.vnet("apply", str(file))
        assert refused.returncode == 1
        assert "interface bad cannot be opened" in refused.stderr
        assert "three" not in interfaces(remote)
        # A command that adds a single interface fails if the interface cannot be opened.
        alone = remote.vnet("interface", "add", "x", "--kind", "tap", "--device", "e", "--netns", f"{BOX}-no")
        assert alone.returncode == 1
        assert f"cannot enter network namespace '{BOX}-no'" in alone.stderr
        file.write_text(good + tap("later", f"{MATE}-later"))
        applied = remote.vnet("apply", str(file))
        assert applied.returncode == 0
        assert f"interface later is down: waiting for netns {MATE}-later" in applied.stdout + applied.stderr

        underlay.add_namespace(BOX)
        run(f"ip link add {LAN} type veth peer name {LAN}p".split())
        run(["ip", "link", "set", f"{LAN}p", "up"])
        run(["ip", "link", "set", LAN, "up"])
        folder.mkdir()
        for name in ("box", "lan"):
            wait_for(remote, name, "up")
            wait_until("the log", lambda name=name: f"interface {name} is up" in remote.log, BACK_S)
        wait_until("the guest's socket", (folder / "vm").is_socket, BACK_S)
        # The LAN's device may disappear and reappear as well.
        run(["ip", "link", "delete", LAN])
        wait_for(remote, "lan", "down", f"waiting for device '{LAN}'")
        run(f"ip link add {LAN} up type veth peer name {LAN}p".split())
        run(["ip", "link", "set", f"{LAN}p", "up"])
        wait_for(remote, "lan", "up")


def test_a_namespace_deleted_and_made_again_has_its_device_again(pair: Remote):
    before = device_mac(BOX)
    files = pair.descriptors()
    times = []
    for _ in range(3):
        run(["ip", "netns", "delete", BOX])
        wait_for(pair, "box", "down", f"waiting for netns {BOX}")
        assert pair.vnet("apply", str(pair.directory / "vnet.toml")).returncode == 0
        assert interfaces(pair)["box"]["state"] == "down"
        underlay.add_namespace(BOX)
        began = time.monotonic()
        wait_for(pair, "box", "up")
        times.append(time.monotonic() - began)
        assert device_mac(BOX) == before
        address(BOX, 1)
        wait_until("pings to the new namespace", lambda: pings(MATE, 1), BACK_S)
    assert min(times) <= AGAIN_S, times
    assert pair.log.count("interface box is down: waiting for netns") == 3
    wait_until("the log", lambda: pair.log.count("interface box is up") == 3, BACK_S)
    wait_until("the old namespaces to be closed", lambda: pair.descriptors() == files, BACK_S)
    # Faster than any interval of checks.
    run(["ip", "netns", "delete", BOX])
    run(["ip", "netns", "add", BOX])
    wait_until("the device in the new namespace", lambda: has_device(BOX), BACK_S)
    wait_for(pair, "box", "up")


def has_device(netns: str) -> bool:
    """Whether a namespace has an eth0."""
    words = ["ip", "-n", netns, "link", "show", "eth0"]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def test_a_deleted_device_is_made_again(pair: Remote):
    before = device_mac(BOX)
    run(["ip", "-n", BOX, "link", "delete", "eth0"])
    wait_until("the device", lambda: has_device(BOX), BACK_S, poll_s=0.01)
    wait_for(pair, "box", "up")
    assert device_mac(BOX) == before
    address(BOX, 1)
    wait_until("pings to the new device", lambda: pings(MATE, 1), BACK_S)
    assert "interface box is down: device 'eth0' was removed" in pair.log


def test_state_and_mtu_of_a_device_are_shown(pair: Remote):
    run(["ip", "-n", BOX, "link", "set", "eth0", "down"])
    wait_for(pair, "box", "down", f"device 'eth0' is down; 'ip -n {BOX} link set eth0 up'")
    run(["ip", "-n", BOX, "link", "set", "eth0", "up", "mtu", "600"])
    wait_for(pair, "box", "up")
    wait_until("the new MTU", lambda: interfaces(pair)["box"]["mtu"] == 600, BACK_S)
    assert interfaces(pair)["box"]["notes"] == ["device 'eth0' has MTU 600 instead of mtu = 1500"]
    wait_until("pings", lambda: pings(MATE, 1), BACK_S)
    # A device that was renamed or moved still belongs to the interface.
    run(["ip", "-n", BOX, "link", "set", "eth0", "down"])
    run(["ip", "-n", BOX, "link", "set", "eth0", "name", "lan0"])
    run(["ip", "-n", BOX, "link", "set", "lan0", "up"])
    wait_for(pair, "box", "up")
    assert not has_device(BOX)


@contextmanager
def process_with_netns() -> Iterator[subprocess.Popen]:
    """A process in a network namespace of its own, which ends with the context."""
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_end_of_a_process_is_told(tmp_path: Path):
    with process_with_netns() as process:
        own = Path("/proc/self/ns/net").stat().st_ino
        wait_until("the namespace", lambda: Path(f"/proc/{process.pid}/ns/net").stat().st_ino != own, BACK_S)
        text = tap("box", f"pid:{process.pid}", "mtu = 65535\n")
        with vnetd(tmp_path, more=text) as remote:
            wait_for(remote, "box", "up")
            capped = "mtu 65535 is more than a TAP takes; it will be 65521"
            assert capped in remote.log
            assert interfaces(remote)["box"]["notes"] == ["mtu is 65521, the most that a TAP takes"]
            # While the process is the same one, its device is made again.
            inside = ["nsenter", f"--net=/proc/{process.pid}/ns/net", "ip", "link"]
            run([*inside, "delete", "eth0"])
            wait_until("the device", lambda: "eth0" in run(inside), BACK_S)
            wait_for(remote, "box", "up")
            process.kill()
            process.wait()
            wait_for(remote, "box", "down", f"process {process.pid} of netns pid:{process.pid} has exited")
            alone = remote.vnet("interface", "add", "x", "--kind", "tap", "--device", "e", "--netns", "pid:4194305")
            assert "process 4194305 has exited" in alone.stderr
    with vnetd(tmp_path, more=text) as remote:
        wait_for(remote, "box", "down", "has exited")


def test_a_tap_of_the_administrator_survives_a_restart_of_vnetd(tmp_path: Path):
    underlay.add_namespace(BOX)
    run(["ip", "-n", BOX, "tuntap", "add", "eth0", "mode", "tap", "vnet_hdr"])
    run(["ip", "-n", BOX, "link", "set", "eth0", "up"])
    address(BOX, 1)
    before = device_mac(BOX)
    for _ in range(2):
        with vnetd(tmp_path, more=tap("box", BOX)) as remote:
            wait_for(remote, "box", "up")
        assert device_mac(BOX) == before
        assert "10.99.0.1/24" in run(["ip", "-n", BOX, "address", "show", "eth0"])


def test_an_unreadable_configuration_is_called_so(tmp_path: Path):
    file = tmp_path / "vnet.toml"
    file.write_text('[host]\nname = "h1"\n')
    file.chmod(0o600)
    tmp_path.chmod(0o755)
    as_nobody: dict[str, Callable | int] = {"user": 65534, "group": 65534, "extra_groups": []}
    words = [str(daemon.binaries() / "vnetd"), "--check", "--config", str(file)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, **as_nobody)
    assert done.returncode == 1
    assert "not readable by this user" in done.stderr


def test_a_thousand_interfaces_of_which_a_hundred_cannot_open(tmp_path: Path):
    """The others are up, and each missing one is opened once that is possible. Each pair of TAPs is a network."""
    underlay.add_namespace(BOX)
    # Disable router solicitations: each would be an additional frame.
    run(["ip", "netns", "exec", BOX, "sysctl", "-q", "-w", "net.ipv6.conf.default.disable_ipv6=1"])
    text = "".join(f"[[network]]\nid = {2 + number // 2}\n" for number in range(0, TAPS + MISSING, 2))
    for number in range(TAPS + MISSING):
        more = f'network = {2 + number // 2}\nmac = "{mac(number, ":")}"\n'
        text += tap(f"i{number}", BOX if number < TAPS else MATE, more).replace("eth0", f"v{number}")
    for number in range(TAPS + MISSING, MANY):
        text += f'[[interface]]\nname = "i{number}"\nkind = "vhost-user"\nsocket = "{tmp_path}/{number}"\n'
    times = []
    while min(times, default=BACK_S) > START_S and len(times) < 3:
        began = time.monotonic()
        with vnetd(tmp_path, more=text) as remote:
            send(BOX, range(TAPS))
            wait_until("a frame from each", lambda remote=remote: arrived(remote) >= TAPS, BACK_S, poll_s=0.02)
            times.append(time.monotonic() - began)
    assert min(times) <= START_S, times
    with vnetd(tmp_path, more=text) as remote:
        shown = interfaces(remote)
        assert len(shown) == MANY
        reasons = [interface.get("reason", "up") for interface in shown.values()]
        assert reasons.count(f"waiting for netns {MATE}") == MISSING
        assert reasons.count("up") == remote.get("/v1/status")["interfaces_up"] == TAPS
        # And two of control: the API's, and the one of take-overs.
        assert sum(path.is_socket() for path in tmp_path.iterdir()) == MANY - TAPS - MISSING + 2
        underlay.add_namespace(MATE)
        all_up = TAPS + MISSING
        wait_until("all to be up", lambda: remote.get("/v1/status")["interfaces_up"] == all_up, BACK_S)
        send(MATE, range(TAPS, all_up))
        wait_until("frames from the rest", lambda: arrived(remote) >= MISSING, BACK_S)


def mac(number: int, separator: str = "") -> str:
    """A MAC address derived from a number."""
    return separator.join(f"{byte:02x}" for byte in (2, 0, 0, 0, *number.to_bytes(2)))


def send(netns: str, numbers: range) -> None:
    """Sends one frame from each device to the other device of its pair."""
    pairs = " ".join(f"v{number},{mac(number)},{mac(number ^ 1)}" for number in numbers)
    words = ["ip", "netns", "exec", netns, "python3", "-c", SEND_FROM_EACH]
    subprocess.run(words, check=True, input=pairs, text=True, timeout=BACK_S)


def arrived(remote: Remote) -> int:
    """Number of frames delivered to interfaces."""
    ports = remote.get("/v1/stats")["ports"]
    return sum(port["out_frames"] for port in ports if port["kind"] == "interface")
