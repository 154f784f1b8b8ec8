"""`vnetd --take-over`: a new vnetd takes the place of a running one under traffic, and no frame is lost.

Two hosts with a container of kind veth and one of kind tap each. VNET_TEST_TAKE_OVERS=100 runs the long test, and
afterwards the same traffic for as long without a take-over: what is silent then is the machine's own doing.
"""

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROGRAMS
from kernel_host import Host, assert_none_lost, devices
from traffic import longest_silence, silences

from vnetlab import daemon
from vnetlab.run import run, wait_until

TAKE_OVERS = int(os.environ.get("VNET_TEST_TAKE_OVERS", "4"))
END_S = 0.25
"""Largest round trip at the end: pings sent later may still be in flight and do not count as lost."""
GAP_S = float(os.environ.get("VNET_TEST_TAKE_OVER_GAP_S", "60"))
"""Longest time between two answers; on an idle machine it is below 50 ms."""
PREFIX = f"to{os.getpid()}"
HOSTS = [f"{PREFIX}h1", f"{PREFIX}h2"]
VETHS = [f"{PREFIX}c1", f"{PREFIX}c2"]
TAPS = [f"{PREFIX}t1", f"{PREFIX}t2"]
UNDERLAY = ["192.0.2.1", "192.0.2.2"]
ADDRESSES = {namespace: f"10.79.0.{number}" for number, namespace in enumerate((*VETHS, *TAPS), 1)}
PATHS = [(VETHS[0], VETHS[1]), (TAPS[0], TAPS[1]), (TAPS[1], TAPS[0]), (VETHS[0], TAPS[0])]
HALF = PROGRAMS / "half_heir.py"


def configure(host: Host, index: int) -> None:
    """Writes the configuration of host number `index`."""
    interfaces = "".join(
        f'[[interface]]\nname = "{kind}"\nkind = "{kind}"\ndevice = "eth0"\nnetns = "{namespaces[index]}"\n'
        for kind, namespaces in (("veth", VETHS), ("tap", TAPS))
    )
    (host.directory / "vnet.toml").write_text(
        f'[host]\nname = "h{index + 1}"\n[control]\nsocket = "{host.directory}/control.sock"\n'
        f'http = "127.0.0.1:9080"\nconsole = "127.0.0.1:9001"\n'
        f'[bridge]\nlisten = "{UNDERLAY[index]}:9000"\nports = 2\n'
        f'[dispatch]\nbpffs = "{host.directory}/bpf"\nthreads = 2\n{interfaces}'
        f'[[link]]\nname = "peer"\nremote = "{UNDERLAY[1 - index]}:9000"\nports = 2\ntrusted = true\n'
    )


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    hosts = [Host(name, tmp_path_factory.mktemp(name[-2:])) for name in HOSTS]
    try:
        for namespace in (*HOSTS, *VETHS, *TAPS):
            run(["ip", "netns", "add", namespace])
        run(f"ip link add eth0 netns {HOSTS[0]} type veth peer name eth0 netns {HOSTS[1]}".split())
        for index, host in enumerate(hosts):
            ip = ["ip", "-n", host.namespace]
            run([*ip, "address", "add", f"{UNDERLAY[index]}/24", "dev", "eth0"])
            for device in ("lo", "eth0"):
                run([*ip, "link", "set", device, "up"])
            configure(host, index)
            host.mount_bpffs()
            host.start()
            for namespace in (VETHS[index], TAPS[index]):
                run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
        for source, destination in PATHS:
            wait_until(f"{source} to reach {destination}", lambda path=(source, destination): reaches(*path), 30)
        yield hosts
    finally:
        for host in hosts:
            if host.daemon and host.daemon.poll() is None:
                host.end(signal.SIGKILL)
            host.unmount_bpffs()
        for namespace in (*HOSTS, *VETHS, *TAPS):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def reaches(source: str, destination: str) -> bool:
    words = [
        "ip",
        "netns",
        "exec",
        source,
        "ping",
        "-n",
        "-q",
        "-c",
        "3",
        "-i",
        "0.01",
        "-w",
        "2",
        ADDRESSES[destination],
    ]
    return "3 received" in subprocess.run(words, check=False, capture_output=True, text=True).stdout


