"""TAP devices outlive vnetd, with addresses, routes and permanent neighbours.

The next vnetd adopts them; only a change of the configuration removes them.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from standalone import Remote, vnetd

from vnetlab import daemon, underlay
from vnetlab.run import run, wait_until

PREFIX = f"test-kept-{os.getpid() % 100_000}"
BOX, MATE, ELSEWHERE = f"{PREFIX}-box", f"{PREFIX}-mate", f"{PREFIX}-else"
NAMESPACES = (BOX, MATE, ELSEWHERE)
BACK_S = 60
"""Timeout for events that take tens of milliseconds on an idle machine."""
MAC = "52:54:00:99:00:01"


def tap(name: str, netns: str, more: str = "") -> str:
    """The configuration of a TAP `eth0` in a namespace."""
    return f'[[interface]]\nname = "{name}"\nkind = "tap"\ndevice = "eth0"\nnetns = "{netns}"\n{more}'


def ip(netns: str, *words: str) -> str:
    """Runs `ip` in a namespace."""
    return run(["ip", "-n", netns, *words])


def link(netns: str, device: str = "eth0") -> dict | None:
    """A device as `ip` shows it, if it exists."""
    done = subprocess.run(
        ["ip", "-n", netns, "-details", "-json", "link", "show", device], check=False, capture_output=True, text=True
    )
    return json.loads(done.stdout)[0] if done.returncode == 0 else None


def index(netns: str, device: str = "eth0") -> int:
    """The index of a device: another device of the same name has another one."""
    shown = link(netns, device)
    assert shown
    return shown["ifindex"]


def has_carrier(netns: str) -> bool:
    """Whether a process holds a namespace's eth0."""
    shown = link(netns)
    return shown is not None and "LOWER_UP" in shown["flags"]


def pings(netns: str, number: int) -> bool:
    """Whether one namespace reaches the address of another one."""
    words = ["ip", "netns", "exec", netns, "ping", "-n", "-c", "1", "-W", "1", f"10.99.0.{number}"]
    return subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode == 0


HOLD = """
import fcntl, struct, sys
with open("/dev/net/tun", "r+b", buffering=0) as tun:
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"eth0", 0x5002))
    fcntl.ioctl(tun, 0x400454CB, 1)
    print("holds", flush=True)
    sys.stdin.read()
"""
"""Makes eth0 a persistent TAP if it does not exist, and holds it."""


@contextmanager
def holding(netns: str) -> Iterator[None]:
    """Another program holds a namespace's eth0."""
    words = ["ip", "netns", "exec", netns, sys.executable, "-c", HOLD]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "holds\n"
            yield
        finally:
            process.kill()


def end(remote: "Started", number: signal.Signals) -> None:
    """Ends a vnetd by a signal; its directory stays for the next one."""
    os.kill(remote.pid, number)
    wait_until("vnetd to end", lambda: remote.process.poll() is not None, BACK_S)


class Started(Remote):
    """A vnetd that may be killed."""

    process: subprocess.Popen[str]


