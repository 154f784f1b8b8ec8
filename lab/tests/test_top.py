"""`vnet top` in a pseudo-terminal and in scripts, and `vnet doctor` on a lab's host."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest
from checks import pinging, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, process
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Node, Topology

ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    topology = make_lab(vms=0)
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


class Terminal:
    """A program in a pseudo-terminal, with its output and its screen."""

    def __init__(self, command: list[str], columns: int, lines: int) -> None:
        self.outside, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.settings = termios.tcgetattr(inside)
        self.inside = inside
        self.program = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )
        self.written = b""

    def screen(self) -> str:
        """The screen's text: interprets cursor addressing and clearing, ignores colours."""
        cells: dict[tuple[int, int], str] = {}
        row = column = 1
        for found in re.finditer(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])", self.written.decode(errors="ignore")):
            arguments, action, letter = found.groups()
            if letter:
                cells[row, column] = letter
                column += 1
            elif action == "H":
                row, column = (int(part or 1) for part in (arguments or "1;1").split(";"))
            elif action == "J":
                cells.clear()
        height = max((at[0] for at in cells), default=0)
        width = max((at[1] for at in cells), default=0)
        lines = ("".join(cells.get((y, x), " ") for x in range(1, width + 1)) for y in range(1, height + 1))
        return "\n".join(line.rstrip() for line in lines)

    def wait_for(self, pattern: str, timeout_s: float = 10) -> None:
        """Reads until the screen shows the pattern."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.screen(), re.DOTALL):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not on the screen:\n{self.screen()}"
            if select.select([self.outside], [], [], left)[0]:
                self.written += os.read(self.outside, 65536)

    def read_rest(self) -> bytes:
        """Reads the rest of the output; returns all of it."""
        while select.select([self.outside], [], [], 0.2)[0]:
            self.written += os.read(self.outside, 65536)
        return self.written

    def press(self, keys: str) -> None:
        """Sends keys."""
        os.write(self.outside, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Changes the window size and sends SIGWINCH, as a terminal does."""
        fcntl.ioctl(self.inside, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.program.send_signal(signal.SIGWINCH)

    def close(self) -> None:
        """Ends the program if it did not end by itself."""
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait(10)
        os.close(self.outside)
        os.close(self.inside)


@contextlib.contextmanager
def top(host: Node, *arguments: str, columns: int = 110, lines: int = 16) -> Iterator[Terminal]:
    command = [str(daemon.binaries() / "vnet"), "--socket", str(host.file(".sock")), "top", *arguments]
    terminal = Terminal(command, columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()


def test_rates_and_keys(topology: Topology):
    host = topology.hosts[0]
    with pinging((topology.find("h1c1"), topology.find("h2c1"))), top(host) as terminal:
        # Some 500 pings a second are some 400 kbit/s in each direction, less on a busy machine.
        terminal.wait_for(r"vnet top: h1, every 1 s, by bits.*interface +h1c1 +[\d.]+k +[\d.]+k ")
        assert re.search(r"link +h2 ", terminal.screen())
        terminal.press("s")
        terminal.wait_for("by frames")
        terminal.press("h")
        terminal.wait_for("sort by the next column")
        terminal.press("q")
        terminal.press("r")
        terminal.wait_for("by frames, reversed")
        assert "sort by the next column" not in terminal.screen()
        terminal.press("+")
        terminal.wait_for("every 2 s")
        terminal.resize(40, 6)
        terminal.wait_for("^vnet top.*h1c1")
        terminal.press("q")
        assert terminal.program.wait(10) == 0
        written = terminal.read_rest()
        assert written.index(ENTER_SCREEN) < written.rindex(LEAVE_SCREEN)
        assert termios.tcgetattr(terminal.inside) == terminal.settings, "the terminal's settings are restored"


def test_small_terminals_and_a_stopped_daemon(topology: Topology):
    host = topology.hosts[1]
    with top(host, columns=30, lines=4) as terminal:
        terminal.wait_for("h2c1|h1")
        terminal.resize(1, 1)
        time.sleep(0.2)
        terminal.resize(90, 12)
        terminal.wait_for("interface +h2c1")
        process.stop(host.file(".pid"))
        terminal.wait_for("cannot reach vnetd")
        daemon.start(topology, host)
        terminal.wait_for("s sort")
        terminal.press("\x03")
        assert terminal.program.wait(10) == 0


def test_without_a_terminal_it_prints_a_table_or_json(topology: Topology):
    host = topology.hosts[0]
    table = daemon.vnet(host, "top").splitlines()
    assert table[0].split()[:2] == ["KIND", "NAME"]
    assert {tuple(line.split()[:2]) for line in table[1:]} >= {("interface", "h1c1"), ("link", "h2")}
    answer = json.loads(daemon.vnet(host, "top", "--json", "--sort", "name"))
    assert [port["name"] for port in answer["ports"]] == ["h1c1", "h2"]
    assert answer["interval_s"] >= 1
    assert all(port["in_frames_per_s"] >= 0 for port in answer["ports"])


def test_the_doctor_examines_the_daemon(topology: Topology):
    host = topology.hosts[0]
    vnet = ["ip", "netns", "exec", host.namespace, str(daemon.binaries() / "vnet")]
    socket = ["--socket", str(host.file(".sock"))]
    # After an outage the link stays degraded while its lost probes are within the window.
    wait_until("the link to be up", lambda: daemon.ask(host, "link", "list")[0]["state"] == "up", 40)
    done = subprocess.run([*vnet, *socket, "--json", "doctor"], capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    findings = {finding["check"]: finding for finding in answer["findings"]}
    problems = [finding for finding in answer["findings"] if finding["level"] == "problem"]
    assert done.returncode == (1 if problems else 0)
    assert answer["daemon"] == "h1"
    assert len(findings) == len(answer["findings"]) > 15
    for check in ("tun", "udp-offload", "files", "pinning", "interfaces", "links"):
        assert findings[check]["level"] == "ok", findings[check]
    assert "do" not in findings["tun"]
    assert all("do" in problem for problem in problems)
    alone = subprocess.run([*vnet, "--socket", "/nowhere", "doctor"], capture_output=True, text=True, check=False)
    assert alone.stdout.startswith("no vnetd answers")


def test_the_doctor_finds_a_dead_link(topology: Topology):
    host = topology.hosts[0]
    daemon.vnet(host, "link", "add", "h9", "--remote", "10.99.99.99:9000", "--trusted")
    try:
        with pytest.raises(LabError, match="status 1") as refusal:
            run([str(daemon.binaries() / "vnet"), "--socket", str(host.file(".sock")), "doctor"])
        assert "problem" in str(refusal.value)
    finally:
        daemon.vnet(host, "link", "del", "h9")