def try_take_over(host: Host, *arguments: str, config: str = "vnet.toml") -> subprocess.Popen:
    """Starts a new vnetd that is to take over; its output is appended to the host's log."""
    words = ["ip", "netns", "exec", host.namespace, str(daemon.binaries() / "vnetd"), "--take-over"]
    words += ["--config", str(host.directory / config), *arguments]
    with (host.directory / "log").open("ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=output)


def take_over(host: Host) -> int:
    """A new vnetd takes over; returns after how many milliseconds it says that frames flow."""
    log = host.directory / "log"
    begin = len(log.read_text())
    new = try_take_over(host)
    wait_until(
        "the new vnetd to be ready", lambda: " ready: " in log.read_text()[begin:] or new.poll() is not None, 20, log
    )
    assert new.poll() is None, log.read_text()[begin:]
    assert host.daemon.wait(10) == 0, log.read_text()[begin:]
    host.daemon = new
    return int(re.search(r"(\d+) ms after this one stood still", log.read_text()[begin:])[1])


def refused(host: Host, *arguments: str, config: str = "vnet.toml") -> str:
    """A new vnetd that does not take over: what it says. The running one goes on."""
    before, log = host.daemon.pid, host.directory / "log"
    begin = len(log.read_text())
    assert try_take_over(host, *arguments, config=config).wait(20) == 1
    assert host.daemon.pid == before
    assert host.daemon.poll() is None
    return log.read_text()[begin:]


@contextlib.contextmanager
def pinging(interval_s: float = 0.005) -> Iterator[list[list[float]]]:
    """Pings along all paths while the context lasts: none is lost.

    `ping` itself loses answers if more than 170 arrive at once: its receive buffer holds no more. It writes to files,
    because it would stand still once a pipe that nobody reads is full: after 4 s.
    Yields the times of each path's answers, once it has ended.
    """
    times: list[list[float]] = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in PATHS]
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", source, "ping", "-n", "-D", "-i", str(interval_s), ADDRESSES[destination]],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for (source, destination), file in zip(PATHS, files, strict=True)
        ]
        try:
            time.sleep(0.5)
            yield times
            time.sleep(2 * END_S)
            assert [ping.poll() for ping in running] == [None] * len(running), "pings go on"
        finally:
            for ping in running:
                ping.send_signal(signal.SIGINT)
            for ping in running:
                ping.wait(60)
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
    for text in texts:
        assert_none_lost(text, on_the_way=round(END_S / interval_s))
        times.append([float(at) for at in re.findall(r"^\[([\d.]+)\] \d+ bytes from", text, re.MULTILINE)])


@contextlib.contextmanager
def transferring() -> Iterator[None]:
    """TCP connections between the hosts' containers while the context lasts: all of them go on."""
    with contextlib.ExitStack() as stack:
        clients = []
        for source, destination in (VETHS, TAPS[::-1]):
            inside = ["ip", "netns", "exec", destination]
            server = stack.enter_context(
                subprocess.Popen([*inside, "iperf3", "--server", "--one-off"], stdout=subprocess.DEVNULL)
            )
            stack.callback(server.terminate)
            wait_until(
                "iperf3 to listen", lambda inside=inside: run([*inside, "ss", "-Hltn", "sport = :5201"]) != "", 20
            )
            words = ["ip", "netns", "exec", source, "iperf3", "--client", ADDRESSES[destination], "--bitrate", "100M"]
            words += ["--time", "3600", "--json"]
            clients.append(stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True)))
        try:
            yield
            assert [client.poll() for client in clients] == [None] * len(clients), "connections go on"
        finally:
            for client in clients:
                client.send_signal(signal.SIGINT)
                client.communicate(timeout=30)


def counters(host: Host) -> dict[str, int]:
    """All counters of a host's ports by name."""
    found = {}
    for port in host.ask("stats")["ports"]:
        for key, value in port.items():
            if isinstance(value, int):
                found[f"{port['kind']} {port['name']} {key}"] = value
            elif isinstance(value, dict):
                found.update({f"{port['kind']} {port['name']} {key} {reason}": n for reason, n in value.items()})
    return found


def assert_goes_on(before: dict[str, int], after: dict[str, int]) -> None:
    back = {name: (count, after.get(name)) for name, count in before.items() if after.get(name, -1) < count}
    assert not back, f"counters that went back: {back}"


def settled(host: Host) -> None:
    """Waits until every frame is accounted for: dispatchers may be within a batch."""

    def balanced() -> bool:
        try:
            host.balance()
        except AssertionError:
            return False
        return True

    wait_until("the frames to balance", balanced, 10)