@contextmanager
def started(directory: Path, more: str, prefix: tuple[str, ...] = ()) -> Iterator[Started]:
    """Runs a vnetd, and kills it at the end if it still runs."""
    file = directory / "vnet.toml"
    file.write_text(
        f'[host]\nname = "h1"\n[control]\nsocket = "{directory}/control.sock"\nhttp = "127.0.0.1:0"\n'
        f'[bridge]\nlisten = "127.0.0.1:0"\n{more}'
    )
    words = [*prefix, str(daemon.binaries() / "vnetd"), "--config", str(file)]
    with (
        (directory / "log").open("ab") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout
            ready = process.stdout.readline()
            port = re.search(r"HTTP at 127\.0\.0\.1:(\d+)", ready) or re.search(r"http://127\.0\.0\.1:(\d+)", ready)
            remote = Started(directory, int(port[1]) if port else 0, 0, process.pid)
            remote.process = process
            yield remote
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(autouse=True)
def namespaces() -> Iterator[None]:
    """The containers' namespaces, which are removed with everything in them."""
    for name in NAMESPACES:
        underlay.add_namespace(name)
    yield
    for name in NAMESPACES:
        if name in underlay.namespaces():
            run(["ip", "netns", "delete", name])


def settle(netns: str, number: int) -> None:
    """Gives a namespace's eth0 an address, a route and a neighbour."""
    ip(netns, "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
    ip(netns, "route", "add", "10.98.0.0/16", "via", "10.99.0.77")
    ip(netns, "neighbour", "add", "10.99.0.77", "lladdr", "52:54:00:99:00:77", "nud", "permanent", "dev", "eth0")


def settled(netns: str) -> list[str]:
    """What `settle` has set, without the flags that follow from the carrier."""
    address = json.loads(ip(netns, "-json", "-4", "address", "show", "eth0"))[0]["addr_info"]
    routes = json.loads(ip(netns, "-json", "route", "show"))
    neighbour = json.loads(ip(netns, "-json", "neighbour", "show", "nud", "permanent"))
    kept = [{key: value for key, value in route.items() if key != "flags"} for route in routes]
    return [json.dumps(each) for each in (address, kept, neighbour)]


@pytest.mark.parametrize("queues", [1, 4])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_device_waits_for_the_next_vnetd(tmp_path: Path, number: signal.Signals, queues: int):
    more = f"queues = {queues}\n"
    text = tap("box", BOX, more) + tap("mate", MATE, more + f'mac = "{MAC}"\nmtu = 1400\n')
    with started(tmp_path, text) as remote:
        settle(BOX, 1)
        settle(MATE, 2)
        wait_until("the first ping", lambda: pings(MATE, 1), BACK_S)
        before = [(link(netns) or {})["address"] for netns in (BOX, MATE)]
        state, indices = [settled(BOX), settled(MATE)], [index(BOX), index(MATE)]
        end(remote, number)
    for _ in range(2):
        assert [settled(BOX), settled(MATE)] == state
        assert not has_carrier(BOX)
        assert (link(BOX) or {})["ifalias"] == f"vnetd at {tmp_path}/control.sock"
        with started(tmp_path, text) as remote:
            # Nothing is set again.
            wait_until("pings to go on", lambda: pings(MATE, 1) and pings(BOX, 2), BACK_S)
            assert has_carrier(BOX)
            assert [(link(netns) or {})["address"] for netns in (BOX, MATE)] == before
            assert before[1] == MAC
            assert (link(MATE) or {})["mtu"] == 1400
            assert [settled(BOX), settled(MATE)] == state
            assert [index(BOX), index(MATE)] == indices
            end(remote, number)
    assert (tmp_path / "control.sock.taps").exists()


def test_offloads_are_set_again(tmp_path: Path):
    """Super-frames of TCP, partial checksums, the virtio-net header, and the length of the queue."""
    text = tap("box", BOX) + tap("mate", MATE)
    features = []
    for _ in range(2):
        with started(tmp_path, text) as remote:
            shown = run(["ip", "netns", "exec", BOX, "ethtool", "-k", "eth0"])
            features.append([line for line in shown.splitlines() if "segmentation" in line or "checksum" in line])
            settings = link(BOX) or {}
            features[-1] += [str(settings[key]) for key in ("gso_max_size", "txqlen")]
            kind = settings["linkinfo"]["info_data"]
            features[-1] += [f"{key} {kind.get(key)}" for key in ("vnet_hdr", "pi", "multi_queue")]
            end(remote, signal.SIGKILL)
    assert features[0] == features[1]
    assert any("tcp-segmentation-offload: on" in line for line in features[0])


def test_another_number_of_queues_makes_a_device_again(tmp_path: Path):
    with started(tmp_path, tap("box", BOX)) as remote:
        before = link(BOX) or {}
        end(remote, signal.SIGTERM)
    with started(tmp_path, tap("box", BOX, "queues = 2\n")) as remote:
        after = link(BOX) or {}
        assert after["ifindex"] != before["ifindex"]
        assert after["address"] == before["address"]
        assert has_carrier(BOX)
        end(remote, signal.SIGTERM)
    kept = index(BOX)
    with started(tmp_path, tap("box", BOX, "queues = 4\n")):
        assert index(BOX) == kept


def test_commands_and_reloads_remove_a_device(tmp_path: Path):
    text = tap("box", BOX) + tap("mate", MATE)
    with started(tmp_path, text) as remote:
        settle(BOX, 1)
        done = remote.vnet("interface", "del", "mate")
        assert done.returncode == 0, done.stderr
        wait_until("the device to go", lambda: link(MATE) is None, BACK_S)
        end(remote, signal.SIGKILL)
    with started(tmp_path, text) as remote:
        assert link(MATE)
        kept, state = index(BOX), settled(BOX)
        # Another setting of the same interface keeps its device.
        file = tmp_path / "vnet.toml"
        file.write_text(file.read_text().replace(tap("mate", MATE), "") + "mtu = 1300\n")
        os.kill(remote.pid, signal.SIGHUP)
        wait_until("the device to go", lambda: link(MATE) is None, BACK_S)
        wait_until("the MTU", lambda: (link(BOX) or {}).get("mtu") == 1300, BACK_S)
        wait_until("the queue to be open again", lambda: has_carrier(BOX), BACK_S)
        assert index(BOX) == kept
        assert settled(BOX) == state
        end(remote, signal.SIGKILL)
    with holding(BOX), started(tmp_path, text) as remote:
        assert "another program has it open" in (tmp_path / "log").read_text()
        done = remote.vnet("interface", "del", "box")
        assert done.returncode == 0, done.stderr
        wait_until("the device of an interface that is down to go", lambda: link(BOX) is None, BACK_S)


def test_the_next_start_removes_what_is_not_configured_any_more(tmp_path: Path):
    with started(tmp_path, tap("box", BOX) + tap("mate", MATE)) as remote:
        ip(MATE, "link", "set", "eth0", "name", "renamed", "netns", ELSEWHERE)
        listed = tmp_path / "control.sock.taps"
        wait_until("the move to be listed", lambda: "renamed" in listed.read_text(), BACK_S)
        end(remote, signal.SIGKILL)
    ip(BOX, "link", "add", "other", "type", "bridge")
    ip(BOX, "tuntap", "add", "tap1", "mode", "tap")
    with started(tmp_path, "") as remote:
        assert link(BOX) is None
        assert link(ELSEWHERE, "renamed") is None
        assert not listed.exists()
        end(remote, signal.SIGTERM)
    assert link(BOX, "other")
    assert link(BOX, "tap1")


def test_a_device_that_was_moved_is_adopted_where_it_is(tmp_path: Path):
    """Made beside vnetd, then moved into a container and renamed, as container engines do."""
    beside = f'[[interface]]\nname = "box"\nkind = "tap"\ndevice = "made0"\nmac = "{MAC}"\n'
    inside = ("ip", "netns", "exec", ELSEWHERE)
    with started(tmp_path, beside + tap("mate", MATE), inside) as remote:
        ip(ELSEWHERE, "link", "set", "made0", "name", "eth0", "netns", BOX)
        ip(BOX, "link", "set", "eth0", "up")
        settle(BOX, 1)
        settle(MATE, 2)
        wait_until("the first ping", lambda: pings(MATE, 1), BACK_S)
        listed = tmp_path / "control.sock.taps"
        wait_until("the move to be listed", lambda: '"moved":true' in listed.read_text(), BACK_S)
        kept, state = index(BOX), settled(BOX)
        end(remote, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with started(tmp_path, beside + tap("mate", MATE), inside) as remote:
            wait_until("pings to go on", lambda: pings(MATE, 1), BACK_S)
            assert link(ELSEWHERE, "made0") is None
            assert (index(BOX), settled(BOX)) == (kept, state)
            end(remote, number)
    # Its name is free again once it has gone.
    ip(BOX, "link", "delete", "eth0")
    with started(tmp_path, beside, inside) as remote:
        assert link(ELSEWHERE, "made0")
        assert remote.vnet("interface", "del", "box").returncode == 0
        wait_until("the device to go", lambda: link(ELSEWHERE, "made0") is None, BACK_S)


def test_a_namespace_of_the_same_name_gets_a_device_of_its_own(tmp_path: Path):
    with (
        subprocess.Popen(["ip", "netns", "exec", BOX, "sleep", "1000"]) as sleeper,
        started(tmp_path, tap("box", BOX)) as remote,
    ):
        try:
            end(remote, signal.SIGKILL)
            run(["ip", "netns", "delete", BOX])
            underlay.add_namespace(BOX)
            before = ["nsenter", f"--net=/proc/{sleeper.pid}/ns/net", "ip", "link", "show"]
            assert "eth0" in run(before)
            with started(tmp_path, tap("box", BOX)):
                assert has_carrier(BOX)
                assert "eth0" not in run(before)
        finally:
            sleeper.kill()


@pytest.mark.parametrize("moved", [False, True])
def test_a_namespace_that_has_the_number_of_one_that_ended(tmp_path: Path, moved: bool):
    """An interface's old place is now that of another interface, whose device stays."""
    text = tap("box", BOX) + tap("mate", MATE)
    with started(tmp_path, text) as remote:
        listed = tmp_path / "control.sock.taps"
        wait_until("places to be listed", lambda: listed.read_text().count('"namespace"') == 2, BACK_S)
        end(remote, signal.SIGKILL)
    kept = index(MATE)
    run(["ip", "netns", "delete", BOX])
    taps = json.loads(listed.read_text())
    place = next(each["place"] for each in taps if each["netns"] == MATE)
    for each in taps:
        if each["netns"] == BOX:
            each["place"], each["moved"] = place, moved
    listed.write_text(json.dumps(taps))
    with started(tmp_path, text) as remote:
        assert has_carrier(MATE)
        done = remote.vnet("interface", "del", "box")
        assert done.returncode == 0, done.stderr
        assert index(MATE) == kept
        assert has_carrier(MATE)
        end(remote, signal.SIGKILL)
    # The same at the next start without it.
    listed.write_text(json.dumps(taps))
    with started(tmp_path, tap("mate", MATE)):
        assert index(MATE) == kept
        assert BOX not in listed.read_text()


@pytest.mark.parametrize("owner", [(), ("user", "12345")])
def test_a_forged_mark_is_not_enough(tmp_path: Path, owner: tuple[str, ...]):
    """A namespace's owner can write an alias, but a user namespace cannot name vnetd's user as a device's owner."""
    text = tap("box", BOX)
    with started(tmp_path, text) as remote:
        ip(BOX, "link", "set", "eth0", "name", "renamed", "netns", ELSEWHERE)
        listed = tmp_path / "control.sock.taps"
        wait_until("the move to be listed", lambda: "renamed" in listed.read_text(), BACK_S)
        end(remote, signal.SIGKILL)
    mark = (link(ELSEWHERE, "renamed") or {})["ifalias"]
    ip(ELSEWHERE, "link", "delete", "renamed")
    ip(ELSEWHERE, "tuntap", "add", "renamed", "mode", "tap", "vnet_hdr", *owner)
    ip(ELSEWHERE, "link", "set", "renamed", "alias", mark)
    moved = listed.read_text()
    with started(tmp_path, text) as remote:
        assert has_carrier(BOX)
        assert "LOWER_UP" not in (link(ELSEWHERE, "renamed") or {})["flags"]
        end(remote, signal.SIGKILL)
    listed.write_text(moved)
    with started(tmp_path, "") as remote:
        assert link(ELSEWHERE, "renamed")
        end(remote, signal.SIGTERM)


def test_a_device_of_somebody_else_is_refused(tmp_path: Path):
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    with vnetd(own) as remote:
        add = ("interface", "add", "box", "--kind", "tap", "--device", "eth0", "--netns", BOX)

        def refusal() -> str:
            done = remote.vnet(*add)
            assert done.returncode == 1
            assert len(done.stderr.splitlines()) == 1, done.stderr
            return done.stderr

        with started(other, tap("box", BOX)) as holder:
            assert f"it is of the vnetd at {other}/control.sock" in refusal()
            end(holder, signal.SIGKILL)
        assert f"it is of the vnetd at {other}/control.sock" in refusal()
        assert (link(BOX) or {})["ifalias"].endswith("other/control.sock")
        # Whoever may write aliases there cannot write into vnetd's log.
        ip(BOX, "link", "set", "eth0", "alias", "vnetd at /x\n2026 ERROR forged")
        assert "forged" in refusal()
        ip(BOX, "link", "delete", "eth0")
        with holding(BOX):
            assert "another program has it open" in refusal()
        ip(BOX, "link", "delete", "eth0")
        ip(BOX, "link", "add", "eth0", "type", "bridge")
        assert "is there another device of that name" in refusal()
        assert link(BOX)
        ip(BOX, "link", "delete", "eth0")
        assert remote.vnet(*add).returncode == 0


def test_after_the_last_stop_nothing_need_stay(tmp_path: Path):
    text = tap("box", BOX) + tap("mate", MATE)
    words = [str(daemon.binaries() / "vnetd"), "--remove-taps", "--config", str(tmp_path / "vnet.toml")]
    with started(tmp_path, text) as remote:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        assert (done.returncode, "stop it first" in done.stderr) == (1, True), done.stderr
        # One that does not accept connections, too.
        os.kill(remote.pid, signal.SIGSTOP)
        with ExitStack() as waiting:
            full = False
            while not full:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.settimeout(0)
                full = client.connect_ex(str(tmp_path / "control.sock")) != 0
            done = subprocess.run(words, check=False, capture_output=True, text=True)
            assert (done.returncode, "stop it first" in done.stderr) == (1, True), done.stderr
            assert link(BOX)
        os.kill(remote.pid, signal.SIGCONT)
        end(remote, signal.SIGTERM)
    assert link(BOX)
    assert link(MATE)
    assert "removed: " in run(words)
    assert link(BOX) is None
    assert link(MATE) is None
    assert "has left no TAP device" in run(words)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "vnet.toml"]
    (tmp_path / "vnet.toml").unlink()
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.returncode, "cannot read the configuration" in done.stderr) == (1, True), done.stderr


def test_a_container_without_the_kernels_path_keeps_its_device_through_a_crash(tmp_path: Path):
    """A veth is removed when vnetd is stopped; so is the TAP in its place."""
    text = tap("box", BOX).replace('"tap"', '"veth"')
    off = text + 'kernel_path = "off"\n'
    with started(tmp_path, off) as remote:
        settle(BOX, 1)
        kept, state = index(BOX), settled(BOX)
        end(remote, signal.SIGKILL)
    with started(tmp_path, off) as remote:
        assert (index(BOX), settled(BOX)) == (kept, state)
        end(remote, signal.SIGKILL)
    # Of the other kind the device is another one.
    with started(tmp_path, text) as remote:
        assert remote.vnet("interface", "list").returncode == 0
        assert link(BOX)
        end(remote, signal.SIGTERM)
    assert link(BOX) is None
    with started(tmp_path, off) as remote:
        end(remote, signal.SIGTERM)
    assert link(BOX) is None
