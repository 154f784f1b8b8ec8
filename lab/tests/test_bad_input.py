"""Users' mistakes: each yields one line with the mistake, its place and the remedy, exit status 1, and no change."""

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MakeLab

from vnetlab import daemon, guest, lab, process, underlay
from vnetlab.image import ensure_image
from vnetlab.run import wait_until
from vnetlab.topology import STATE

NAMESPACE = "test-bad-input"
SOCKETS = {"control.sock", "control.sock.take-over", "vm1.sock"}
"""Of a vnetd with one virtual machine."""
GOOD = """\
[host]
name = "h1"

[control]
socket = "DIR/control.sock"

[bridge]
listen = "192.0.2.1:9000"

[[network]]
id = 1

[[interface]]
name = "vm1"
kind = "vhost-user"
socket = "DIR/vm1.sock"
mac = "52:54:00:00:00:01"
mtu = 1500

[[interface]]
name = "c1"
kind = "tap"
device = "bad0"
mac = "52:54:00:00:00:02"

[[link]]
name = "h2"
remote = "192.0.2.2:9000"
trusted = true

[[route]]
src = "any"
dst = "52:54:00:00:00:03"
to = "link h2"
"""

MISTAKES = {
    # mistake: (text, replacement, expected text in the reported line, expected words of the message)
    "unknown key": ("mtu = 1500", "mut = 1500", "mut = 1500", ["mut"]),
    "not TOML": ('name = "vm1"', 'name = "vm1', 'name = "vm1', []),
    "MAC address": ("52:54:00:00:00:01", "52:54:00:00:01", "52:54:00:00:01", ["52:54:00:00:01", "mac"]),
    "group address": ("52:54:00:00:00:01", "53:54:00:00:00:01", "53:54", ["53:54:00:00:00:01"]),
    "remote address": ("192.0.2.2:9000", "192.0.2.256:9000", "192.0.2.256", ["192.0.2.256:9000"]),
    "no port": ('"192.0.2.2:9000"', '"192.0.2.2"', '"192.0.2.2"', ["192.0.2.2"]),
    "listen address": ("192.0.2.1:9000", "localhost", "localhost", ["localhost"]),
    "MTU beyond limits": ("mtu = 1500", "mtu = 65536", "mtu = 65536", ["65536", "65535"]),
    "MTU as text": ("mtu = 1500", 'mtu = "big"', "big", ["mtu", "number"]),
    "link to itself": ("192.0.2.2:9000", "192.0.2.1:9000", "[[link]]", ["this host itself"]),
    "duplicate name": ('name = "c1"', 'name = "vm1"', "[[interface]]\nname = \"vm1\"\nkind = \"tap\"", ["vm1"]),
    "duplicate MAC": (":00:02", ":00:01", "[[interface]]\nname = \"c1\"", ["52:54:00:00:00:01", "vm1"]),
    "route to an unknown link": ("link h2", "link h3", "[[route]]", ["h3", "h2"]),
    "unknown kind": ('"tap"', '"tun"', '"tun"', ["tun", "tap"]),
    "unknown encapsulation": ("trusted", 'encapsulation = "gre"\ntrusted', "gre", ["gre", "native"]),
    "undeclared network": ("mtu = 1500", "network = 7", "[[interface]]\nname = \"vm1\"", ["network 7"]),
    "relative socket": ("DIR/vm1.sock", "vm1.sock", "vm1.sock", ["vm1.sock"]),
    "device name too long": ("bad0", "x" * 16, "x" * 16, ["x" * 16]),
    "no name": ('name = "c1"\n', "", '[[interface]]\nkind = "tap"', ["name"]),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def namespace() -> Iterator[None]:
    """A network namespace for these tests, so that they do not change this machine's."""
    if NAMESPACE in underlay.namespaces():
        underlay.run(["ip", "netns", "delete", NAMESPACE])
    underlay.add_namespace(NAMESPACE)
    underlay.run(["ip", "-n", NAMESPACE, "address", "add", "192.0.2.1/32", "dev", "lo"])
    yield
    underlay.run(["ip", "netns", "delete", NAMESPACE])


def refused(*command: str | Path) -> str:
    """Runs a command that must fail with exit status 1 and one line on standard error; returns the line."""
    words = ["ip", "netns", "exec", NAMESPACE, *map(str, command)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


def starts_without(interface: str, *command: str | Path) -> str:
    """Runs a vnetd that must start with an interface down, and exit on SIGTERM; returns the line with the reason."""
    words = ["ip", "netns", "exec", NAMESPACE, *map(str, command)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
        assert process.wait(10) == 0, log
    (line,) = [line for line in log.splitlines() if f"interface {interface} is down: " in line]
    return line


def remove_taps(file: Path) -> None:
    """Removes the TAP devices that a stopped vnetd with this configuration has left for the next one."""
    underlay.run(["ip", "netns", "exec", NAMESPACE, str(vnetd()), "--remove-taps", "--config", str(file)])


def assert_nothing_there(directory: Path) -> None:
    """Asserts that no socket and no device is left."""
    assert [path.name for path in directory.iterdir() if path.is_socket()] == []
    assert "bad0" not in underlay.run(["ip", "-n", NAMESPACE, "-brief", "link"])


def write(directory: Path, text: str) -> Path:
    file = directory / "vnet.toml"
    file.write_text(text.replace("DIR", str(directory)))
    return file


def vnetd() -> Path:
    return daemon.binaries() / "vnetd"


@pytest.mark.parametrize("what", MISTAKES)
def test_mistake_in_the_file(tmp_path: Path, what: str):
    old, new, place, words = MISTAKES[what]
    assert GOOD.count(old) == 1 or what == "duplicate MAC"
    text = GOOD.replace(old, new)
    file = write(tmp_path, text)
    line = text[: text.index(place)].count("\n") + 1
    for message in (refused(vnetd(), "--config", file), refused(daemon.binaries() / "vnet", "check", file)):
        assert message.startswith(f"{file}:{line}: "), message
        assert all(word in message for word in words), message
    assert_nothing_there(tmp_path)


def test_all_mistakes_are_reported_at_once(tmp_path: Path):
    file = write(tmp_path, GOOD.replace("mtu = 1500", "mtu = 0").replace("link h2", "link h3"))
    done = subprocess.run([vnetd(), "--config", file], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = [GOOD[: GOOD.index(place)].count("\n") + 1 for place in ("mtu = 1500", "[[route]]")]
    assert [int(line.split(":")[1]) for line in done.stderr.splitlines()] == lines


def test_a_valid_file_passes(tmp_path: Path):
    done = subprocess.run(
        [daemon.binaries() / "vnet", "check", write(tmp_path, GOOD)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file(tmp_path: Path):
    assert "no-such-file" in refused(vnetd(), "--config", tmp_path / "no-such-file")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The directory of a vnetd that runs with the valid file."""
    file, log = write(tmp_path, GOOD), tmp_path / "log"
    with log.open("wb") as output:
        words = ["ip", "netns", "exec", NAMESPACE, vnetd(), "--config", file]
        with subprocess.Popen(words, stdout=output, stderr=output) as first:
            wait_until("vnetd to run", lambda: "ready" in log.read_text(), 10, log)
            yield tmp_path
            assert first.poll() is None, log.read_text()
            first.send_signal(signal.SIGTERM)
            first.wait(5)
    remove_taps(file)
    assert_nothing_there(tmp_path)


@pytest.mark.parametrize(
    ("replacements", "word"),
    [
        ({}, "control.sock"),
        ({"control.sock": "other.sock"}, "192.0.2.1:9000"),
    ],
    ids=["control socket", "port"],
)
def test_resources_of_another_vnetd(running: Path, replacements: dict[str, str], word: str):
    """The daemon never takes over a socket, port or device in use, and the other vnetd continues to run."""
    text = GOOD.replace("DIR", str(running))
    for old, new in replacements.items():
        text = text.replace(old, new)
    (running / "second.toml").write_text(text)
    assert word in refused(vnetd(), "--config", running / "second.toml")
    assert {path.name for path in running.iterdir() if path.is_socket()} == SOCKETS


@pytest.mark.parametrize(
    ("replacements", "interface", "word"),
    [({}, "vm1", "vm1.sock"), ({"vm1.sock": "vm2.sock"}, "c1", "bad0")],
    ids=["guest's socket", "device"],
)
def test_interfaces_of_another_vnetd(running: Path, replacements: dict[str, str], interface: str, word: str):
    """A host starts without resources that another vnetd uses, reports that, and takes nothing over."""
    text = GOOD.replace("DIR", str(running))
    for old, new in (replacements | {"control.sock": "other.sock", "192.0.2.1:9000": "192.0.2.1:9001"}).items():
        text = text.replace(old, new)
    file = running / "second.toml"
    file.write_text(text)
    assert word in starts_without(interface, vnetd(), "--config", file)
    assert {path.name for path in running.iterdir() if path.is_socket()} == SOCKETS


def test_a_stale_socket_is_replaced(tmp_path: Path):
    for name in ("control.sock", "vm1.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(tmp_path / name))
    file, log = write(tmp_path, GOOD), tmp_path / "log"
    with log.open("wb") as output:
        words = ["ip", "netns", "exec", NAMESPACE, vnetd(), "--config", file]
        with subprocess.Popen(words, stdout=output, stderr=output) as process:
            wait_until("vnetd to run", lambda: "ready" in log.read_text(), 10, log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
    remove_taps(file)
    assert_nothing_there(tmp_path)


def test_a_file_in_place_of_the_socket_is_kept(tmp_path: Path):
    (tmp_path / "vm1.sock").write_text("precious")
    file = write(tmp_path, GOOD)
    assert "vm1.sock" in starts_without("vm1", vnetd(), "--config", file)
    remove_taps(file)
    assert (tmp_path / "vm1.sock").read_text() == "precious"


def test_no_permission_for_tap_devices(tmp_path: Path):
    tmp_path.chmod(0o777)
    file = write(tmp_path, GOOD)
    capabilities = ["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"]
    message = starts_without("c1", *capabilities, vnetd(), "--config", file)
    assert "bad0" in message
    assert "root" in message or "CAP_NET_ADMIN" in message
    assert_nothing_there(tmp_path)


@pytest.mark.parametrize("how", ["none", "private"])
def test_a_machine_without_shared_memory(make_lab: MakeLab, how: str):
    """The daemon cannot map the guest's memory: it reports the reason and the remedy, and continues to run."""
    topology = make_lab(hosts=1)
    vm, host = topology.find("h1v1"), topology.hosts[0]
    process.stop(vm.file(".pid"))
    words = guest.command(topology, vm, ensure_image(lab.CACHE))
    if how == "private":
        words = [word.replace("share=on", "share=off") for word in words]
    else:
        first = words.index("-object")
        del words[first : first + len(["-object", "memory-backend-memfd", "-numa", "node"])]
    process.start(words, vm.file(".pid"), vm.file(".log"))

    def reason() -> str:
        rows = {row["name"]: row for row in daemon.ask(host, "interface", "list")}
        return rows["h1v1"].get("reason", "") if rows["h1v1"]["state"] != "up" else ""

    def notes() -> str:
        rows = {row["name"]: row for row in daemon.ask(host, "interface", "list")}
        return " ".join(rows["h1v1"].get("notes", []))

    if how == "private":
        # vnetd finds the private mapping before the guest's driver starts.
        wait_until("the note to be shown", lambda: "private" in notes(), 60, host.file(".log"))
    wait_until("the reason to be shown", lambda: "share=on" in reason(), 20, host.file(".log"))
    assert process.find(host.file(".pid"))


def test_wrong_usage():
    for words in (["vnetd", "--no-such-option"], ["vnet", "no-such-command"], ["vnet", "route", "del", "x"]):
        done = subprocess.run([daemon.binaries() / words[0], *words[1:]], check=False, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr
    lab = [Path(__file__).parent.parent / "lab", "up", "--wire", "7x"]
    done = subprocess.run(lab, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose from 'none', '1g', '10g'" in done.stderr


def test_no_vnetd_at_the_socket(tmp_path: Path):
    message = refused(daemon.binaries() / "vnet", "--socket", tmp_path / "none.sock", "status")
    assert str(tmp_path / "none.sock") in message


def test_the_lab_itself():
    for arguments, word in {
        ("up", "--hosts", "0"): "--hosts",
        ("up", "--mtu", "65536"): "65535",
        ("up", "--name", "No Good"): "name",
        ("up", "--ipv6", "--underlay-mtu", "1000"): "1280",
        ("exec", "--name", "nothing-there", "h1", "--", "true"): "not up",
    }.items():
        assert word in refused(Path(__file__).parent.parent / "lab", *arguments)
    assert not (STATE / "nothing-there").exists()