def test_no_frame_is_lost(hosts: list[Host]):
    """Take-overs of both hosts under pings and TCP."""
    waits, spans = [], []
    with transferring(), pinging() as times:
        for number in range(TAKE_OVERS):
            host = hosts[number % 2]
            before = counters(host)
            begin = time.time()
            waits.append(take_over(host))
            assert_goes_on(before, counters(host))
            spans.append((begin, time.time()))
            time.sleep(0.3)
    for host in hosts:
        settled(host)
    print(f"\n{TAKE_OVERS} take-overs, each within {sorted(waits)} ms")
    print(f"longest silence in each: {silences(times, spans)}; at any time, by path: {worst(times)}")
    if "VNET_TEST_TAKE_OVERS" in os.environ:
        with transferring(), pinging() as without:
            later = time.time() - spans[0][0]
            time.sleep(spans[-1][1] + 0.3 - spans[0][0])
        same = [(begin + later, end + later) for begin, end in spans]
        print(f"without a take-over, in the same spans: {silences(without, same)}; at any time: {worst(without)}")
    assert max(longest_silence(path) for path in times) < GAP_S


def worst(times: list[list[float]]) -> str:
    """The longest silence of each path."""
    return ", ".join(f"{longest_silence(path) * 1000:.0f}" for path in times) + " ms"


def test_state_and_changes_are_kept(hosts: list[Host]):
    """Changes by commands, numbers of routes and learned addresses survive, although the file does not have them."""
    host = hosts[0]
    for source, destination in PATHS:
        assert reaches(source, destination)
    words = ["--dst", "52:54:00:00:00:99", "--to"]
    host.vnet("route", "add", *words, "link peer")
    host.vnet("route", "add", "--dst", "52:54:00:00:00:98", "--to", "link peer")
    (first, second) = sorted(route["index"] for route in host.ask("route", "list"))
    host.vnet("route", "del", str(first))
    host.vnet("link", "add", "other", "--remote", "192.0.2.9:9000", "--trusted")

    def state() -> tuple:
        known = {(entry["mac"], entry["network"]) for entry in host.ask("addresses")}
        ports = host.ask("interface", "list")
        return (
            [route["index"] for route in host.ask("route", "list")],
            sorted(link["name"] for link in host.ask("link", "list")),
            sorted((port["name"], port["path"], port["state"]) for port in ports),
            known,
        )

    before = state()
    assert (before[0], before[1]) == ([second], ["other", "peer"])
    assert len(before[3]) >= 4
    take_over(host)
    after = state()
    assert after[:3] == before[:3]
    assert before[3] <= after[3]
    host.vnet("route", "add", *words, "link peer")
    assert max(route["index"] for route in host.ask("route", "list")) == second + 1, "numbers are not used again"
    for route in host.ask("route", "list"):
        host.vnet("route", "del", str(route["index"]))
    host.vnet("link", "del", "other")
    settled(host)


def test_a_take_over_that_is_refused_changes_nothing(hosts: list[Host]):
    host = hosts[0]
    with pinging():
        good = (host.directory / "vnet.toml").read_text()
        (host.directory / "bad.toml").write_text(good.replace("[[link]]", '[[link]]\ncolour = "red"'))
        said = refused(host, config="bad.toml")
        assert "bad.toml:" in said
        assert "colour" in said
        (host.directory / "elsewhere.toml").write_text(good.replace("control.sock", "nobody.sock"))
        said = refused(host, config="elsewhere.toml")
        assert "no vnetd answers" in said
        assert said.count("\n") == 1
    settled(host)
    take_over(host)


def test_a_missing_resource_is_found_before_frames_wait(hosts: list[Host]):
    """The new vnetd sees other file systems, without the pinned maps: the running one goes on."""
    host = hosts[0]
    log = host.directory / "log"
    begin = len(log.read_text())
    words = ["ip", "netns", "exec", host.namespace, "sh", "-c", f'umount {host.directory}/bpf && exec "$@"', "sh"]
    words += [str(daemon.binaries() / "vnetd"), "--take-over", "--config", str(host.directory / "vnet.toml")]
    with pinging():
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "cannot take over the kernel path" in done.stderr
    assert "has not taken over, this vnetd goes on" in log.read_text()[begin:]
    settled(host)


STEPS = [
    ("connect", "dies"),
    ("hello", "nonsense"),
    ("estate", "dies"),
    ("estate", "refuses"),
    ("prepared", "dies"),
    ("prepared", "hangs"),
    ("last", "dies"),
    ("last", "hangs"),
    ("last", "nonsense"),
    ("begins", "dies"),
    ("begins", "hangs"),
]


@pytest.mark.parametrize(("step", "how"), STEPS)
def test_a_new_vnetd_that_fails_is_survived(hosts: list[Host], step: str, how: str):
    """Whenever the new vnetd dies, hangs or talks nonsense, the running one goes on, and no frame is lost."""
    host = hosts[1]
    before, log = counters(host), host.directory / "log"
    begin = len(log.read_text())
    command = [sys.executable, str(HALF), f"{host.directory}/control.sock.take-over", step, how]
    # A process that hangs is given up after 2 s: by then 100 pings wait, fewer than fill ping's receive buffer.
    with pinging(0.02) as times, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as half:
        assert half.stdout.readline() == "half\n"
        wait_until("the running vnetd to go on", lambda: "this vnetd goes on" in log.read_text()[begin:], 20, log)
        half.kill()
    assert host.daemon.poll() is None
    # The two seconds and the time that the kernel needs to end the process.
    assert max(longest_silence(path) for path in times) < 2 + GAP_S
    assert_goes_on(before, counters(host))
    settled(host)
    assert devices(VETHS[1]) == ["lo", "eth0"]
    take_over(host)


def test_other_users_are_refused(hosts: list[Host]):
    host = hosts[0]
    path = Path(f"{host.directory}/control.sock.take-over")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (host.directory, *host.directory.parents):
        if stat.S_IMODE(folder.stat().st_mode) & 1 == 0:
            folder.chmod(0o755)
    program = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('{path}'); print(len(s.recv(1)))"
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-c", program]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=20)
    assert "PermissionError" in done.stderr
    path.chmod(0o666)
    begin = len((host.directory / "log").read_text())
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=20)
    path.chmod(0o600)
    assert done.stdout == "0\n", "the connection is closed"
    log = host.directory / "log"
    wait_until("the refusal to be logged", lambda: "user 65534" in log.read_text()[begin:], 10, log)
    assert "refused a take-over" in log.read_text()[begin:]
    take_over(host)


def test_it_goes_on_in_the_background(hosts: list[Host]):
    """With --detach the command ends once frames flow through the new vnetd, from which the next one can take over."""
    host = hosts[0]
    old = host.daemon
    assert "has not taken over" in refused(host, "--detach", config="absent.toml")
    command = try_take_over(host, "--detach")
    assert command.wait(20) == 0
    assert old.wait(10) == 0
    assert (host.directory / "log").read_text().count(" ready: ") >= 2
    assert reaches(VETHS[0], VETHS[1])
    # The test's own child again; what it takes over from has ended with the status of the command.
    host.daemon = command
    take_over(host)
    assert reaches(VETHS[0], VETHS[1])


def test_nothing_is_left_after_the_end(hosts: list[Host]):
    """The last vnetd of a row of take-overs removes what the first one has made; a TAP waits for the next one."""
    host = hosts[0]
    take_over(host)
    take_over(host)
    assert host.end(signal.SIGTERM) == 0
    assert devices(HOSTS[0]) == ["lo", "eth0"]
    assert devices(VETHS[0]) == ["lo"]
    assert devices(TAPS[0]) == ["lo", "eth0"]
    assert not Path(f"{host.directory}/control.sock").exists()
    assert not Path(f"{host.directory}/control.sock.take-over").exists()
    assert not (host.directory / "bpf" / "vnet").exists()
    host.start()


def test_the_service_manager_follows(hosts: list[Host], monkeypatch: pytest.MonkeyPatch):
    """The running vnetd names the new one as main process, which reports to the same manager."""
    host = hosts[0]
    assert host.end(signal.SIGTERM) == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{host.directory}/notify")
        manager.settimeout(20)

        def told() -> list[str]:
            """Lines up to the one that says that vnetd is ready."""
            lines: list[str] = []
            while "READY=1" not in lines:
                lines += manager.recv(4096).decode().splitlines()
            return lines

        monkeypatch.setenv("NOTIFY_SOCKET", f"{host.directory}/notify")
        host.start()
        assert "READY=1" in told()
        monkeypatch.delenv("NOTIFY_SOCKET")
        for _ in range(2):
            take_over(host)
            lines = told()
            assert lines[0] == f"MAINPID={host.daemon.pid}"
            assert "STOPPING=1" not in lines
    assert host.end(signal.SIGTERM) == 0
